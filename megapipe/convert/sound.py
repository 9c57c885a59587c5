"""Check, before anything is written, that a run accepts a model from elsewhere."""

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
"""Training and data without problems, so that all problems are the model's."""


def model_problems(model: ModelConfig) -> list[str]:
    """Return the reasons why no run accepts this model, with the names of the flags."""
    # The flags' own check advises --moe-router-pre-softmax, which would make another model.
    if model.has_experts and model.moe_router_topk == 1 and _normalised(model):
        return [
            "--moe-router-topk 1 with weights that add up to 1: the weight of one expert is always "
            "1, its router can learn nothing, and no run takes such a model (Megatron-LM's "
            "neither). It cannot be converted"
        ]
    return flag_problems(replace(_RUN, model=model))


def number_problems(model: ModelConfig) -> list[str]:
    """Return a sentence for each number outside its flag's range.

    A checkpoint with such a number could not be loaded.
    """
    return check_numbers(replace(_RUN, model=model))[1]


def _normalised(model: ModelConfig) -> bool:
    """Return whether the weights of a token's chosen experts have sum 1.

    That is so if the softmax is over the chosen experts only.
    """
    return model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax
