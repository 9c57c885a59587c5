"""The arithmetic of a step, for the throughput in the log line."""

from __future__ import annotations

from megapipe.config import ModelConfig
from megapipe.plan import pieces


def flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """Model FLOPs of one trained token: three times its forward, recomputation not counted.

    As Megatron-LM counts, see plan.work.pieces; layers by their overrides.
    """
    work = pieces(model, seq_length)
    return 3 * (sum(layer.f for layer in (*work.layers, *work.depths)) + work.head.f) / seq_length
