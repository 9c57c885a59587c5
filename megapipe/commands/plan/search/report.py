"""Print the report of a search: the best plans with the flags to paste, and why others are out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap

from megapipe.commands.plan.narrow import with_narrow_state
from megapipe.commands.plan.pasted import pasted
from megapipe.commands.plan.search.compared import has_units
from megapipe.commands.plan.search.hiding import hides_unmeasured, pairs_passes
from megapipe.commands.plan.search.judged.found import SearchResults
from megapipe.commands.plan.search.listing import ListedPlan
from megapipe.commands.plan.search.taken import CLOSE, YOURS, is_equal
from megapipe.commands.plan.verdict import (
    HOST,
    NO_HOST,
    RESERVED,
    Machine,
    crossing_line,
    load_line,
    published_range,
)
from megapipe.config import Config
from megapipe.plan import GIB
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.late import LATE, is_late
from megapipe.plan.seconds.page import digest, in_short, numbers, recomputes
from megapipe.plan.seconds.step import TimedPlan
from megapipe.schedule import Kind

EQUAL = f"equal in time, within {CLOSE:.0%}: "
_COLUMNS = 98
"""The columns of a line on what the figures mean, without its indent."""
_LEAN = 0.5
"""The fraction of the memory that plans may take from which a line says how to ask for less."""
_NO_PIPELINE = (
    "on 1 pipeline rank a virtual stage is the layers whose weights are gathered, or whose",
    "gradients are summed, together",
)
"""Why a plan without a pipeline has stages."""
_NOT_SEARCHED = "not searched: attention, precision, kernels, graphs, unasked slices"
"""What the user may try by hand."""
LeftOut = Callable[[Config], list[str]]
"""Returns the user's flags that a plan cannot have, by its configuration."""


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
        changed: the fastest plan with one flag changed; None if no change makes it faster.
    """

    plan: TimedPlan | None = None
    refused: str = ""
    changes: tuple[str, ...] = ()
    linked: tuple[str, ...] = ()
    changed: TimedPlan | None = None


def report(
    found: SearchResults,
    listed: Sequence[ListedPlan],
    machine: Machine,
    device: Device | None = None,
    yours: UserPlan | None = None,
    undone: LeftOut = _none,
    lacking: str = "",
) -> str:
    """Return the text with the best plans, their flags to paste, and why the others are out.

    Args:
        found: the result of the search.
        listed: its best plans, fastest first.
        machine: the memory of a device and of a host.
        device: the device whose peak MFU is measured by; None for an H100.
        yours: the plan of the user's own flags; None to leave it out.
        undone: says which of the user's flags a plan cannot have.
        lacking: if nothing fits, lines on plans for which the host alone is short.
    """
    best = [x.plan for x in listed]
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
        if lacking:
            lines.append(lacking)
        elif (x := found.nearest) is not None:
            lines.append(f"least memory: {summary(x, device)}")
            lines += [
                f"      {machine.fits(x.plan, x.config)}",
                f"      {pasted(x.config, undone(x.config))}",
                *with_narrow_state(x, device, machine),
            ]
        return "\n".join([*lines, RESERVED, *[HOST] * bool(found.lost[NO_HOST])])
    first = best[0]
    lines = []
    for n, one in enumerate(listed, 1):
        x = one.plan
        lines.append(f"{n:2}. {one.why}: {summary(x, device)}")
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
    if min(x.peak for x in best) > _LEAN * machine.limit:
        lines.append(_leaner(machine))
    lines.append(f"the other plans: {_lost(found)}")
    late = any(is_late(x.config) for x in best)
    late |= yours is not None and yours.plan is not None and is_late(yours.plan.config)
    return ended + "\n".join([*lines, *_meaning(best, late=late)])


def _leaner(machine: Machine) -> str:
    """Return a line on how to ask for plans that need half of the memory that plans may take."""
    half = _LEAN * machine.limit / GIB
    free = machine.device / GIB - half
    return (
        f"plans may fill all of the {machine.limit / GIB:.3g} GiB, and all of these need more than "
        f"half: --reserved-gib {free:.3g} asks for plans of at most {half:.3g}"
    )


def _meaning(best: list[TimedPlan], *, late: bool) -> list[str]:
    """Return a heading, and lines on what the figures of a page mean and how sure they are.

    tools/bench/published has measured the errors of predictions.

    Args:
        best: the plans of the list, fastest first.
        late: whether steps of some plans end without a barrier.
    """
    differ = "schedule or recomputation"
    others = "others not known"
    if best[0].config.model.has_experts:
        # Few layouts of a model with experts were ever compared.
        differ = "schedule, recomputation or etp within a node"
        others = "two by 41% and 103%"
    lines = [
        RESERVED,
        HOST,
        *wrap(LATE * late, _COLUMNS),
        "how sure: seconds are off by 12% on average, 43% at most (29 published runs); ratios by "
        "less than",
        f"{CLOSE:.0%} if only {differ} differs (30 pairs), {others}",
        "assumed: pairs of passes and --tp-comm-overlap hide messages under products; no GPU "
        "measured it",
    ]
    if hides_unmeasured(best[0]):
        lines.append("plan 1 rests on this")
    lines.append(_NOT_SEARCHED)
    if any(has_units(x.config) for x in best):
        lines += _NO_PIPELINE
    return ["what these numbers mean, on every page:", *(f"  {line}" for line in lines)]


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
    if place > 1:
        known = published_range(x, best[0], device)
        if known:
            lines[-1] += f"; by the two published pairs {known}, so measure yours first"
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
        text += f"ep {ep} x etp {etp}, "
    text += f"micro batch {micro}, {x.schedule}, "
    nothing = "no layer as a whole" if x.moves else "nothing"
    text += f"recomputes {recomputes(config.model) or nothing}"
    if config.parallel.vocab_parallel_pipeline:
        text += ", vocabulary on all pipeline ranks"
    if is_late(config):
        text += ", without a barrier"
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
