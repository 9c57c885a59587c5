"""Costs of a layer: time, activation and parameters of attention, MLP and experts, from their widths."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from operator import add
from typing import Any, NamedTuple

from megapipe.config import ModelConfig

SMALLEST_BLOCK = 128
"""Queries of a block of a window's attention at least: below, it is too small for its call to a kernel."""


@dataclass(frozen=True)
class Work:
    """One microbatch through a piece of the model.

    Attributes:
        f, b, w: forward, input gradient, weight gradient; FLOPs, or any unit of time.
        held: bytes kept from F to B; copied: the part that Load's modules save; kept: the part, and what B adds to it,
            that stays until W.
        scores_f, scores_b: the part of f and b that is causal attention to all tokens before.
        keys: bytes of keys and values; kept_keys: those of slices that `held` does not count.
        parameters: how many, over all ranks of the stage; experts: those of them that lie on the experts' grid;
            unused: those that a token makes no use of.
        rounded: bytes on each rank of weights in eight bits, beside the parameters; lighter: by which all weights of a
            rank are fewer where they are gathered so.
    """

    f: float = 0.0
    b: float = 0.0
    w: float = 0.0
    held: float = 0.0
    kept: float = 0.0
    parameters: int = 0
    unused: int = 0
    experts: int = 0
    scores_f: float = 0.0
    scores_b: float = 0.0
    keys: float = 0.0
    kept_keys: float = 0.0
    rounded: float = 0.0
    copied: float = 0.0
    lighter: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*map(add, vars(self).values(), vars(other).values()))

    def part(self, shares: int) -> Work:
        """The work of one of so many equal shares."""
        f, b, w, held, kept = (x / shares for x in (self.f, self.b, self.w, self.held, self.kept))
        return Work(f, b, w, held, kept, self.parameters // shares)

    def in_fp8(self, load: Load) -> Work:
        """This layer with its weights quantised for both of their products, while the passes of a step run."""
        rounded = lighter = 0.0
        dense, experts = (self.parameters - self.experts) / load.tp, self.experts / (load.ep * load.etp)
        for here, ranks in ((dense, load.gathers.dense), (experts, load.gathers.experts)):
            rounded += 2 * here
            if ranks > 1:  # those of one product are there anyway, in place of what is not this rank's share
                rounded -= here * (1 if load.gathers.drops else load.element * (1 - 1 / ranks))
                lighter += (load.element - 1) * here
        return replace(self, rounded=rounded, lighter=lighter)

    @property
    def time(self) -> float:
        """All three passes."""
        return self.f + self.b + self.w


class Gathers(NamedTuple):
    """Ranks that gather a dense layer's weights in eight bits, and an expert's; drops: for each run of passes."""

    dense: int = 1
    experts: int = 1
    drops: bool = False


NONE = Gathers()


@dataclass(frozen=True)
class Load:
    """The load of a layer: sequences of `seq` tokens, `tokens` of them here; tp ranks share it, `shared` of them
    also what lies between the linear layers; bytes of an activation. `meets`: keys of other ranks come here. ep,
    etp: of the experts. modules: of --offload-modules."""

    seq: int
    tokens: int
    tp: int
    shared: int
    element: int
    meets: bool
    ep: int = 1
    etp: int = 1
    modules: tuple[str, ...] = ()
    gathers: Gathers = NONE

    def scores(self, channels: int, window: int | None) -> float:
        """FLOPs of what queries and keys, or probabilities and values, of so many channels in all are multiplied."""
        reach = self.seq if window is None else min(self.seq, window + 1)
        return 2.0 * self.tokens * channels * (reach - reach * reach / 2 / self.seq)

    def sliced(self, scores: float, again: float, channels: int, window: int | None) -> dict[str, Any]:
        """Fields of Work that say how slices of a sequence differ. Inside a window all tokens see as many others."""
        growing = scores if window is None or window >= self.seq - 1 else 0.0
        return {"scores_f": growing, "scores_b": again * growing, "keys": self.bytes(0, channels)}

    def saved(self, *parts: tuple[float, str]) -> dict[str, Any]:
        """Fields of Work for bytes, of each part with the names of the modules that save it."""
        copied = sum(size for size, names in parts if not set(self.modules).isdisjoint(names.split()))
        return {"held": sum(size for size, _ in parts), "copied": copied}

    def bytes(self, between: float, inside: float, masked: float = 0) -> float:
        """Bytes of features between and inside the parallel parts; masked: of the former, those with a dropout byte."""
        return self.tokens * ((self.element * between + masked) / self.shared + self.element * inside / self.tp)


def layer_work(model: ModelConfig, load: Load) -> Work:
    whole = _attention(model, load) + _mlp(model, load)
    if model.recompute_granularity != "full" or model.recompute_method == "block":
        return whole
    return replace(
        whole,
        b=whole.b + whole.f,
        held=load.bytes(model.hidden, 0) / (model.recompute_num_layers or 1),
        copied=0.0,
        scores_b=whole.scores_b + whole.scores_f,
        kept_keys=whole.keys,
    )


def _attention(model: ModelConfig, load: Load) -> Work:
    if model.no_attention:
        return Work()
    if model.multi_latent_attention:
        return _latents(model, load)
    h, queries = model.hidden, model.heads * model.head_dim
    qkv = queries + 2 * model.query_groups * model.head_dim
    scores = 2 * load.scores(queries, model.window)
    products = 2.0 * load.tokens * h * (qkv + queries)
    bias = qkv * (model.bias or model.add_qkv_bias) + h * model.bias
    grouped = model.heads > model.query_groups
    keys, apart = model.query_groups * model.head_dim, queries * (grouped and model.query_groups > load.tp)
    changed = model.qk_layernorm or model.position_embedding_type == "rope"
    norms = norm_size(model, h) + 2 * norm_size(model, model.head_dim) * model.qk_layernorm
    # Attention by blocks keeps a logarithm of each query in float32, and computes itself again anyway.
    blocks = load.meets or model.attention_dropout > 0
    windows = 0 if blocks else _windows(model, load, queries)
    logs = 4 * load.tokens * model.heads / load.tp * blocks
    # Windows repeat the keys and values of a group for its heads, and leave those that were projected.
    repeated = grouped and windows > 0
    projected = not repeated or model.qk_layernorm or not (changed or apart)
    saved = load.saved(
        (load.bytes(0, 0, h * bool(model.hidden_dropout)), ""),
        (load.bytes(h, 0), "attn_norm"),
        (load.bytes(h * (not model.recompute_norms), 0), "qkv_linear"),
        (load.bytes(0, qkv * projected), "core_attn qkv_linear" if model.qk_layernorm else "core_attn"),
        # Queries of several groups lie apart in the product, and are copied out of it: norms keep them so, and
        # attention what norms or rotations make of queries and keys.
        (load.bytes(0, apart * model.qk_layernorm), "qkv_linear"),
        (load.bytes(0, queries + keys * (not repeated) if changed else apart) + logs + windows, "core_attn"),
        (load.bytes(0, queries), "attn_proj core_attn" if blocks else "attn_proj"),
    )
    return Work(
        products + scores,
        products + (3 if model.recompute_attention else 2) * scores,
        products,
        **saved,
        kept=load.bytes(2 * h, qkv + queries),
        parameters=h * (qkv + queries) + bias + norms,
        **load.sliced(scores, 2 + model.recompute_attention, qkv - queries, model.window),
    )


def _windows(model: ModelConfig, load: Load, wide: int) -> float:
    """Return the bytes that attention in windows keeps in addition: it goes by blocks of queries.

    Each block keeps its output and a logarithm of each query in float32, and its mask, which all sequences share. Keys
    and values of a group are repeated for its heads in every block that sees them.

    Args:
        wide: channels of all heads' queries.
    """
    window = model.window
    if window is None or window >= load.seq - 1 or model.recompute_attention or model.transformer_impl != "local":
        return 0.0
    seen = pairs = 0
    step = max(window, SMALLEST_BLOCK)
    for begin in range(0, load.seq, step):
        end = min(begin + step, load.seq)
        keys = end - max(0, begin - window)
        seen += keys
        pairs += (end - begin) * keys
    grouped = model.heads > model.query_groups and not model.multi_latent_attention
    repeated = 2 * wide * seen / load.seq if grouped else 0.0
    logs = 4 * load.tokens * model.heads / load.tp
    return load.bytes(0, wide + repeated) + logs + load.element * pairs


def _latents(model: ModelConfig, load: Load) -> Work:
    """Each rank goes down to the latents by itself. Heads are held as wide as the wider of queries and values."""
    h, heads, q_rank, kv_rank = model.hidden, model.heads, model.q_lora_rank or 0, model.kv_lora_rank
    rotated, up_kv = model.qk_pos_emb_head_dim, heads * (model.qk_head_dim + model.v_head_dim)
    queries, values = heads * model.qk_dim, heads * model.v_head_dim
    wide = heads * max(model.qk_dim, model.v_head_dim)
    # Values that are padded are copied; others stay a part of what was projected.
    kept_values = wide if model.v_head_dim < model.qk_dim else up_kv
    up, out = (q_rank or h) * queries + kv_rank * up_kv, values * h
    down = h * (q_rank + kv_rank + rotated)
    scores = load.scores(queries + values, model.window)
    # Ranks that have the same tokens go down to the latents each by itself.
    products = 2.0 * load.tokens * (down * load.tp / load.shared + up + out)
    again = model.recompute_mla_up_proj
    norms = (
        norm_size(model, h) + (norm_size(model, kv_rank) + norm_size(model, q_rank) * bool(q_rank)) * model.qk_layernorm
    )
    normed = (q_rank + kv_rank) * model.qk_layernorm  # a norm keeps its input, and the next product its output
    between = h * (not model.recompute_norms) + q_rank + kv_rank + normed + rotated * (not again or load.shared > 1)
    # Attention by blocks keeps its output too, as torch's kernels on a GPU do, for which this is too little.
    blocks = (load.meets or model.attention_dropout > 0) * (not again)
    outputs = blocks * wide * (model.v_head_dim < model.qk_dim)  # else they are what attn_proj keeps
    windows = 0 if blocks or again else _windows(model, load, wide)
    logs = 4 * load.tokens * heads / load.tp * blocks
    saved = load.saved(
        (load.bytes(0, 0, h * bool(model.hidden_dropout)), ""),
        (load.bytes(h, 0), "attn_norm"),
        (load.bytes(between, 0), "qkv_linear"),
        (load.bytes(0, (2 * wide + kept_values) * (not again) + outputs) + logs + windows, "core_attn"),
        (load.bytes(0, values), "attn_proj"),
    )
    repeated = scores * model.recompute_attention + (scores + 2.0 * load.tokens * up) * again
    return Work(
        products + scores,
        products + 2 * scores + repeated,
        products,
        **saved,
        kept=load.bytes(
            2 * h + 2 * q_rank + 2 * kv_rank + rotated * (2 - model.qk_layernorm), queries + up_kv + values
        ),
        parameters=down + up + out + h * model.bias + norms,
        **load.sliced(scores, 2 + model.recompute_attention + again, 2 * wide, model.window),
    )


def _mlp(model: ModelConfig, load: Load) -> Work:
    if model.no_mlp:
        return Work()
    if model.has_experts:
        return _experts(model, load)
    h, ffn, blocks = model.hidden, model.ffn, 2 if model.gated else 1
    products = 2.0 * load.tokens * h * ffn * (blocks + 1)
    again, norm = model.recompute_mlp, h * (not model.recompute_norms)
    rest = load.bytes(norm, _activated(model) * ffn * (not again), h * bool(model.hidden_dropout))
    return Work(
        products,
        products * (1 + again),
        products,
        **load.saved((load.bytes(h, 0), "mlp_norm"), (rest, "")),
        kept=load.bytes(2 * h, (blocks + 1) * ffn),
        parameters=h * ffn * (blocks + 1) + (blocks * ffn + h) * model.bias + norm_size(model, h),
    )


def _activated(model: ModelConfig) -> int:
    """Return how many tensors of a feed-forward layer's width it keeps: fc1's output, what is between, fc2's input.

    A gate by a sigmoid is plain torch: the sigmoid and the gate times it are kept in addition.
    """
    if model.swiglu:
        return 3
    return 5 if model.quick_geglu else 2


def _experts(model: ModelConfig, load: Load) -> Work:
    """The router, as many rows as tokens have choices, and the shared expert. Kept of a row are its number in four
    tables, its weight and fc1's output; of a token with the norm's input and output the router's scores. Of a row that
    came from another rank also what came, its place, and at home its number."""
    h, f, e, k, blocks = model.hidden, model.expert_ffn, model.experts, model.moe_router_topk, 2 if model.gated else 1
    shared, gate = model.moe_shared_expert_intermediate_size or 0, model.moe_shared_expert_gate
    mine, again = load.tokens / load.shared, model.recompute_moe
    rows = float(load.tokens * k)
    if model.capacity_factor is not None:
        full = e * load.shared * min(mine, math.ceil(mine * k / e * model.capacity_factor))
        rows = full if model.moe_pad_expert_input_to_capacity else min(rows, full)
    one = h * f * (blocks + 1) + (blocks * f + h) * model.bias
    beside = (
        h * (e + gate)
        + e * model.bias
        + (h * shared * (blocks + 1) + (blocks * shared + h) * model.bias) * bool(shared)
    )
    products = 2.0 * h * (rows * f * (blocks + 1) + load.tokens * (e + gate + shared * (blocks + 1)))
    softmax, wide = model.moe_router_score_function == "softmax", 8 if model.moe_router_dtype == "fp64" else 4
    all_scores = not softmax or model.moe_router_pre_softmax  # or those of the chosen alone
    scores = all_scores + bool(model.balancing)
    router = wide * mine * e * scores
    alone = load.shared < load.tp  # ranks have the same tokens, and none goes anywhere
    home, here = rows / load.shared, rows / load.shared * (1 if alone else load.etp)
    exchanged = load.ep * load.etp > 1 and not alone and model.moe_token_dispatcher_type != "allgather"
    row = load.element * f / load.etp
    gathered = mine * (1 if alone else load.ep * load.etp)
    numbers = home * 3 * 8 + mine * k * 8 + here * 2 * 8 if exchanged else here * 3 * 8 + gathered * k * 8
    tables = numbers + here * wide + mine * k * (8 + wide + (8 + 2 * wide) * (not all_scores))
    came = here * load.element * h * exchanged
    normed = load.bytes(h * (not model.recompute_norms), 0)
    of_shared = 0 if model.recompute_shared_experts else _activated(model) * shared
    rest = load.bytes(h * gate, of_shared) + router + tables - here * wide
    saved = [(load.bytes(h, 0), "mlp_norm"), (load.bytes(0, 0, h * bool(model.hidden_dropout)), "")]
    saved += [(normed, "" if again or exchanged else "expert_fc1")]
    if not again:
        saved += [(rest, ""), (came, "expert_fc1"), (here * (row * blocks + wide), "moe_act")]
    return Work(
        products,
        products * (1 + again),
        products,
        **load.saved(*saved),
        kept=load.bytes(2 * h, (blocks + 1) * shared) + here * row * (blocks + 1) + 2 * came + wide * mine * e,
        parameters=e * one + beside + norm_size(model, h),
        unused=(e - k) * one,
        experts=e * one,
    )


def norm_size(model: ModelConfig, size: int) -> int:
    return size * (2 if model.normalization == "LayerNorm" else 1)
