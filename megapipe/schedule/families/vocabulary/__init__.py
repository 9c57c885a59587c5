"""Embedding and head shared by all ranks: look up (E), share (S), combine (C), gradients of the rows (T, EW)."""

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
    """What a rank's share of the vocabulary takes of a microbatch, however many stages the rank has.

    Attributes:
        s, t: forward with the input gradient, and weight gradient.
        e: looking up its rows, adding to their gradients, and combining the shares.
        mem_s: held from the start of S to the end of T.
    """

    s: PerStage = 0.0
    t: PerStage = 0.0
    e: PerStage = 0.0
    mem_s: PerStage = 0.0


def _of_slice(costs: Mapping[str, Any], length: float, _: float) -> Mapping[str, Any]:
    return {name: times(length, costs[name]) for name in _COSTS}


def _missing(schedule: Schedule, seen: Mapping[Pass, int]) -> Iterator[str]:
    """Every share of the vocabulary is used for each microbatch, and combined where the loss is."""
    place = schedule.placement
    for microbatch, piece in product(
        range(schedule.all_microbatches if place.vocabulary else 0), schedule.slices
    ):
        first = schedule.chain_of(microbatch) * place.chain
        at = [(s, kind, kind.traits.at) for s in range(first, first + place.chain) for kind in Kind]
        for item in (
            Pass(kind, s, microbatch, piece)
            for s, kind, where in at
            if where and s in place.meant(s, where)
        ):
            if item not in seen:
                yield f"rank {place.rank_of[item.stage]}: {item} is missing"


VOCABULARY = Family("vocabulary", SHARES, problems=_missing, of_slice=_of_slice, of_a_rank=_COSTS)
