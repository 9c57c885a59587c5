"""Split layers over stages by their work, where equally many layers would leave ranks waiting.

The head of a small model with a large vocabulary takes as long as several layers. Its stage then
makes all others wait, unless it has fewer layers. A search first gives each rank equally much work,
which takes milliseconds. The layers of the best plans are then split so that a simulated step is
shortest, as by --pipeline-model-parallel-layout auto.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from megapipe.commands.plan.search.judged.timed import table
from megapipe.config import Config
from megapipe.plan import GIB, ModelWork, Plan, counts_of
from megapipe.plan.auto import Counts, as_they_are
from megapipe.plan.make import balanced_by_cost
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.messages import of_layer
from megapipe.schedule import Placement, Schedule
from megapipe.schedule.catalogue import PLAIN

LEAST_GAIN = 0.01
"""The part of the busiest rank's work that a split must take away, to be worth a look."""


def by_work(pieces: ModelWork, config: Config, device: Device) -> Counts | None:
    """Return the layers of each stage that give all ranks about equally much work.

    Returns None if the busiest rank has hardly less to do than with the layout of `config`.

    Args:
        pieces: the work of embedding, layers and head.
        config: the configuration with its schedule, for few microbatches.
    """
    place = _table(config).placement
    layers, fixed = _seconds(pieces, config, device, place)
    ranks = [_ranks(place, position) for position in range(place.chain)]
    counts = [0] * place.chain
    of_stage = [*fixed]
    of_rank = [0.0] * place.num_ranks
    for position, seconds in enumerate(fixed):
        for rank in ranks[position]:
            of_rank[rank] += seconds / place.num_chains
    mean = sum(layers) / len(layers)

    def busy(position: int) -> tuple[float, float]:
        return max(of_rank[rank] for rank in ranks[position]), of_stage[position]

    # Each layer goes to the rank with least work, and there to the stage with least work.
    for _ in layers:
        position = min(range(place.chain), key=busy)
        counts[position] += 1
        of_stage[position] += mean
        for rank in ranks[position]:
            of_rank[rank] += mean / place.num_chains
    before = _busiest(counts_of(config, place), layers, fixed, place)
    if _busiest(counts, layers, fixed, place) > (1 - LEAST_GAIN) * before:
        return None
    return tuple(counts)


def by_clock(plan: Plan, config: Config, memory: float) -> Counts:
    """Return the layers of each stage for which a simulated step is shortest, within a memory.

    Args:
        plan: a plan of this model with these parallel sizes.
        config: the configuration with its schedule, for few microbatches: they take less time.
        memory: bytes of a device.
    """
    # Depths count with the head here, as wherever a search compares plans.
    pieces = replace(plan.pieces, depths=(), head=sum(plan.pieces.depths, plan.pieces.head))
    schedule = _table(config)
    counts = counts_of(config, schedule.placement)
    plan = replace(plan, schedule=schedule, counts=counts, pieces=pieces)
    return balanced_by_cost(plan, memory / GIB, as_they_are).counts


def _table(config: Config) -> Schedule:
    """Return the table of a configuration, whose schedule is a built-in one."""
    par = config.parallel
    return table(
        par.pipeline_schedule or PLAIN,
        par.pipeline_model_parallel_size,
        config.num_microbatches,
        par.num_virtual_stages_per_pipeline_rank,
    )


def _seconds(
    pieces: ModelWork, config: Config, device: Device, place: Placement
) -> tuple[list[float], list[float]]:
    """Return (seconds of each layer, seconds of each stage without its layers), per microbatch."""
    rate = 1 / (config.parallel.tensor_model_parallel_size * device.flops)
    number = len(pieces.layers)
    chain = [pieces.embedding, *pieces.layers, pieces.head]
    means = (
        rate * sum(piece.f for piece in chain) / number,
        rate * sum(piece.b for piece in chain) / number,
    )
    waits = sum(of_layer(means, config, device))
    fixed = [0.0] * place.chain
    fixed[0] += rate * pieces.embedding.time
    fixed[-1] += rate * (pieces.head.time + sum(piece.time for piece in pieces.depths))
    fixed[-1] += waits * len(pieces.depths)
    return [rate * piece.time + waits for piece in pieces.layers], fixed


def _ranks(place: Placement, position: int) -> list[int]:
    """Return the ranks with this stage of the model: two where there are two copies."""
    return [place.rank_of[stage] for stage in place.replicas(position)]


def _busiest(
    counts: Sequence[int], layers: Sequence[float], fixed: Sequence[float], place: Placement
) -> float:
    """Return the seconds of the rank with most work, per microbatch.

    Args:
        counts: layers of each stage.
        layers: seconds of each layer.
        fixed: seconds of each stage without its layers.
    """
    until = [0.0, *accumulate(layers)]
    loads = [0.0] * place.num_ranks
    first = 0
    for position, count in enumerate(counts):
        seconds = fixed[position] + until[first + count] - until[first]
        first += count
        for rank in _ranks(place, position):
            loads[rank] += seconds / place.num_chains
    return max(loads)
