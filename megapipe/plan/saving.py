"""The bytes of a checkpoint: on the disk, and on a rank's host while it is written."""

from __future__ import annotations

from megapipe.config import Config
from megapipe.plan.make import GIB, Plan
from megapipe.plan.state import bytes_of_state


def checkpoint_bytes(plan: Plan, config: Config) -> tuple[float, float]:
    """(of a checkpoint, most that a rank holds on its host beside the run while it writes its part).

    torch's safetensors writer holds a rank's part as tensors and once more as one piece; data-parallel replicas divide
    the writing among them. Under ZeRO-1 each rank first gathers the optimizer state of its stages whole.
    """
    place, half = plan.schedule.placement, config.train.half
    weight, (_, moments, master) = 2 if half else 4, bytes_of_state(config.train)
    moments = 0 if config.checkpoint.no_save_optim else moments + (master or weight * half)
    works = [
        [plan.works[stage] for stage in place.stages_on(rank) if stage < place.chain] for rank in range(place.num_ranks)
    ]
    once = sum(work.parameters for row in works for work in row) - plan.tied * plan.vocab_weights  # that is saved once
    gathered = moments if config.parallel.use_distributed_optimizer else 0
    experts = max(config.world_size // (plan.expert_ranks * place.num_ranks), 1)
    most = max(
        sum(work.parameters - work.experts for work in row)
        / plan.tp
        * (2 * (weight + moments) / config.weight_replicas + gathered)
        + sum(work.experts for work in row) / plan.expert_ranks * (2 * (weight + moments) / experts + gathered)
        for row in works
    )
    return once * (weight + moments), most


def checkpoint_line(plan: Plan, config: Config) -> str:
    """A line on these bytes; empty without --save."""
    if config.checkpoint.save is None:
        return ""
    size, most = (value / GIB for value in checkpoint_bytes(plan, config))
    return f"a checkpoint has {size:.3g} GiB; writing it takes up to {most:.3g} GiB of host memory on a rank"
