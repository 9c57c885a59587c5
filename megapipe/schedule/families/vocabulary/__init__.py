"""Embedding and head shared by all ranks: look up (E), share (S), combine (C), weights (T, EW)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from megapipe.schedule.families.family import Family, PerStage, times
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Pass, Schedule

_COSTS = "s", "t", "e", "mem_s"
SHARES = frozenset({Kind.E, Kind.S, Kind.C, Kind.T, Kind.EW})


@dataclass(frozen=True, kw_only=True)
class VocabularyCosts:
    """Costs of one rank's share of the vocabulary for one microbatch, in the units of the costs.

    A share is an equal part of the rows of embedding and head. There is one share per rank, however
    many stages the rank has.

    Attributes:
        s: time of S, the forward of the share of the head with its input gradient.
        t: time of T, the weight gradient of the share of the head.
        e: time of each of E, EW and C. E looks up the share's rows of the embedding, EW computes
            their gradients, and C combines the shares of the loss.
        mem_s: memory held from the start of S to the end of T.
    """

    s: PerStage = 0.0
    t: PerStage = 0.0
    e: PerStage = 0.0
    mem_s: PerStage = 0.0


def _of_slice(costs: Mapping[str, Any], length: float, _: float) -> Mapping[str, Any]:
    return {name: times(length, costs[name]) for name in _COSTS}


def _missing(schedule: Schedule, seen: Mapping[Pass, int]) -> Iterator[str]:
    """Yield a sentence for each missing pass of a shared vocabulary.

    Every rank has E, S, T and EW for each microbatch, and each stage with a loss has C.

    Args:
        seen: {pass: index of its step in its rank's row}.
    """
    place = schedule.placement
    if not place.vocabulary:
        return
    # Needs of C, T and EW apply only if the table has them. Without this rule a table could leave
    # them out, and head and embedding would get no gradient.
    for microbatch, piece in product(range(schedule.all_microbatches), schedule.slices):
        first = schedule.chain_of(microbatch) * place.chain
        for stage, kind in product(range(first, first + place.chain), Kind):
            where = kind.traits.at
            if where is None or stage not in place.meant(stage, where):
                continue
            item = Pass(kind, stage, microbatch, piece)
            if item not in seen:
                yield f"rank {place.rank_of[item.stage]}: {item} is missing"


VOCABULARY = Family("vocabulary", SHARES, problems=_missing, of_slice=_of_slice, of_a_rank=_COSTS)
