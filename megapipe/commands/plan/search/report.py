"""Print the report of a search: the best plans with the flags to paste, and why others are out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megapipe.commands.plan.pasted import pasted
from megapipe.commands.plan.search.compared import has_units, plain_instead
from megapipe.commands.plan.search.hiding import hides_unmeasured, pairs_passes
from megapipe.commands.plan.search.judged.found import SearchResults, leaner
from megapipe.commands.plan.search.judged.screen import kind_of
from megapipe.commands.plan.search.search import BEST
from megapipe.commands.plan.search.taken import CLOSE, YOURS, demands, is_equal, plainest
from megapipe.commands.plan.verdict import (
    HOST,
    NO_HOST,
    RESERVED,
    Machine,
    crossing_line,
    load_line,
)
from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.page import digest, in_short, numbers, recomputes
from megapipe.plan.seconds.step import Layout, TimedPlan
from megapipe.schedule import Kind

_SIMPLE = 3
"""Layouts of a report that need no more than a plain pipeline."""
_OF_SCHEDULES = 3 * BEST
"""Plans of a report that compares schedules: each may have a line with pairs and one without."""
EQUAL = f"equal in time, within {CLOSE:.0%}: "
NOT_SEARCHED = (
    "not searched: no plan has --vocab-parallel-pipeline, even if it is given: try plan with it by "
    "hand. --pipeline-slices are tried if they are given. Every plan keeps your kinds of "
    "attention, precision, kernels and CUDA graphs."
)
"""What the user may try by hand."""
NOT_OF_EXPERTS = "--moe-permute-fusion and --moe-grouped-gemm change nothing in any plan."
NO_PIPELINE = (
    "on 1 pipeline rank: sharded weights are gathered stage by stage, as FSDP does unit by unit. "
    "So such a plan has a schedule and --num-virtual-stages-per-pipeline-rank too: a virtual stage "
    "is the layers that are gathered together. Without sharding, the gradients of a virtual stage "
    "are summed while other gradients are computed. Nothing is sent between stages."
)
"""Why a plan without a pipeline has stages."""
LeftOut = Callable[[Config], list[str]]
"""Returns the user's flags that a plan cannot have, by its configuration."""


def errors(*, experts: bool) -> str:
    """Return a line on the errors of predictions, measured by tools/bench/published.

    Args:
        experts: the model has experts. Few of their layouts were ever compared.
    """
    differ = "schedule, recomputation or expert tensor parallelism"
    unknown = (
        "in the two published pairs, of experts, messages between nodes took less than predicted, "
        "and ratios were off by 41% and 103%"
    )
    if not experts:
        differ = "schedule or recomputation"
        unknown = "no published pair of dense models differs so"
    return (
        "how sure: predicted seconds are off by 12% on average, 43% at most (29 published runs). "
        f"For layouts of one model that differ in {differ}, ratios are off by less than "
        f"{CLOSE:.0%} (30 published pairs), so closer ones of them are called equal. Between other "
        f"layouts little is known: {unknown}. Messages of --tp-comm-overlap and messages of passes "
        "in pairs are assumed to hide as far as products are longer: no GPU has measured either."
    )


def _none(_: Config) -> list[str]:
    return []


@dataclass(frozen=True)
class UserPlan:
    """The plan of the user's own flags, to compare with the plans of a search.

    Attributes:
        plan: None if a run refuses the flags, or no layout is among them.
        refused: why a run refuses the flags; "" if it does not.
        changes: lines on changes of one flag that shorten its step.
        linked: lines on a flag that it has by --rates.
    """

    plan: TimedPlan | None = None
    refused: str = ""
    changes: tuple[str, ...] = ()
    linked: tuple[str, ...] = ()


def best_of(found: SearchResults) -> list[TimedPlan]:
    """Return about ten plans, fastest first: the best of each kind, the lean ones, then others.

    A kind is (whether weights are sharded, whether there is a pipeline, whether single activations
    are offloaded or recomputed). A lean plan needs a tenth less memory than every faster one. The
    plainest plan of those nearly as fast as the first is among them too. So is the fastest that
    hides no messages within passes, and of these the fastest three layouts without any of
    `demands`. Where schedules are compared, the best plan of each is. Virtual stages of an only
    pipeline rank are left out if they gain less than a percent.

    Args:
        found: the result of the search.
    """
    kept = [plain_instead(x, found.finished) for x in found.best.values()]
    ranked = sorted(kept, key=lambda x: x.step)
    first: dict[tuple[object, ...], TimedPlan] = {}
    for x in ranked:
        first.setdefault((*kind_of(x.config), x.moves), x)
    chosen = {id(x): x for x in (*first.values(), *leaner(ranked))}
    named = [plainest(found.finished)]
    if sure := [x for x in found.finished if not hides_unmeasured(x)]:
        named.append(plain_instead(min(sure, key=lambda x: x.step), found.finished))
    # Of several layouts, as the fastest may lack room for an uneven load of experts.
    simple: dict[Layout, TimedPlan] = {}
    for x in sorted(sure, key=lambda x: x.step):
        if not demands(x):
            simple.setdefault(x.layout, x)
    named += [*simple.values()][:_SIMPLE]
    chosen |= {id(x): x for x in named if x is not None}
    most = BEST
    if found.by_schedule:
        most = _OF_SCHEDULES
    for x in ranked:
        if len(chosen) >= most:
            break
        chosen[id(x)] = x
    return sorted(chosen.values(), key=lambda x: x.step)


def report(
    found: SearchResults,
    machine: Machine,
    device: Device | None = None,
    yours: UserPlan | None = None,
    undone: LeftOut = _none,
    take: str = "",
) -> str:
    """Return the text with the best plans, their flags to paste, and why the others are out.

    Args:
        found: the result of the search.
        machine: the memory of a device and of a host.
        device: the device whose peak MFU is measured by; None for an H100.
        yours: the plan of the user's own flags; None to leave it out.
        undone: says which of the user's flags a plan cannot have.
        take: a line on the plan to take where others are nearly as fast as the first. If nothing
            fits, lines on plans for which the host alone is short.
    """
    best = best_of(found)
    ended = ""
    if found.stopped:
        ended = f"the search was stopped{found.stopped}; these are the best plans until then\n"
    if found.unlisted:
        ended += (
            "there was no time to list all layouts of more context parallelism than "
            f"{found.unlisted}: --search-seconds gives more, --fix and --among leave fewer\n"
        )
    if not best and not any(found.lost.values()):
        return f"{ended}no plan of the search has what --fix, --among and --without ask for"
    device = device or Device()
    if not best:
        lines = [f"{ended}nothing fits: {_lost(found)}"]
        if take:
            lines.append(take)
        elif (x := found.nearest) is not None:
            lines.append(f"least memory: {summary(x, device)}")
            lines += [
                f"      {machine.fits(x.plan, x.config)}",
                f"      {pasted(x.config, undone(x.config))}",
            ]
        return "\n".join([*lines, *_notes(found)])
    first = best[0]
    lines = []
    for n, x in enumerate(best, 1):
        lines.append(f"{n:2}. {summary(x, device)}")
        if n > 1:
            lines.append(f"      {_slower(x, first)}")
        lines.append(f"      {machine.fits(x.plan, x.config)}")
        lines.append(f"      {pasted(x.config, undone(x.config))}")
    if yours is not None:
        lines += _of_yours(yours, best, machine, device)
    if load := load_line(first.plan, first.config, machine.limit):
        lines.append(f"of plan 1 {load}")
    if first.moves:
        lines.append(_without(found, best, undone))
    if any(has_units(x.config) for x in best):
        lines.append(NO_PIPELINE)
    lines.append(f"the other plans: {_lost(found)}")
    experts = first.config.model.has_experts
    sure = errors(experts=experts)
    if hides_unmeasured(first):
        sure += " Plan 1 rests on this."
    lines += [*_notes(found), sure, NOT_SEARCHED]
    if experts:
        lines.append(NOT_OF_EXPERTS)
    # A terminal shows the end of a long page.
    if take:
        lines.append(take)
    return ended + "\n".join(lines)


def _notes(found: SearchResults) -> list[str]:
    """Return what the page's figures of memory mean, and the remedy for plans without room."""
    return [RESERVED, *[HOST] * bool(found.best or found.lost[NO_HOST])]


def _slower(x: TimedPlan, first: TimedPlan) -> str:
    """Return a text: how much slower `x` is than `first`, and which cause adds most seconds."""
    worst = max(x.parts, key=lambda name: x.parts[name] - first.parts[name])
    more = (x.parts[worst] - first.parts[worst]) / first.step
    slower = x.step / first.step - 1
    text = f"{slower:.1%} slower than the first, {worst} {more:+.1%} of its step"
    return f"{EQUAL * is_equal(first, x)}{text}"


def _of_yours(
    yours: UserPlan, best: list[TimedPlan], machine: Machine, device: Device
) -> list[str]:
    """Return lines on the user's own plan: its numbers, its position among the others, and why.

    Args:
        yours: the user's plan.
        best: the plans of the report, fastest first.
        machine: the memory of a device and of a host.
    """
    x = yours.plan
    if x is None:
        return [f"{YOURS}: a run refuses these flags: {yours.refused}"] if yours.refused else []
    lines = [f"{YOURS}: {summary(x, device)}"]
    verdict = machine.fits(x.plan, x.config)
    lines.append(f"      {verdict}")
    place = sum(other.step < x.step for other in best) + 1
    has_room = "does not fit" not in verdict
    if place > 1 and not has_room:
        # A plan that cannot run has no place among plans that run.
        lines.append(f"      if it had room: {_slower(x, best[0])}")
    elif place > len(best) == 1:
        lines.append(f"      {_slower(x, best[0])}")
    elif place > len(best):
        lines.append(f"      slower than all of these {len(best)}: {_slower(x, best[0])}")
    elif place > 1:
        lines.append(f"      number {place} of these {len(best)}: {_slower(x, best[0])}")
    elif not has_room:
        lines.append("      faster than all of these, if it had room")
    else:
        lines.append("      faster than all of these")
    changes = list(yours.changes)
    if crossing := crossing_line(x.config, device):
        changes.insert(0, crossing)
    return [*lines, *(f"      {line}" for line in changes)]


def summary(x: TimedPlan, device: Device) -> str:
    """Return times, memory, layout, schedule and recomputation of a plan in a line."""
    config = x.config
    tp, cp, pp, micro, ep, etp = x.layout
    text = f"{in_short(numbers(x, device))}: "
    text += f"{config.data_parallel_size} data"
    if "sharding" in x.plan.own:
        text += ", sharded,"
    text += f" x {pp} pipeline x {cp} context x {tp} tensor, "
    if config.model.has_experts:
        text += f"experts {ep} x {etp}, "
    text += f"micro batch {micro}, {x.schedule}, "
    text += f"recomputes {recomputes(config.model) or 'nothing'}"
    text += _paired(x)
    if config.overlaps_tp:
        text += ", tensor-parallel messages overlapped"
    if x.moves:
        text += f"; {_moved(x)}"
    return f"{text}; plan {digest(x.plan, config)}"


def _paired(x: TimedPlan) -> str:
    """Return who runs passes in pairs, the schedule or a flag, as a text for the report.

    The text is "" if no passes run together.
    """
    if not pairs_passes(x):
        return ""
    if not x.config.parallel.overlap_moe_expert_parallel_comm:
        return ", passes in pairs by the schedule itself"
    text = ", passes in pairs by --overlap-moe-expert-parallel-comm"
    # The name of the flag speaks of experts, and its pairs hide any communication.
    if not x.config.model.has_experts:
        text += " (which also pairs passes without experts)"
    return text


def _moved(x: TimedPlan) -> str:
    """Return how many activations are offloaded and recomputed, as a text for the report."""
    count = Counter(item.kind for item in x.plan.schedule.passes())
    moved = []
    if count[Kind.O]:
        moved.append(f"{count[Kind.O]} copied")
    if count[Kind.R]:
        moved.append(f"{count[Kind.R]} computed again")
    return f"of {count[Kind.F]} activations {' and '.join(moved)}"


def _without(found: SearchResults, best: list[TimedPlan], undone: LeftOut) -> str:
    """Return a line on the best plan that neither offloads nor recomputes single activations.

    Args:
        found: the result of the search.
        best: the plans of the report, fastest first.
        undone: says which of the user's flags a plan cannot have.
    """
    without = "without copies to the host and second forwards of single activations"
    x = found.plain
    if x is None:
        return f"{without} no plan fits"
    slower = f"{x.step / best[0].step - 1:.1%} slower than the first"
    text = f"{without}: {x.step:.4g} s, {slower}, {x.schedule}"
    for n, other in enumerate(best, 1):
        if other is x:
            return f"{text}, number {n}"
    return f"{text}, {pasted(x.config, undone(x.config))}"


def _lost(found: SearchResults) -> str:
    return "; ".join(f"{count:,} {why}" for why, count in found.lost.most_common() if count)


def why(names: tuple[str, ...], best: list[TimedPlan], yours: UserPlan) -> str:
    """Return a table of the seconds of two plans by cause, and their differences.

    Args:
        names: two plans: numbers from 1 in `best`, or "yours".
        best: the plans of the report.
        yours: the plan of the user's own flags.
    Raises: ConfigError for a name that is no plan of the list.
    """
    known: Mapping[str, TimedPlan | None] = {
        **{str(n): x for n, x in enumerate(best, 1)},
        YOURS: yours.plan,
    }
    numbered = f"1 to {len(best)}" if best else "no numbers"
    problems = [
        f"--why {name} is no plan of the list: it has {numbered}"
        f"{', and yours' if yours.plan else ''}."
        for name in names
        if known.get(name) is None
    ]
    if problems:
        raise ConfigError(problems)
    a, b = (known[name] for name in names)
    assert a is not None
    assert b is not None
    rows = [("seconds of a step", *names, "difference")]
    causes = {"model": a.step - sum(a.parts.values())} | a.parts
    others = {"model": b.step - sum(b.parts.values())} | b.parts
    for cause, seconds in causes.items():
        other = others[cause]
        rows.append((cause, f"{seconds:z.4f}", f"{other:z.4f}", f"{other - seconds:+z.4f}"))
    rows.append(("all", f"{a.step:.4f}", f"{b.step:.4f}", f"{b.step - a.step:+.4f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in rows
    )
