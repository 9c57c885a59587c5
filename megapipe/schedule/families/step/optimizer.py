"""The optimizer's step as passes: U behind everything, A before the forwards that read its weights, V if none waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from megapipe.schedule.dependencies import closed_prefix
from megapipe.schedule.families.step.reduction import refuse_twice
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Pass, Schedule, Step

Gather = Literal["none", "behind", "ahead"]


def with_optimizer(
    schedule: Schedule, *, barrier: bool = True, gather: Gather = "none"
) -> Schedule:
    """The table of one step, of `with_reduction`, with the update of every stage.

    Args:
        barrier: every update waits for the gradients of all ranks, whose norm it needs. Without, a rank updates when
            its own are reduced, and V of the next step stands behind forwards alone, those whose inputs all ranks can
            make again if the update was wrong.
        gather: of the updated weights over data parallel: none, right behind the update, or at the start of the next
            step, in the order in which its forwards need them.
    Raises: ScheduleError for a table that has one of these.
    """
    refuse_twice(
        schedule,
        {Kind.U} | ({Kind.V} if not barrier else set()) | ({Kind.A} if gather != "none" else set()),
    )
    rows, cuts, gathers = [], closed_prefix(schedule), _gathers(schedule)
    for rank, (row, cut) in enumerate(zip(schedule.ranks, cuts, strict=True)):
        own = schedule.placement.stages_on(rank)
        # Updates in the order in which gradients are there.
        reduced = [x.stage for step in row for x in step if x.kind is Kind.G] or list(own)
        front = gathers[rank] if gather == "ahead" else []
        back = [Pass(Kind.U, s, 0) for s in reduced]
        if gather == "behind":
            back = [
                x
                for a in gathers[rank]
                for x in (Pass(Kind.U, a.stage, 0), a._replace(microbatch=1))
            ]
        # Behind all that can run again: the later V stands, the more of the step before's sums is over by then.
        check = [] if barrier else [Pass(Kind.V, s, 0) for s in own]
        rows.append((*_steps(front), *row[:cut], *_steps(check), *row[cut:], *_steps(back)))
    return replace(schedule, ranks=tuple(rows))


def with_gather(schedule: Schedule) -> Schedule:
    """The table of one step that begins with the gathering of the weights that the step before has updated."""
    rows = zip(_gathers(schedule), schedule.ranks, strict=True)
    return replace(schedule, ranks=tuple((*_steps(gathers), *row) for gathers, row in rows))


def _gathers(schedule: Schedule) -> list[list[Pass]]:
    """Gathers of each rank from the model's first slice on, as its forwards need them: replicas come in one order."""
    place = schedule.placement
    stages = (sorted(place.stages_on(rank), key=place.position) for rank in range(place.num_ranks))
    return [[Pass(Kind.A, stage, 0) for stage in own] for own in stages]


def _steps(passes: list[Pass]) -> tuple[Step, ...]:
    return tuple((item,) for item in passes)
