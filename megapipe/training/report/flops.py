"""The arithmetic of a step, for the throughput in the log line."""

from __future__ import annotations

from megapipe.config import ModelConfig
from megapipe.plan import pieces


def flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """Return the model FLOPs of one trained token: three times its forward, recomputation not counted.

    Megatron-LM's count for dense layers. Of experts the router's product is counted too, 6 h E per layer; the scales of
    norms, which Megatron-LM counts in latents and depths, are not. See plan.work.pieces; layers by their overrides.
    """
    work = pieces(model, seq_length)
    return 3 * (sum(layer.f for layer in (*work.layers, *work.depths)) + work.head.f) / seq_length
