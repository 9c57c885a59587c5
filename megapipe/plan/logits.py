"""The logits that a device has room to keep for backward: made again, they are a third more work of the head."""

from __future__ import annotations

from dataclasses import replace

from megapipe.config import Config
from megapipe.plan.plan import Plan
from megapipe.schedule import simulate
from megapipe.tensor_parallel.fused_cross_entropy import KEPT_ELEMENTS

FREE = 0.1
"""Share of a device's memory that stays free beside what the plan counts: for communicators, kernels, fragments."""


def most_kept(config: Config, plan: Plan, memory: float | None) -> int:
    """Logits of a microbatch that each rank with the loss may keep, the plan's other bytes beside them.

    memory: bytes of a rank's device; None: nobody knows, and as many are kept as the plan has counted.
    """
    model, parallel, place = config.model, config.parallel, plan.schedule.placement
    tokens = config.batch.sequence * (config.batch.micro_batch_size or 1) // parallel.context_parallel_size
    logits = tokens * (model.padded_vocab_size or 0) // parallel.tensor_model_parallel_size
    if memory is None or logits <= KEPT_ELEMENTS or place.vocabulary or not model.cross_entropy_loss_fusion:
        return KEPT_ELEMENTS
    costs, more = plan.costs, logits * config.precision.element_bytes
    held, owed = (of_stages[: place.chain] for of_stages in costs.memory(place)[:2])
    held[-1], owed[-1] = held[-1] + more, owed[-1] + more
    peaks = simulate(plan.schedule, replace(costs, mem_b=tuple(held), mem_w=tuple(owed))).peak
    needed = [state + peak for state, peak in zip(plan.state_bytes, peaks, strict=True)]
    ranks = {place.rank_of[stage] for stage in range(place.num_stages) if place.is_last(stage)}
    return logits if max(needed[rank] for rank in ranks) <= (1 - FREE) * memory else KEPT_ELEMENTS
