"""Bytes of a parameter with all that is kept of it: its gradient, what the optimizer keeps, main parameters."""

from __future__ import annotations

from functools import lru_cache

from megapipe.config import Config, TrainConfig
from megapipe.optim.rules import find_rule


@lru_cache(maxsize=8)
def bytes_of_state(train: TrainConfig) -> tuple[int, int, int]:
    """Bytes of a parameter: its gradient, what its optimizer keeps, and its main parameter beside a rounded weight.

    Raises: ConfigError as `find_rule`.
    """
    size = {"fp32": 4, "bf16": 2}
    kept_as = {"exp_avg": train.exp_avg_dtype, "exp_avg_sq": train.exp_avg_sq_dtype}
    moments = sum(size[kept_as.get(name, "fp32")] for name in find_rule(train).state)
    return size[train.main_grads_dtype], moments, 4 if train.half and train.main_params_dtype == "fp32" else 0


def bytes_of_expert(config: Config) -> float:
    """Bytes of an expert's parameter with its state, which ZeRO-1 splits over the ranks that have the same experts, and
    with what post-validation keeps of it."""
    par, element = config.parallel, 2 if config.train.half else 4
    gradient, moments, master = bytes_of_state(config.train)
    ranks = par.expert_model_parallel_size * par.etp * par.pipeline_model_parallel_size
    shares = max(config.world_size // ranks, 1) if par.use_distributed_optimizer else 1
    kept = moments + (master or element) if par.enable_optimizer_post_validation else 0
    return element + gradient + (moments + master + kept) / shares
