"""Give a lost rank's microbatches to its peers, in a joint table of all data-parallel replicas.

A rank of a pipeline is lost, and its peers in the other replicas have the same stages. They run its
passes too, where they have time for them, and no other rank runs other passes (ReCycle, Gandhi et
al. 2024). The result is a table as any other: it is verified, timed and drawn.

If passes are ordered by time alone, a peer runs its own and the lost rank's pipeline at once. The
peer then holds activations of both, and has to stop one of them where memory is short. Blocks are
for this case: a peer runs its part of the lost rank's microbatches in one block, between two of its
own microbatches. Each peer has its block in another part of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf

from megapipe.errors import ScheduleError
from megapipe.schedule.core.joint import Joint, joint, joint_costs, positions_of, unordered
from megapipe.schedule.core.room import Room
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.dependencies import Dependencies
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Pass, Schedule, Step
from megapipe.schedule.simulate import simulate


def reroute(
    table: Schedule,
    replicas: int,
    lost: tuple[int, int],
    costs: Costs = UNIT,
    memory: float | None = None,
) -> Schedule:
    """Return the joint table of data-parallel replicas, if one of them has lost a rank.

    The same pipeline rank of each other replica (a peer) runs part of the lost rank's passes.
    Three ways to order the passes of a peer are tried, and the fastest is returned. With a limit on
    memory and several peers, blocks are tried in these ways too.

    Args:
        table: the table of one replica, of one training step.
        replicas: number of replicas.
        lost: (replica, pipeline rank) of the lost rank.
        costs: the costs of `table`.
        memory: limit on a rank's activation, in the unit of the costs; None for no limit.
    Raises: ScheduleError if there is no such rank, if it has no peer, or if a peer would hold too
        much. Also if the table has other passes than F, B, W and BW, or several steps.
    """
    broken, gone = lost
    name = f"rank {gone} of replica {broken}"
    if not (0 <= broken < replicas and 0 <= gone < len(table.ranks)):
        raise ScheduleError(
            f"there is no {name}, only {len(table.ranks)} ranks of {replicas} replica(s)."
        )
    if replicas < 2:
        raise ScheduleError(f"{name} has no peer: its stages are on no other rank.")
    joints = [Joint(table, replicas, lost)]
    # With one peer there is one block, and no order of blocks to choose.
    if memory is not None and replicas > 2:
        joints.append(replace(joints[0], positions=positions_of(table, costs)))
    costs = joint_costs(costs, table)
    # Sums of stages' memory are rounded, and the limit is often such a sum: the fullest rank's.
    limit = inf if memory is None else memory * (1 + 1e-9)
    tables = []
    for ranks in joints:
        in_turn = unordered(ranks)
        queues = list(ranks.queues())
        room = Room.of(in_turn, queues, costs, limit)
        if room.least > limit:
            raise ScheduleError(
                f"{table.name} without {name}: a peer would hold {room.least:g}, more than "
                f"{limit:g}."
            )
        gates = _gates(ranks, queues, room)
        for priority in _priorities(ranks, costs):
            rows = _by_time(in_turn, queues, costs, priority, room, gates)
            found = replace(in_turn, ranks=tuple(map(tuple, rows)))
            time = simulate(found, costs)
            tables.append((time.makespan, max(time.peak), found))
    return min(tables, key=lambda x: x[:2])[2]


Priority = Callable[[int, Step], float]
"""(number of a queue, its next step) -> a number; of steps that can start at one time the least is
next."""


def _priorities(ranks: Joint, costs: Costs) -> Iterator[Priority]:
    """Yield three rules by which a peer chooses between its own passes and passes of the lost rank.

    The rules are: by the time at which a pass would start without a loss, own passes first, the
    lost rank's passes first. The last two take less memory or less time for some tables.

    Args:
        ranks: the joint table, with a lost rank.
        costs: the costs of the joint table.
    """
    whole = simulate(joint(ranks.table, ranks.replicas), costs)
    yield lambda _, step: whole.start[step[0]]
    yield lambda queue, _: queue
    yield lambda queue, _: -queue


Gate = tuple[int, int, int]
"""(step of a queue, other queue, number of its steps that are over before that step)."""


def _gates(ranks: Joint, queues: Sequence[tuple[int, list[Step]]], room: Room) -> dict[int, Gate]:
    """Return, for queues of peers that run the lost passes in blocks, which step waits for which.

    A peer begins its block when all its own microbatches before the block have begun. It begins its
    later microbatches when the whole block has begun. So one part fills the pipeline while the part
    before it ends.

    Args:
        ranks: the joint table. Without blocks there are no gates.
        queues: (rank, steps in order).
        room: says which two queues a rank has.
    Returns: number of a queue -> its gate.
    """
    found: dict[int, Gate] = {}
    for adopted, (_, block) in enumerate(queues):
        own = room.other[adopted]
        # The first of a rank's two queues has its own steps.
        if not ranks.positions or own is None or own > adopted:
            continue
        _, steps = queues[own]
        (border,) = ranks.borders(steps[0][0].microbatch % ranks.replicas)
        places = [ranks.positions[step[0].microbatch // ranks.replicas] for step in steps]
        before = sum(place < border for place in places)
        found[own] = (before, adopted, _begun(block))
        found[adopted] = (0, own, _begun(steps[:before]))
    return found


def _begun(steps: Sequence[Step]) -> int:
    """Return the number of steps up to the last forward."""
    forwards = [i for i, step in enumerate(steps) if any(x.kind is Kind.F for x in step)]
    return max(forwards, default=-1) + 1


def _by_time(
    table: Schedule,
    queues: Sequence[tuple[int, list[Step]]],
    costs: Costs,
    priority: Priority,
    room: Room,
    gates: Mapping[int, Gate],
) -> list[list[Step]]:
    """Return the row of each rank, taken step by step from its queues.

    Of the first steps of a rank's queues, the one that can start earliest is next.

    Args:
        table: the joint table, whose order of steps is ignored.
        queues: (rank, steps in order). A rank may have one queue for its own steps and one for
            steps of the lost rank.
        costs: the costs of the joint table.
        priority: chooses among steps that can start at one time.
        room: the memory of a rank.
        gates: for some queues, a step that waits for the other queue.
    """
    place = table.placement
    needs = Dependencies(table)
    sliced = table if table.cuts else None
    ranks = len(table.ranks)
    rows: list[list[Step]] = [[] for _ in range(ranks)]
    free = [0.0] * ranks
    ended: dict[Pass, float] = {}
    at = [0] * len(queues)
    left = sum(len(steps) for _, steps in queues)

    def inputs(step: Step) -> list[Pass]:
        """Return the passes of other steps that a step needs."""
        return [need for item in step for need in needs.of(item) if need not in step]

    # Asked once for each step, and not each time that a step elsewhere is chosen.
    waits = [list(map(inputs, steps)) for _, steps in queues]

    def start(queue: int) -> float | None:
        """Return when the next step of a queue can start; None if it cannot start yet.

        It cannot without its inputs, memory, or the step of the other queue that its gate names.
        """
        rank, steps = queues[queue]
        if at[queue] == len(steps) or not room.fits(queue, at):
            return None
        gated, other, over = gates.get(queue, (len(steps), queue, 0))
        if at[queue] >= gated and at[other] < over:
            return None
        time = free[rank]
        for need in waits[queue][at[queue]]:
            if need not in ended:
                return None
            time = max(time, ended[need] + costs.lag(place.rank_of[need.stage], rank, ranks))
        return time

    while left:
        starts = []
        for n, (_, steps) in enumerate(queues):
            when = start(n)
            if when is not None:
                starts.append((when, priority(n, steps[at[n]]), n))
        time, _, n = min(starts)
        rank, steps = queues[n]
        step = steps[at[n]]
        end = time + costs.of_step(step, place, sliced)
        rows[rank].append(step)
        free[rank] = end
        ended |= dict.fromkeys(step, end)
        at[n] += 1
        left -= 1
    return rows
