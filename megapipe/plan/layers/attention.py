"""The work of attention: its projections, its scores, and the tensors that it keeps.

Attention runs in one of three ways, and each keeps something else:

    kernel   torch's, over the whole sequence: keeps the operands.
    blocks   of keys, with context parallelism or dropout: also each query's log-sum-exp.
    windows  blocks of queries, each with the keys in its window: also outputs and masks.
"""

from __future__ import annotations

from typing import Any

from megapipe.config import ModelConfig
from megapipe.plan.layers.delta import delta_work
from megapipe.plan.layers.load import RankLoad, around, norm_size, norms_of_half
from megapipe.plan.layers.work import Work

SMALLEST_BLOCK = 128
"""Fewest queries of a block of attention in windows. Smaller ones are not worth a kernel's call."""


def attention_work(model: ModelConfig, load: RankLoad) -> Work:
    """Return the work and memory of a layer's attention, with the norm before it.

    Args:
        load: the tokens of a microbatch on one rank, and the ranks that split the layer.
    """
    if model.no_attention:
        return Work()
    if model.has_delta:
        return delta_work(model, load)
    if model.multi_latent_attention:
        return _latent_work(model, load)
    h = model.hidden
    queries = model.heads * model.head_dim
    keys = model.query_groups * model.head_dim
    qkv = queries * (1 + model.attention_output_gate) + model.projected * keys
    scores = 2 * load.scores(queries, model)
    products = 2.0 * load.tokens * h * (qkv + queries)
    # Backward has two products for each of forward's, and forward's once more if recomputed.
    in_backward = 2 + model.recompute_attention
    bias = qkv * model.has_bias("qkv") + h * model.has_bias("proj")
    norms = norm_size(model, h) * norms_of_half(model)
    if model.qk_layernorm_all_heads:
        norms += queries + keys
    elif model.qk_layernorm:
        norms += 2 * norm_size(model, model.head_dim)
    norms += _sinks(model)
    return Work(
        products + scores,
        products + in_backward * scores,
        products,
        **_saved(model, load),
        kept=load.bytes(2 * h, qkv + queries),
        parameters=h * (qkv + queries) + bias + norms,
        **load.sliced(scores, in_backward, 2 * keys, model),
    )


def _saved(model: ModelConfig, load: RankLoad) -> dict[str, Any]:
    """Return the fields "held" and "copied" of attention's `Work` as {field: bytes}.

    `load` has a rank's tokens, and the ranks that split the layer.
    """
    queries = model.heads * model.head_dim
    keys = model.query_groups * model.head_dim
    grouped = model.heads > model.query_groups
    # Dropout of probabilities goes by blocks too. They recompute themselves in backward.
    by_blocks = _by_blocks(model, load)
    logs = _logarithms(model, load) * by_blocks
    windows = _windows(model, load, queries) * (not by_blocks)

    # Queries of several groups lie separately in the product, and are copied out of it.
    copies = queries * (grouped and model.query_groups > load.tp)
    # Norms and rotations make new queries and keys, which attention keeps in place of the copies.
    normed = model.qk_layernorm or model.qk_l2_norm or model.v_l2_norm
    changed = normed or model.rotates
    scaled = model.softmax_scale is not None
    # Windows repeat the keys and values of a group for its heads. They keep the repeated ones and
    # free the projected ones, unless a norm needs these or they are the operands themselves.
    repeated = grouped and windows > 0
    projected = not repeated or normed or not (changed or copies)
    operands = queries + keys * (not repeated) if changed else max(copies, queries * scaled)
    operands += keys * model.v_l2_norm

    # The modules whose saved tensors a projection and the output are.
    of_projection = "core_attn qkv_linear" if normed else "core_attn"
    of_output = "attn_proj core_attn" if by_blocks else "attn_proj"
    # Gates lie in the projection's output too.
    made = queries * (1 + model.attention_output_gate) + model.projected * keys
    # A gate keeps its sigmoid and the output of attention, and makes the input of the projection.
    gates = 2 * queries * model.attention_output_gate
    return load.saved(
        *around(model, load),
        (load.bytes(0, made * projected), of_projection),
        (load.bytes(0, copies * normed), "qkv_linear"),
        (load.bytes(0, gates), ""),
        (load.bytes(0, operands) + logs + windows, "core_attn"),
        (load.bytes(0, queries), of_output),
    )


def _sinks(model: ModelConfig) -> int:
    """Return the number of learned attention sinks: one for each head, or 0."""
    return model.heads * (model.softmax_type == "learnable")


def _by_blocks(model: ModelConfig, load: RankLoad) -> bool:
    """Return whether attention is computed with one block of keys after another."""
    return load.meets or model.attention_dropout > 0 or model.needs_blocks


def _logarithms(model: ModelConfig, load: RankLoad) -> float:
    """Return the bytes of the softmax's log-sum-exp, a float32 for each query and head.

    `load` has a rank's tokens, and the ranks that split the layer.
    """
    return 4 * load.tokens * model.heads / load.tp


def _windows(model: ModelConfig, load: RankLoad, channels: int) -> float:
    """Return the bytes that sliding-window attention keeps beyond its operands.

    Each block of queries keeps its output, the log-sum-exp of each query in float32, and its mask.
    All sequences share the mask. Where several heads share keys and values, a block keeps a copy of
    them for each head. The result is 0 without a window, for recomputed attention, and for
    Transformer Engine's.

    Args:
        load: a rank's tokens, and the ranks that split the layer.
        channels: the number of channels of all heads' queries together.
    """
    window = model.window
    if window is None or window >= load.seq - 1:
        return 0.0
    if model.recompute_attention or model.transformer_impl != "local":
        return 0.0
    keys = 0
    pairs = 0
    step = max(window, SMALLEST_BLOCK)
    for begin in range(0, load.seq, step):
        end = min(begin + step, load.seq)
        in_window = end - max(0, begin - window)
        keys += in_window
        pairs += (end - begin) * in_window
    repeated = 0.0
    # Keys and values of a group are repeated for its heads, in each block that reads them.
    if model.heads > model.query_groups and not model.multi_latent_attention:
        repeated = 2 * channels * keys / load.seq
    blocks = load.bytes(0, channels + repeated) + _logarithms(model, load)
    return blocks + load.element * pairs


def _latent_work(model: ModelConfig, load: RankLoad) -> Work:
    """Return the work and memory of multi-latent attention (DeepSeek-V2) and the norm before it.

    `load` has a rank's tokens, and the ranks that split the layer.
    """
    h = model.hidden
    q_rank = model.q_lora_rank or 0
    kv_rank = model.kv_lora_rank
    rotated = model.qk_pos_emb_head_dim
    queries = model.heads * model.qk_dim
    values = model.heads * model.v_head_dim
    up_kv = model.heads * (model.qk_head_dim + model.v_head_dim)

    # Projections down to the latents, up to the heads, and out of them. Without a latent of their
    # own, queries go up from the hidden state.
    down = h * (q_rank + kv_rank + rotated)
    up = (q_rank or h) * queries + kv_rank * up_kv
    out = values * h
    # Ranks that have the same tokens all go down to the latents, each by itself.
    products = 2.0 * load.tokens * (down * load.tp / load.shared + up + out)
    scores = load.scores(queries + values, model)
    repeated = 0.0
    if model.recompute_attention:
        repeated += scores
    if model.recompute_mla_up_proj:
        repeated += scores + 2.0 * load.tokens * up

    of_latents = norm_size(model, q_rank + kv_rank) * model.qk_layernorm
    norms = norm_size(model, h) * norms_of_half(model) + of_latents + _sinks(model)
    # Queries, keys and values have one width in attention, the wider of both.
    wide = model.heads * max(model.qk_dim, model.v_head_dim)
    latents = 2 * q_rank + 2 * kv_rank + rotated * (2 - model.qk_layernorm)
    in_backward = 2 + model.recompute_attention + model.recompute_mla_up_proj
    return Work(
        products + scores,
        products + 2 * scores + repeated,
        products,
        **_saved_with_latents(model, load, wide),
        kept=load.bytes(2 * h + latents, queries + up_kv + values),
        parameters=down + up + out + h * model.has_bias("proj") + norms,
        **load.sliced(scores, in_backward, 2 * wide, model),
    )


def _saved_with_latents(model: ModelConfig, load: RankLoad, wide: int) -> dict[str, Any]:
    """Return the fields "held" and "copied" of multi-latent attention's `Work` as {field: bytes}.

    Args:
        load: a rank's tokens, and the ranks that split the layer.
        wide: the number of channels of all heads together, as attention pads them: the wider of
            queries and values.
    """
    latents = (model.q_lora_rank or 0) + model.kv_lora_rank
    again = model.recompute_mla_up_proj
    padded = model.v_head_dim < model.qk_dim
    # Padded values are copied; others stay in the tensor that was projected, with their keys.
    values = wide if padded else model.heads * (model.qk_head_dim + model.v_head_dim)

    # A norm keeps its input, and the next product its output.
    normed = latents * model.qk_layernorm
    # Recomputed heads read the rotated part of the key, unless it is gathered again.
    rotated = model.qk_pos_emb_head_dim * (not again or load.shared > 1)
    before_heads = latents + normed + rotated

    # Attention by blocks keeps its output too, and padded it is not what attn_proj keeps. So do
    # torch's kernels on a GPU, for which this is too little.
    by_blocks = _by_blocks(model, load) and not again
    outputs = wide * (by_blocks and padded)
    operands = (2 * wide + values) * (not again) + outputs
    logs = _logarithms(model, load) * by_blocks
    windows = _windows(model, load, wide) * (not by_blocks and not again)
    return load.saved(
        *around(model, load),
        (load.bytes(before_heads, 0), "qkv_linear"),
        (load.bytes(0, operands) + logs + windows, "core_attn"),
        (load.bytes(0, model.heads * model.v_head_dim), "attn_proj"),
    )
