"""The work of a gated delta net: its projections, its products in chunks, and what it keeps."""

from __future__ import annotations

from megapipe.config import ModelConfig
from megapipe.plan.layers.load import RankLoad, around, norm_size, norms_of_half
from megapipe.plan.layers.work import Work

CHUNK = 64
"""Tokens of a chunk, as in `models.delta.rule`."""


def delta_work(model: ModelConfig, load: RankLoad) -> Work:
    """Return the work and memory of a layer's gated delta net, with the norm before it.

    Args:
        load: a rank's tokens, and the ranks that split the layer.
    """
    h = model.hidden
    rows = model.delta_rows
    values = model.delta_values
    heads = model.linear_num_value_heads
    width = model.linear_value_head_dim
    products = 2.0 * load.tokens * h * (rows + values)
    rule = load.tokens * delta_flops(model, load.seq)
    weights = model.delta_mixed * model.linear_conv_kernel_dim + 2 * heads + width
    norms = norm_size(model, h) * norms_of_half(model)
    return Work(
        products + rule,
        # Backward computes the rule again, as only its inputs are kept. The gradient of a
        # triangular system has a whole product in addition.
        products + 3 * rule + load.tokens * 2 * _solved(model, load.seq),
        products,
        **load.saved(
            *around(model, load),
            (load.bytes(0, rows), "core_attn"),
            (load.bytes(0, values), "attn_proj"),
        ),
        kept=load.bytes(2 * h, rows + values),
        parameters=h * (rows + values) + weights + norms,
    )


def delta_flops(model: ModelConfig, length: int) -> float:
    """Return the forward FLOPs of the gated delta rule for each token.

    Args:
        length: number of tokens of a sequence. The sequence is computed in chunks, and the last
            chunk is padded.
    """
    size = min(CHUNK, length)
    keys = model.linear_key_head_dim
    values = model.linear_value_head_dim
    # Keys with keys and queries with keys. Value heads of one key head share both.
    of_keys = 2 * 2 * size * keys
    # With the state before: corrections, the output and the update. Within the chunk: the output.
    stepped = 3 * 2 * keys * values + 2 * size * values
    each = model.linear_num_key_heads * of_keys + model.linear_num_value_heads * stepped
    return _filled(length) * each + _solved(model, length)


def _solved(model: ModelConfig, length: int) -> float:
    """Return, for each token, the FLOPs to solve a triangular system with two right-hand sides.

    `length` is the number of tokens of a sequence.
    """
    width = model.linear_key_head_dim + model.linear_value_head_dim
    # Half of a product.
    return _filled(length) * model.linear_num_value_heads * min(CHUNK, length) * width


def _filled(length: int) -> float:
    """Return the number of tokens after padding the last chunk, divided by `length`."""
    size = min(CHUNK, length)
    return -(-length // size) * size / length
