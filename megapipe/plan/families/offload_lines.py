"""Words on a plan's table that moves activations out of the way."""

from __future__ import annotations

from megapipe.plan.plan import Plan
from megapipe.plan.state import GIB
from megapipe.schedule import Timeline
from megapipe.schedule.families.offload.rules import MOVES
from megapipe.schedule.views.moved import describe_moves


def moved_lines(plan: Plan) -> list[str]:
    """Lines on what the plan's table moves and why, what each rank saves by it, and what it takes; none if nothing."""
    if plan.copies is None or not plan.schedule.kinds & MOVES:
        return []

    def also(before: Timeline, now: Timeline) -> str:
        longer = now.makespan / before.makespan - 1
        return (
            f": ranks hold at most {max(now.peak) / GIB:.3g} GiB of them and not {max(before.peak) / GIB:.3g}, and the "
            + (f"step takes {longer:.1%} longer" if longer > 5e-4 else "step takes no longer")
        )

    step = plan.timeline.makespan
    first, *rows = describe_moves(
        plan.schedule, plan.costs, held=lambda x: f"{x / GIB:.3g} GiB", takes=lambda x: f"{x / step:.1%}", also=also
    )
    return [f"{plan.copies.flag}: {first}", *rows]
