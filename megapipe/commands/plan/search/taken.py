"""Say which plan of a search to take, among those whose steps predictions cannot order."""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.commands.plan.pasted import changed, chosen_fields
from megapipe.commands.plan.search.hiding import hides_unmeasured
from megapipe.commands.plan.verdict import Machine, load_line, of_busy_experts
from megapipe.config import Config
from megapipe.flags.flag import flags_of as all_flags
from megapipe.plan.seconds.step import TimedPlan
from megapipe.schedule import SCHEDULES
from megapipe.schedule.catalogue import PLAIN

YOURS = "yours"
CLOSE = 0.05
"""Predictions cannot distinguish plans with the same layout whose steps differ by less.

`is_equal` says which plans these are. Of 32 published pairs of layouts the ratio of the steps of 30
is predicted with a smaller error (tools/bench/published/pairs.py).
"""

_SPARE = 0.01
"""The fraction of a device's memory that a plan to take has to spare, apart from the reserve."""
_LEAST_GAIN = 0.01
"""The least gain, as a fraction of the step, of a plan 1 that is named next to the one to take."""
_SHARDED = "sharded weights"
_AT_ONCE = "weights that are all gathered at once"


def to_take(
    best: Sequence[TimedPlan], own: Config, yours: TimedPlan | None, machine: Machine
) -> tuple[int | str, str]:
    """Return (number of the plan to take or "yours", a line for the report).

    Nobody knows how much of their messages plans hide within passes, by pairs or by
    --tp-comm-overlap. So they count only if the user's own plan hides messages too, or if there are
    no others.

    A user's own plan that is as fast as the first of the plans that count, within CLOSE, needs no
    change. Otherwise, of all plans that are as fast as this first one, the one is taken that
    changes fewest of the user's flags. Plans with less than _SPARE of a device to spare, under an
    uneven load of their experts, come last. So do plans with more of `demands` than the user's own.
    Of several such plans it is the one that needs least memory. The line is "" for a single plan.

    Args:
        best: the plans of the report, fastest first.
        own: the configuration of the user's own flags.
        yours: the plan of these flags; None if there is none.
        machine: the memory of a device and of a host.
    """
    counted = list(range(len(best)))
    if yours is None or not hides_unmeasured(yours):
        counted = [n for n in counted if not hides_unmeasured(best[n])] or counted
    first = best[counted[0]]
    limit = (1 + CLOSE) * first.step
    fits = (
        yours is not None
        and yours.peak <= machine.limit
        and not machine.refuses(yours.plan, yours.config)
    )
    others = _unmeasured(best[0], first)
    # The line does not speak of plans that do not count.
    are_left = len(counted) < len(best)
    if yours is not None and fits and yours.step < limit:
        line = f"take {YOURS}: no plan is faster by more than predictions can tell"
        if are_left:
            line = f"take {YOURS}: no plan without hidden messages is faster by more than "
            line += "predictions can tell"
        return YOURS, line + others
    near = [n for n in counted if best[n].step < limit]
    if len(best) == 1:
        return 1, ""
    if len(near) == 1:
        slower = f"take {near[0] + 1}: all other plans are slower by {CLOSE:.0%} or more"
        if are_left:
            slower = f"take {near[0] + 1}, the fastest without hidden messages"
        return near[0] + 1, slower + others
    counts = {n: len(changed(own, best[n].config)) for n in near}
    roomy, spare = _with_room(best, near, machine)
    known = _known(own, yours)

    def cost(n: int) -> tuple[int, int, float]:
        return len(demands(best[n]) - known), counts[n], best[n].peak

    taken = min(roomy, key=cost)
    of = f"within {CLOSE:.0%} of the first"
    if are_left:
        of = f"without hidden messages and within {CLOSE:.0%} of the fastest such plan"
    of += spare
    others_need = frozenset[str]().union(*(demands(best[n]) for n in roomy))
    if without := sorted(others_need - known - demands(best[taken])):
        of += f", without {', '.join(without)},"
    line = (
        f"take {taken + 1}: of the {len(near)} plans {of} it changes fewest of your flags "
        f"({counts[taken]}), and of several such plans it needs least memory"
    )
    if not all(is_equal(first, best[n]) for n in near):
        line += (
            ". Some of these have other layouts, and how far such ratios are off is not known: "
            "measure them next to it"
        )
    # The page has this line of plan 1 already.
    load = load_line(best[taken].plan, best[taken].config, machine.limit)
    if load and taken:
        line += f". Of plan {taken + 1} {load}"
    return taken + 1, line + others


def _with_room(
    best: Sequence[TimedPlan], near: list[int], machine: Machine
) -> tuple[list[int], str]:
    """Return (the plans with room, all if none has it; a text on them, "" if all have it).

    Args:
        best: the plans of the report.
        near: indices in `best` of the plans that may be taken.
    """
    peaks = {n: best[n].peak + of_busy_experts(best[n].plan, best[n].config) for n in near}
    spare = _SPARE * machine.device
    roomy = [n for n in near if peaks[n] + spare <= machine.limit] or near
    if len(roomy) == len(near):
        return roomy, ""
    text = f" {len(roomy)} have {_SPARE:.0%} of a device to spare"
    if any(peaks[n] > best[n].peak for n in near):
        text += ", also with an uneven load of their experts"
    return roomy, f"{text}. Of these"


def demands(x: TimedPlan) -> frozenset[str]:
    """Return, in words, what a plan needs in addition to a plain pipeline."""
    par = x.config.parallel
    found = []
    if par.use_megatron_fsdp:
        found.append(_SHARDED)
        place = x.plan.schedule.placement
        if par.shards_weights and place.num_stages == place.num_ranks:
            found.append(_AT_ONCE)
    elif par.pipeline_model_parallel_size == 1 and par.num_virtual_stages_per_pipeline_rank:
        found.append("virtual stages of one pipeline rank")
    if x.moves:
        found.append("single activations that are copied or computed again")
    entry = SCHEDULES.get(x.schedule)
    if entry is not None and entry.copies > 1:
        found.append("two copies of the weights")
    if entry is not None and entry.searched:
        found.append("a searched order")
    return frozenset(found)


def _known(own: Config, yours: TimedPlan | None) -> frozenset[str]:
    """Return the `demands` of the user's own flags.

    A run may refuse these flags as they are, and `yours` is then None.
    """
    if yours is not None:
        return demands(yours)
    return frozenset([_SHARDED, _AT_ONCE] * own.parallel.use_megatron_fsdp)


def _unmeasured(best: TimedPlan, sure: TimedPlan) -> str:
    """Return a sentence on how much the fastest plan gains by hiding messages.

    It begins with ". ", and is "" if the gain is below a percent.

    Args:
        best: the fastest plan.
        sure: the fastest plan that counts.
    """
    gain = 1 - best.step / sure.step
    if gain < _LEAST_GAIN:
        return ""
    return (
        f". Plan 1 is {gain:.1%} faster than the fastest of these, if its messages hide under "
        "products as assumed. No GPU has measured that, so measure it first"
    )


def is_equal(first: TimedPlan, x: TimedPlan) -> bool:
    """Return whether a plan is slower than the first by less than predictions can tell.

    The two must have the same layout, microbatch and sharding: of other pairs of plans nobody has
    published enough steps to say how far their predicted ratio is off.
    """
    *sizes, _ = first.layout
    *others, _ = x.layout
    shards = [one.config.parallel.use_megatron_fsdp for one in (first, x)]
    same = sizes == others and shards[0] == shards[1]
    return same and x.step < (1 + CLOSE) * first.step


def choices(config: Config) -> list[str]:
    """Return the fields that a search has set to other values than their defaults.

    The fewer there are, the plainer is the plan. The schedule 1f1b counts as a default.
    """
    chosen = chosen_fields(config)
    found = []
    for flag in all_flags(Config).values():
        is_chosen = flag.field in chosen.get(flag.section, ())
        if is_chosen and config.value(flag.field) not in (flag.default, PLAIN):
            found.append(flag.field)
    return found


def plainness(config: Config) -> tuple[bool, int]:
    """Return (whether weights are sharded, number of choices); less is plainer."""
    return config.parallel.use_megatron_fsdp, len(choices(config))


def plainest(plans: Sequence[TimedPlan]) -> TimedPlan | None:
    """Return the plan with the fewest choices of those within CLOSE of the fastest.

    Plans with sharded weights come after all others. Of several such plans the fastest is
    returned; None without plans.
    """
    least = min((x.step for x in plans), default=0.0)
    near = [x for x in plans if x.step < (1 + CLOSE) * least]
    return min(near, key=lambda x: (*plainness(x.config), x.step), default=None)
