"""Depths of multi-token prediction as passes of any table: a side chain behind the stage with the loss.

The table of the model's own chain stays as it is; forwards and backwards of the depths stand between, on whatever rank
a depth is, and the backward of the stage with the loss waits for them, as it does for its loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.families.vocabulary.shares import all_shared, refuse_apart, with_vocabulary
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Pass, Placement, Schedule
from megapipe.schedule.simulate import simulate
from megapipe.schedule.transforms.merge import merged

_PASSES = {Kind.F, Kind.B, Kind.W, Kind.BW}


def with_depths(
    schedule: Schedule, ranks: Sequence[int], costs: Costs = UNIT, *, vocabulary: bool = False
) -> Schedule:
    """The table of one step with depth after depth on these ranks; of DualPipe's second chain on the mirrored ones.

    Args:
        costs: of the stages of the model's own chain, then of the depths. A rank holds at most one microbatch more for
            each depth, and one of each depth that it has.
        vocabulary: with the passes of its shares in the same play, as both hold back the backward of the loss: 1F1B on
            8 ranks with one depth and heads of four layers is 1.24 x perfect one after the other, 0.99 x so.
    Raises: ScheduleError for a table that has depths, shares of a vocabulary, or passes of a stage as a whole, and for
        a rank that is not there.
    """
    place = schedule.placement
    if not ranks:
        return with_vocabulary(schedule, costs) if vocabulary else schedule
    if place.depths or place.vocabulary or schedule.cuts or not schedule.kinds <= _PASSES:
        raise ScheduleError(
            f"{schedule.name}: multi-token prediction is put into a table of F, B, W and BW alone, and without depths."
        )
    if max(ranks) >= place.num_ranks:
        raise ScheduleError(
            f"{schedule.name}: a depth of multi-token prediction is to be on rank {max(ranks)}, and there are "
            f"{place.num_ranks} ranks, from 0. Use --depths {place.num_ranks - 1}."
        )
    further = replace(place.with_depths(ranks), vocabulary=vocabulary)
    refuse_apart(schedule.name, further)

    def moved(x: Pass) -> Pass:
        return x._replace(stage=x.stage // place.chain * further.chain + place.position(x.stage))

    rows = tuple(tuple(tuple(map(moved, step)) for step in row) for row in schedule.ranks)
    table, split = replace(schedule, placement=further, ranks=rows), Kind.W in schedule.kinds
    own = replace(
        costs,
        **{name: x[: place.chain] for name, x in vars(costs).items() if _by_stage(x, further)},
    )
    held = costs.memory(further).b
    room = [
        peak + (1 + len(ranks) + vocabulary) * sum(held[s] for s in further.stages_on(r))
        for r, peak in enumerate(simulate(schedule, own).peak)
    ]
    beside = [*_passes(table, split=split), *(all_shared(table) if vocabulary else ())]
    return merged(table, beside, costs, room)


def _by_stage(value: object, place: Placement) -> bool:
    return isinstance(value, tuple) and len(value) == place.chain


def _passes(table: Schedule, *, split: bool) -> Iterator[Pass]:
    place = table.placement
    kinds = (Kind.F, Kind.B, Kind.W) if split else (Kind.F, Kind.BW)
    for microbatch in range(table.num_microbatches):
        first = table.chain_of(microbatch) * place.chain
        for stage in range(first + place.main, first + place.chain):
            yield from (Pass(kind, stage, microbatch) for kind in kinds)
