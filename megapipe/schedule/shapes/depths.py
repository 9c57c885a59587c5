"""Depths of multi-token prediction as passes of any table: a side chain after the loss.

The table of the model's own chain stays as it is. Forwards and backwards of the depths run between
its passes, on the rank of each depth. The backward of the stage with the loss waits for them, as it
waits for its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from megapipe.errors import ScheduleError
from megapipe.schedule.core.merge import merged
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.kinds import LAYERS, Kind
from megapipe.schedule.passes import Pass, Schedule
from megapipe.schedule.simulate import simulate


def with_depths(
    schedule: Schedule,
    ranks: Sequence[int],
    costs: Costs = UNIT,
    *,
    shared: Callable[[Schedule], Iterable[Pass]] | None = None,
) -> Schedule:
    """Return the table of one step with modules of multi-token prediction (depths) after the loss.

    The second copy of the model in DualPipe has its depths on the mirrored ranks. Each of the
    rank's stages may hold d + 1 microbatches more than without the d depths, and d + 2 more with a
    shared vocabulary. Without `ranks` the table is returned unchanged.

    Args:
        ranks: the rank of each depth, from depth 1.
        costs: the costs of the stages of the model's own chain, then of the depths.
        shared: takes the table with depths, and returns the passes of a vocabulary that all ranks
            share. These passes are added in the same simulation, because both delay the backward of
            the loss: in two simulations, one after the other, the table is slower. None if the
            vocabulary is not shared.
    Raises: ScheduleError for a table with depths, slices, or other kinds of pass than F, B, W and
        BW. Also for a rank that does not exist.
    """
    place = schedule.placement
    if not ranks:
        return schedule
    if place.depths or place.vocabulary or schedule.cuts or not schedule.kinds <= {*LAYERS}:
        raise ScheduleError(
            f"{schedule.name}: multi-token prediction is put into a table of F, B, W and BW alone, "
            "and without depths."
        )
    if max(ranks) >= place.num_ranks:
        raise ScheduleError(
            f"{schedule.name}: a depth of multi-token prediction is to be on rank {max(ranks)}, "
            f"and there are {place.num_ranks} ranks, from 0. Use --depths {place.num_ranks - 1}."
        )

    # The same table in chains that have the depths at their end.
    further = replace(place.with_depths(ranks), vocabulary=shared is not None)

    def moved(x: Pass) -> Pass:
        """Return the pass with the number that its stage has in chains with depths at their end."""
        return x._replace(stage=x.stage // place.chain * further.chain + place.position(x.stage))

    rows = schedule.map(lambda step: (tuple(map(moved, step)),)).ranks
    table = replace(schedule, placement=further, ranks=rows)
    added = list(_passes(table, split=Kind.W in schedule.kinds))
    if shared is not None:
        added += shared(table)

    # A rank may hold what it holds without depths, and a microbatch more of each of its stages for
    # every pass that the backward of the loss waits for. Costs by stage name the depths last.
    alone = simulate(schedule, costs.of_positions(place.chain))
    more = 1 + len(ranks) + further.vocabulary
    each = zip(alone.peak, costs.held_by_rank(further), strict=True)
    room = [peak + more * held for peak, held in each]

    return merged(table, added, costs, room)


def _passes(table: Schedule, *, split: bool) -> Iterator[Pass]:
    """Yield the passes of all depths (modules of multi-token prediction) and microbatches.

    Args:
        table: a table whose placement has the depths.
        split: split the backwards into B and W, as the table does.
    """
    place = table.placement
    kinds = [Kind.F, Kind.BW]
    if split:
        kinds = [Kind.F, Kind.B, Kind.W]
    for microbatch in range(table.num_microbatches):
        # A microbatch runs through one chain: DualPipe has depths at the end of each of its two.
        first = table.chain_of(microbatch) * place.chain
        for stage in range(first + place.main, first + place.chain):
            yield from (Pass(kind, stage, microbatch) for kind in kinds)
