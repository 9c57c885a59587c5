"""Search once more with the user's own pp and schedule, whose flags a user would rather keep."""

from __future__ import annotations

from megapipe.checks.inputs import answer
from megapipe.commands.plan.search.hiding import HIDING, with_fewest_flags
from megapipe.commands.plan.search.judged.found import SearchResults
from megapipe.commands.plan.search.listed.asked import SearchRestrictions, own_values
from megapipe.commands.plan.search.listing import best_of
from megapipe.commands.plan.search.taken import YOURS, to_take
from megapipe.commands.plan.verdict import Machine
from megapipe.config import Config
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.step import TimedPlan
from megapipe.plan.split import chunks_of
from megapipe.schedule import SCHEDULES

_KEPT = ("pp", "schedule", "sharding")
"""Axes that keep the user's own values."""


def narrowed(
    asked: SearchRestrictions, own: Config, *, hides: bool = False
) -> SearchRestrictions | None:
    """Return the restrictions of a search, narrowed to the user's pp, schedule and sharding.

    Plans with single activations moved are left out, as a user who keeps a schedule wants it plain.

    Args:
        asked: the user's restrictions of the search.
        own: the configuration of the user's own flags.
        hides: whether the user's own plan hides messages within passes.
    Returns: None if the flags say no pipeline, or one whose stages the layers do not fill. None if
        the restrictions exclude what they say, or if the search has been as narrow already.
    """
    mine = own_values(own)
    name = mine["schedule"]
    kept = {axis: asked.among.get(axis, frozenset([mine[axis]])) & {mine[axis]} for axis in _KEPT}
    sharded = mine["sharding"] == "yes"
    allowed = all(kept.values()) and asked.allows(pp=int(mine["pp"]), sharding=sharded)
    if mine["pp"] == "1" or name not in SCHEDULES or not allowed:
        return None
    among = {**asked.among, **kept}
    if among == asked.among or not asked.allows_schedule(name):
        return None
    chunks, problems = answer(lambda: chunks_of(own))
    if problems:
        return None
    if SCHEDULES[name].chunks is not None:
        chunks = None
    without = {*asked.without, "moves"}
    if not hides:
        without.add(HIDING)
    return SearchRestrictions(among, frozenset(without), chunks)


def like_yours(
    again: SearchResults, own: Config, yours: TimedPlan | None, machine: Machine, device: Device
) -> TimedPlan | None:
    """Return the plan to take of a search that `narrowed` has narrowed.

    Args:
        again: the result of this search.
        own: the configuration of the user's own flags.
        yours: the plan of these flags; None if there is none.
        machine: the memory of a device and of a host.
    Returns: None if no such plan fits, or if the user's own is as fast.
    """
    plans = [x.plan for x in best_of(again)]
    if not plans:
        return None
    advice = to_take(plans, own, yours, machine)
    if advice.number == YOURS:
        return None
    return with_fewest_flags(advice.plan, own.parallel, device)
