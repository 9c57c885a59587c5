"""Embedding and head shared by all ranks of the pipeline, as passes of any table.

The method is vocabulary parallelism (Yeung et al. 2024, arXiv 2411.05288). For each microbatch
every rank looks up its rows (E). Their sum is the input of the first stage. The last hidden states
go to all ranks. Each computes its part of the softmax and of the input gradient (S), and the last
stage combines the parts (C). The gradients of the rows (T, EW) can be deferred like W. There is one
barrier: B of the last stage follows C.

Depths of multi-token prediction embed rows of the same E, and their heads are part of the same S
and T. No gradient returns before the last depth has its own, so this delays nothing. Each depth
combines its own loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import add

from megapipe.errors import ScheduleError
from megapipe.schedule.core.merge import merged
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Pass, Placement, Schedule
from megapipe.schedule.simulate import simulate


def with_vocabulary(schedule: Schedule, costs: Costs = UNIT) -> Schedule:
    """Return the table of one step with the passes of a vocabulary shared over all ranks.

    A rank then holds activations of at most one more microbatch than before, unless the order of
    the table requires more. A chain is the stages of one copy of the model.

    Args:
        costs: costs under which the rows are ordered.
    Raises: ScheduleError for a table that has slices, vocabulary passes or once-per-step passes
    such as G. Also for a rank without a stage in each chain.
    """
    place = replace(schedule.placement, vocabulary=True)
    of_stages = any(kind.traits.per_stage for kind in schedule.kinds)
    if schedule.placement.vocabulary or schedule.cuts or of_stages:
        raise ScheduleError(
            f"{schedule.name}: vocabulary passes are put into a table of F, B, W and BW of whole "
            "microbatches alone."
        )
    table = replace(schedule, placement=place)
    added = list(all_shared(table))
    # B of the last stage waits for S and C of all ranks. Until then every rank runs one forward
    # more, so a microbatch of each of its stages is held in addition.
    room = map(add, simulate(schedule, costs).peak, costs.held_by_rank(place))
    return merged(table, added, costs, [*room])


def _refuse_apart(name: str, place: Placement) -> None:
    """Refuse to share the vocabulary if a rank has no stage in some chain.

    A chain is the stages of one copy of the model; DualPipe has two.

    Args:
        name: name of the table, for the error.
    Raises: ScheduleError that names the flag to leave out.
    """
    # A share runs as a pass of one of the rank's stages in the chain.
    firsts = range(0, place.num_stages, place.chain)
    if place.vocabulary and any(len(place.shares(first)) < place.num_ranks for first in firsts):
        raise ScheduleError(
            f"{name}: to share the vocabulary every rank must have a stage of each chain. "
            "Leave out --vocab-parallel-pipeline or take another schedule."
        )


def all_shared(schedule: Schedule) -> Iterator[Pass]:
    """Yield the passes of a vocabulary that all ranks share (E, S, C, T, EW), for all microbatches.

    Raises: ScheduleError if a rank has no stage in some copy of the model.
    """
    place = schedule.placement
    _refuse_apart(schedule.name, place)
    at = {kind: kind.traits.at for kind in Kind if kind.traits.at}
    for microbatch in range(schedule.num_microbatches):
        # Two copies of the model have two copies of the vocabulary.
        first = schedule.chain_of(microbatch) * place.chain
        for kind, where in at.items():
            for stage in place.meant(first, where):
                yield Pass(kind, stage, microbatch)
