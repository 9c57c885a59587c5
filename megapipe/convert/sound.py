"""Whether a run takes a model that comes from elsewhere: the checks of flags, asked before anything is written."""

from __future__ import annotations

from dataclasses import replace

from megapipe.checks.numbers import check_numbers
from megapipe.checks.run import flag_problems
from megapipe.config import BatchConfig, Config, DataConfig, ModelConfig, OptimizerConfig

_RUN = Config(
    batch=BatchConfig(train_iters=1, micro_batch_size=1, seq_length=1),
    optimizer=OptimizerConfig(lr=1e-3),
    data=DataConfig(mock_data=True, tokenizer_type="NullTokenizer", vocab_size=1),
)
"""Training and data that nothing is wrong with, so that all problems are the model's."""


def model_problems(model: ModelConfig) -> list[str]:
    """Reasons for which no run takes this model, flags named."""
    if model.has_experts and model.moe_router_topk == 1 and _normalised(model):
        return [
            "--moe-router-topk 1 with weights that add up to 1: the weight of one expert is always 1, its router can "
            "learn nothing, and no run takes such a model (Megatron-LM's neither). It cannot be converted"
        ]
    return flag_problems(replace(_RUN, model=model))


def number_problems(model: ModelConfig) -> list[str]:
    """Numbers of a model outside their flags' ranges: a checkpoint with one could not be read again."""
    return check_numbers(replace(_RUN, model=model))[1]


def _normalised(model: ModelConfig) -> bool:
    """Is the softmax over the chosen experts alone?"""
    return model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax
