"""Embedding and head shared by all ranks of the pipeline, as passes of any table (Yeung et al. 2024, arXiv 2411.05288).

Per microbatch every rank looks up its rows (E), whose sum is the first stage's input; the last hidden states reach all
ranks, each makes its part of the softmax and of the input gradient (S), and the last stage combines them (C), after
which the gradients of the rows wait like W (T, EW). One barrier: B of the last stage follows C. Depths of multi-token
prediction embed rows of the same E, and their heads are part of the same S and T, as no gradient comes back before
that of the last depth; each combines its own loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Pass, Placement, Schedule
from megapipe.schedule.simulate import simulate
from megapipe.schedule.transforms.merge import merged


def with_vocabulary(schedule: Schedule, costs: Costs = UNIT) -> Schedule:
    """The table of one step with the passes of the vocabulary's shares, merged into its rows with at most one
    microbatch more activation on any rank.

    Raises: ScheduleError for a table that has such passes, or passes of a stage as a whole, or a rank without a stage
        in each chain.
    """
    place = replace(schedule.placement, vocabulary=True)
    if (
        schedule.placement.vocabulary
        or schedule.cuts
        or any(kind.traits.per_stage for kind in schedule.kinds)
    ):
        raise ScheduleError(
            f"{schedule.name}: vocabulary passes are put into a table of F, B, W and BW of whole microbatches alone."
        )
    refuse_apart(schedule.name, place)
    before, held = simulate(schedule, costs), costs.memory(place).b
    room = [peak + sum(held[s] for s in place.stages_on(r)) for r, peak in enumerate(before.peak)]
    table = replace(schedule, placement=place)
    return merged(table, list(all_shared(table)), costs, room)


def refuse_apart(name: str, place: Placement) -> None:
    """Raises: ScheduleError for ranks without a stage in each chain, if they are to share the vocabulary."""
    if place.vocabulary and any(
        len(place.shares(first)) < place.num_ranks
        for first in range(0, place.num_stages, place.chain)
    ):
        raise ScheduleError(
            f"{name}: to share the vocabulary every rank must have a stage of each chain. "
            "Leave out --vocab-parallel-pipeline or take another schedule."
        )


def all_shared(schedule: Schedule) -> Iterator[Pass]:
    """The passes of the vocabulary's shares that its table has."""
    place = schedule.placement
    for microbatch in range(schedule.num_microbatches):
        first = schedule.chain_of(microbatch) * place.chain
        yield from (
            Pass(k, s, microbatch)
            for k in Kind
            if k.traits.at
            for s in place.meant(first, k.traits.at)
        )
