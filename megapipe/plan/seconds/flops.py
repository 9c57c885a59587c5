"""Count the arithmetic of a step, for the throughput in the log."""

from __future__ import annotations

from megapipe.config import ModelConfig
from megapipe.plan.pieces import pieces


def flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """Return the model FLOPs of one trained token: three times its forward, without recomputation.

    This is Megatron-LM's count for dense layers. With experts the number includes the router's
    product, 6 * hidden size * experts in each layer. The number lacks the norms that Megatron-LM
    counts in multi-latent attention and in multi-token prediction.

    Args:
        model: the model; each layer counts with its own overrides.
        seq_length: tokens per sequence.
    """
    work = pieces(model, seq_length)
    layers = sum(layer.f for layer in (*work.layers, *work.depths))
    # The backward has two products for each one of the forward.
    return 3 * (layers + work.head.f) / seq_length
