"""The optimizer step as passes of a table: update (U), gather (A) and validate (V)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from megapipe.schedule.dependencies import closed_prefix
from megapipe.schedule.families.step.reduction import refuse_twice
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Pass, Schedule, Step

Gather = Literal["none", "after", "ahead"]
"""When updated weights are gathered over data parallelism.

"after" gathers directly after the update, "ahead" at the start of the next step.
"""


def with_optimizer(
    schedule: Schedule, *, barrier: bool = True, gather: Gather = "none"
) -> Schedule:
    """Return a table of one step with the update of every stage (U).

    Arguments add V, which validates an update, and A, which gathers updated weights. Two rows with
    gather="ahead", the first with a barrier and the second without one:

        A A | F F F F B W F B W ... G G | U U
        A A | F F F F | V V | B W F B W ... G G | U U

    Args:
        schedule: a table with the reductions G, or without any.
        barrier: every update waits for the gradients of all ranks, because it needs their norm.
            Without it a rank updates after its own reductions. V of the next step then checks the
            update. V runs after the first forwards, which can be repeated if the update was wrong.
        gather: when A gathers the updated weights. "after" is directly after each update. "ahead"
            is at the start of the next step, in the order of its forwards. "none" adds no A.
    Raises: ScheduleError for a table that has one of the added kinds of pass, or RS.
    """
    added = {Kind.U}
    if not barrier:
        added.add(Kind.V)
    if gather != "none":
        added.add(Kind.A)
    refuse_twice(schedule, added)
    # Only forwards that can run again come before V: after a wrong update they are repeated with
    # the right weights.
    gathers = _gathers(schedule)
    cuts = closed_prefix(schedule)
    rows = []
    for rank, (row, cut) in enumerate(zip(schedule.ranks, cuts, strict=True)):
        own = schedule.placement.stages_on(rank)
        # Updates run in the order in which their gradients are reduced.
        reduced = [x.stage for step in row for x in step if x.kind is Kind.G] or list(own)
        front = gathers[rank] if gather == "ahead" else []
        back = [Pass(Kind.U, stage, 0) for stage in reduced]
        # A with number 1 belongs to the next step, whose forwards need the weights.
        if gather == "after":
            back = []
            for item in gathers[rank]:
                back += [Pass(Kind.U, item.stage, 0), item._replace(microbatch=1)]
        # V comes as late as possible. The other ranks' sums of the previous step have then most
        # likely arrived (Qi et al. 2023, sec. 4).
        check = []
        if not barrier:
            check = [Pass(Kind.V, stage, 0) for stage in own]
        rows.append((*_steps(front), *row[:cut], *_steps(check), *row[cut:], *_steps(back)))
    return replace(schedule, ranks=tuple(rows))


def with_gather(schedule: Schedule) -> Schedule:
    """Return a table of one step whose rows begin with A: gather the weights updated last step."""
    rows = zip(_gathers(schedule), schedule.ranks, strict=True)
    return replace(schedule, ranks=tuple((*_steps(gathers), *row) for gathers, row in rows))


def _gathers(schedule: Schedule) -> list[list[Pass]]:
    """Return each rank's passes A (gather updated weights), in the order of stages in the model.

    Forwards need the weights in this order. Replicas of stages on different ranks come in the same
    order.
    """
    place = schedule.placement
    gathers = []
    for rank in range(place.num_ranks):
        own = sorted(place.stages_on(rank), key=place.position)
        gathers.append([Pass(Kind.A, stage, 0) for stage in own])
    return gathers


def _steps(passes: list[Pass]) -> tuple[Step, ...]:
    return tuple((item,) for item in passes)
