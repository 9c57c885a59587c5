"""The number of logits that a device has room to keep for backward.

Logits that are not kept are computed again, which is a third more work of the head.
"""

from __future__ import annotations

from dataclasses import replace

from megapipe.config import Config
from megapipe.plan.plan import Plan
from megapipe.plan.sizes import KEPT_ELEMENTS
from megapipe.schedule import simulate

FREE = 0.1
"""Part of a device's memory that stays free for communicators, kernels and fragments."""


def most_kept(config: Config, plan: Plan, memory: float | None) -> int:
    """Return how many logits of a microbatch the loss may keep until backward, on one rank.

    These are all its logits if the device has room for them, else KEPT_ELEMENTS. Logits of a
    microbatch that has more are computed again in backward.

    Args:
        memory: bytes of memory of a rank's device. None if unknown: the result is then
            KEPT_ELEMENTS, which the plan counts anyway.
    """
    model = config.model
    place = plan.schedule.placement
    tokens = config.batch.tokens
    tokens //= config.parallel.context_parallel_size
    vocab = model.padded_vocab_size or 0
    logits = tokens * vocab // config.parallel.tensor_model_parallel_size
    # The plan counts up to KEPT_ELEMENTS as held already, see plan.pieces.
    if memory is None or logits <= KEPT_ELEMENTS:
        return KEPT_ELEMENTS
    if place.vocabulary or not model.cross_entropy_loss_fusion:
        return KEPT_ELEMENTS

    # The peak of a table in which the stage with the loss holds them from F to W.
    more = logits * config.precision.element_bytes
    costs = plan.costs
    memory_of = costs.memory(place)
    held = memory_of.b[: place.chain]
    owed = memory_of.w[: place.chain]
    held[-1] += more
    owed[-1] += more
    costs = replace(costs, mem_b=tuple(held), mem_w=tuple(owed))
    peaks = simulate(plan.schedule, costs).peak
    for stage, rank in enumerate(place.rank_of):
        needed = plan.state_bytes[rank] + peaks[rank]
        if place.is_last(stage) and needed > (1 - FREE) * memory:
            return KEPT_ELEMENTS
    return logits
