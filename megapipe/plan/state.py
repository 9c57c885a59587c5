"""Bytes of a parameter with all that is kept of it: its gradient, what the optimizer keeps, main parameters; and of a
checkpoint, on the disk and on a rank's host while it is written."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from megapipe.config import Config, OptimizerConfig
from megapipe.optim.rules import find_rule
from megapipe.partition.layout import FLAG as LAYOUT
from megapipe.plan.families.sharding import Sharding

GIB = 2**30


@lru_cache(maxsize=8)
def bytes_of_state(optimizer: OptimizerConfig, half: bool) -> tuple[int, int, int]:
    """Bytes of a parameter: its gradient, what its optimizer keeps, and its main parameter beside a rounded weight.

    Raises: ConfigError as `find_rule`.
    """
    size = {"fp32": 4, "bf16": 2}
    kept_as = {"exp_avg": optimizer.exp_avg_dtype, "exp_avg_sq": optimizer.exp_avg_sq_dtype}
    moments = sum(size[kept_as.get(name, "fp32")] for name in find_rule(optimizer).state)
    return size[optimizer.main_grads_dtype], moments, 4 if half and optimizer.main_params_dtype == "fp32" else 0


def bytes_of_expert(config: Config) -> float:
    """Bytes of an expert's parameter with its state, which ZeRO-1 splits over the ranks that have the same experts, and
    with what post-validation keeps of it."""
    par, element = config.parallel, config.precision.element_bytes
    gradient, moments, master = bytes_of_state(config.optimizer, config.precision.half)
    ranks = par.expert_model_parallel_size * par.etp * par.pipeline_model_parallel_size
    shares = max(config.world_size // ranks, 1) if par.splits_optimizer else 1
    kept = moments + (master or element) if par.enable_optimizer_post_validation else 0
    sharding = Sharding.asked(config, gradient)
    own = sum(sharding.kept(experts=True)) if sharding else element + gradient
    return own + (moments + master + kept) / shares


def too_much(
    name: str, peaks: Sequence[float], states: Sequence[float], limit: float, *, auto: bool, shards: bool = False
) -> str:
    """A sentence on a plan that does not fit. peaks, states: bytes of each rank in all, and between steps.

    auto: a split of the layers that fits may be looked for. shards: gradients, or weights too, are whole for runs.
    """
    also = " and weights and gradients that are whole for a while" * shards
    need, rank = max((need, rank) for rank, need in enumerate(peaks))
    look = f", or {LAYOUT} auto, which looks for a split that fits" if auto else ""
    return (
        f"--memory-limit-gib {limit / GIB:g} is less than pipeline rank {rank} of {name} is predicted to "
        f"need, {need / GIB:.3g} GiB: {states[rank] / GIB:.3g} for parameters, gradients and optimizer, "
        f"{(need - states[rank]) / GIB:.3g} for activations{also}.\n"
        f"      Use --memory-limit-gib {need / GIB * 1.01:.3g}, a larger --pipeline-model-parallel-size or "
        f"--tensor-model-parallel-size, a schedule that holds less (v-min){look}."
    )
