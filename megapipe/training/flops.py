"""How much arithmetic a step is, for the throughput in the log line."""

from __future__ import annotations

from megapipe.config import ModelConfig


def flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """Model FLOPs of one trained token: three times its forward, recomputation not counted.

    Projections by their real head counts, causal attention scores at half, the head with the padded vocabulary; a
    multiplication and an addition count as two (Narayanan et al. 2021, appendix, in the form Megatron-LM prints).
    """
    assert model.padded_vocab_size is not None
    h, head = model.hidden, model.head_dim
    projections = 2 * h * head * (2 * model.heads + 2 * model.query_groups)
    scores = 2 * 2 * seq_length * head * model.heads / 2
    mlp = 2 * h * model.ffn * (3 if model.gated else 2)
    return 3 * (model.layers * (projections + scores + mlp) + 2 * h * model.padded_vocab_size)
