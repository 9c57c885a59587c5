"""Costs of a model's pieces: time, activation and parameters of embedding, layers and head, from their widths.

Time is counted in FLOPs of matrix products, so an embedding look-up and the softmax of the loss, which wait for memory,
count as nothing; costs measured on a device can stand in for these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from operator import add

from megapipe.config import ModelConfig
from megapipe.config.layers import layer_config
from megapipe.partition.spans import LayerSpan
from megapipe.schedule import Costs
from megapipe.tensor_parallel.fused_cross_entropy import KEPT_ELEMENTS

OVERHEAD = 0.02
"""The cost of a pass beside its work where nobody measured it, in forwards of 1/P of the model: on emulated devices
host time and launches take 0.3 to 0.5 ms of passes of 20 ms."""


@dataclass(frozen=True)
class Work:
    """One microbatch through a piece of the model.

    Attributes:
        f, b, w: forward, input gradient, weight gradient; FLOPs, or any unit of time.
        held: bytes kept from F to B; kept: the part, and what B adds to it, that stays until W.
        parameters: how many, over all ranks of the stage; experts: those of them that lie on the experts' grid;
            unused: those that a token makes no use of.
    """

    f: float = 0.0
    b: float = 0.0
    w: float = 0.0
    held: float = 0.0
    kept: float = 0.0
    parameters: int = 0
    unused: int = 0
    experts: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(*map(add, vars(self).values(), vars(other).values()))

    def part(self, shares: int) -> Work:
        """The work of one of so many equal shares."""
        f, b, w, held, kept = (x / shares for x in (self.f, self.b, self.w, self.held, self.kept))
        return Work(f, b, w, held, kept, self.parameters // shares)

    @property
    def time(self) -> float:
        """All three passes."""
        return self.f + self.b + self.w


@dataclass(frozen=True)
class Pieces:
    """A model, as what can be dealt to stages: the embedding, each layer, and the head with norm and loss.

    Attributes:
        kept: the same without recomputation, and the share of the microbatches, at each position of the chain, that it
            holds for.
        overhead: time of every pass beside its work.
        shares: ranks that share embedding and head, in passes of their own; 1: the ends of the model have them.
    """

    embedding: Work
    layers: tuple[Work, ...]
    head: Work
    kept: tuple[Pieces, tuple[float, ...]] | None = None
    overhead: float = 0.0
    shares: int = 1

    @cached_property
    def _sums(self) -> tuple[tuple[float, ...], ...]:
        rows = zip(*((x.f, x.b, x.w, x.held, x.kept) for x in self.layers), strict=True)
        return tuple(tuple(accumulate(row, initial=0.0)) for row in rows)

    def stage(self, span: LayerSpan) -> Work:
        """A stage's share."""
        ends = (self.embedding if span.embedding else Work()) + (self.head if span.loss else Work())
        if self.shares > 1:
            ends = (self.embedding + self.head).part(self.shares) if span.share is not None else Work()
        return sum((self.layers[layer] for layer in span.layers), ends)

    def costs(self, counts: Sequence[int]) -> Costs:
        """Costs of the stages of a split, in the units of Work. counts: layers at each position of the chain."""
        f, b, w, held, owed = self._columns(counts)
        if self.kept is not None:  # means, so that a stage that holds its most holds both kinds in these shares
            whole, shares = self.kept
            _, other_b, _, other_held, _ = whole._columns(counts)
            b, held = _mixed(b, other_b, shares), _mixed(held, other_held, shares)
        costs = Costs(f, b, w, mem_b=held, mem_w=owed, overhead=self.overhead)
        if self.shares == 1:
            return costs
        share = self.head.part(self.shares)
        return replace(costs, s=share.f + share.b, t=share.w, mem_s=share.held)

    def on(self, ranks: int) -> Pieces:
        """The pieces with the overhead to expect on so many pipeline ranks."""
        whole = sum((x.f for x in self.layers), self.embedding.f + self.head.f)
        return replace(self, overhead=OVERHEAD * whole / ranks)

    def _columns(self, counts: Sequence[int]) -> list[tuple[float, ...]]:
        """f, b, w, held and kept at each position of the chain."""
        ends, last = list(accumulate(counts, initial=0)), len(counts) - 1
        columns = []
        for name, sums in zip(("f", "b", "w", "held", "kept"), self._sums or ((0.0,),) * 5, strict=True):
            column = [sums[b] - sums[a] for a, b in pairwise(ends)]
            if self.shares == 1:
                column[0] += getattr(self.embedding, name)
                column[last] += getattr(self.head, name)
            columns.append(tuple(column))
        return columns


def _mixed(a: tuple[float, ...], b: tuple[float, ...], shares: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(x + (y - x) * share for x, y, share in zip(a, b, shares, strict=True))


@dataclass(frozen=True)
class _Load:
    """The load of a layer: sequences of `seq` tokens, `tokens` of them here; tp ranks share it, `shared` of them
    also what lies between the linear layers; bytes of an activation. `meets`: keys of other ranks come here. ep,
    etp: of the experts."""

    seq: int
    tokens: int
    tp: int
    shared: int
    element: int
    meets: bool
    ep: int = 1
    etp: int = 1

    def bytes(self, between: float, inside: float, masked: float = 0) -> float:
        """Bytes of features between and inside the parallel parts; masked: of the former, those with a dropout byte."""
        return self.tokens * ((self.element * between + masked) / self.shared + self.element * inside / self.tp)


def pieces(
    model: ModelConfig,
    seq_length: int,
    micro_batch_size: int = 1,
    *,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    element_bytes: int = 4,
) -> Pieces:
    """The work of a GPT, layer by layer with its overrides.

    FLOPs, of all tensor-parallel ranks together and of one of the `cp` that share a sequence: a multiplication and an
    addition count as two; projections by their real head counts, causal scores at half, the head with the padded
    vocabulary (Narayanan et al. 2021, appendix). An input gradient costs what the forward does and the scores once
    more, a weight gradient the projections alone (Qi et al. 2023, table 1). What is computed again is added to the
    input gradient.
    Bytes, on each of them: inputs of linear layers, norms and attention; one byte for each element that dropout may
    zero (Korthikanti et al. 2022, section 4.1, with attention that keeps no scores). Full recomputation by `block`,
    which differs from layer to layer of a stage, is counted as none.

    Args:
        ep, etp: ranks that share experts, and each of them; their load is taken to be even.
        element_bytes: of an activation.
    """
    assert model.padded_vocab_size is not None
    h, vocab = model.hidden, model.padded_vocab_size
    tokens, shared = seq_length * micro_batch_size // cp, tp if model.sequence_parallel else 1
    meets = cp > 1 and "a2a" not in model.cp_comm_type
    load = _Load(seq_length, tokens, tp, shared, element_bytes, meets, ep, etp or tp)
    learned = model.position_embedding_type == "learned_absolute"
    rows = vocab + (model.max_position_embeddings or 0) * learned
    masks = load.tokens * h / load.shared * bool(model.hidden_dropout)
    alike = model.per_layer_overrides is None and not model.has_experts
    different = 1 if alike else model.layers
    layers = tuple(_layer(layer_config(model, layer), load) for layer in range(different)) * (model.layers // different)
    return Pieces(Work(held=masks, parameters=rows * h), layers, _head(model, load))


def _head(model: ModelConfig, load: _Load) -> Work:
    h, vocab = model.hidden, model.padded_vocab_size or 0
    product, parameters = 2.0 * load.tokens * h * vocab, h * vocab + _norm(model, h)
    if model.cross_entropy_loss_fusion:  # holds a small microbatch's logits, and makes those of others a second time
        holds = load.tokens * vocab / load.tp <= KEPT_ELEMENTS
        logits = vocab if holds else 0
        again = 0.0 if holds else product
        return Work(product, product + again, product, load.bytes(2 * h, logits), load.bytes(h, logits), parameters)
    softmax = 4 * load.tokens * vocab / load.tp  # in float32, in place of the logits
    return Work(product, product, product, load.bytes(2 * h, 0) + softmax, load.bytes(h, vocab), parameters)


def _layer(model: ModelConfig, load: _Load) -> Work:
    whole = _attention(model, load) + _mlp(model, load)
    if model.recompute_granularity != "full" or model.recompute_method == "block":
        return whole
    return replace(whole, b=whole.b + whole.f, held=load.bytes(model.hidden, 0) / (model.recompute_num_layers or 1))


def _attention(model: ModelConfig, load: _Load) -> Work:
    if model.no_attention:
        return Work()
    h, queries = model.hidden, model.heads * model.head_dim
    qkv = queries + 2 * model.query_groups * model.head_dim
    reach = load.seq if model.window is None else min(load.seq, model.window + 1)
    scores = 4.0 * load.tokens * queries * (reach - reach * reach / 2 / load.seq)
    products = 2.0 * load.tokens * h * (qkv + queries)
    bias = qkv * (model.bias or model.add_qkv_bias) + h * model.bias
    rotated = qkv * (model.position_embedding_type == "rope")
    norms = _norm(model, h) + 2 * _norm(model, model.head_dim) * model.qk_layernorm
    # Attention by blocks keeps a logarithm of each query in float32, and computes itself again anyway.
    logs = 4 * load.tokens * model.heads / load.tp * (load.meets or model.attention_dropout > 0)
    return Work(
        products + scores,
        products + (3 if model.recompute_attention else 2) * scores,
        products,
        held=load.bytes(h + h * (not model.recompute_norms), qkv + rotated + queries, h * bool(model.hidden_dropout))
        + logs,
        kept=load.bytes(2 * h, qkv + queries),
        parameters=h * (qkv + queries) + bias + norms,
    )


def _mlp(model: ModelConfig, load: _Load) -> Work:
    if model.no_mlp:
        return Work()
    if model.has_experts:
        return _experts(model, load)
    h, ffn, blocks = model.hidden, model.ffn, 2 if model.gated else 1
    products = 2.0 * load.tokens * h * ffn * (blocks + 1)
    again = model.recompute_mlp
    between = h + h * (not model.recompute_norms)
    return Work(
        products,
        products * (1 + again),
        products,
        held=load.bytes(between, _activated(model) * ffn * (not again), h * bool(model.hidden_dropout)),
        kept=load.bytes(2 * h, (blocks + 1) * ffn),
        parameters=h * ffn * (blocks + 1) + (blocks * ffn + h) * model.bias + _norm(model, h),
    )


def _activated(model: ModelConfig) -> int:
    """Tensors of a feed-forward layer's width that it keeps: fc1's output, what comes between, fc2's input."""
    return 3 if model.swiglu else 4 if model.gated else 2


def _experts(model: ModelConfig, load: _Load) -> Work:
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
    inside = here * row * blocks + came + router + tables
    between = h + h * (not model.recompute_norms)
    of_shared = 0 if model.recompute_shared_experts else _activated(model) * shared
    outside = load.bytes(between + h * gate, of_shared, h * bool(model.hidden_dropout))
    return Work(
        products,
        products * (1 + again),
        products,
        held=load.bytes(between, 0, h * bool(model.hidden_dropout)) if again else outside + inside,
        kept=load.bytes(2 * h, (blocks + 1) * shared) + here * row * (blocks + 1) + 2 * came + wide * mine * e,
        parameters=e * one + beside + _norm(model, h),
        unused=(e - k) * one,
        experts=e * one,
    )


def _norm(model: ModelConfig, size: int) -> int:
    return size * (2 if model.normalization == "LayerNorm" else 1)
