"""Costs of a model's pieces: time, activation and parameters of embedding, layers and head, from their widths.

Time is counted in FLOPs of matrix products, so an embedding look-up and the softmax of the loss, which wait for memory,
count as nothing; costs measured on a device can stand in for these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from megapipe.config import ModelConfig
from megapipe.config.layers import layer_config
from megapipe.partition.spans import LayerSpan
from megapipe.plan.layers import NONE, Gathers, Load, layer_work, norm_size
from megapipe.plan.layers import Work as Work
from megapipe.schedule import Costs
from megapipe.tensor_parallel.fused_cross_entropy import KEPT_ELEMENTS

OVERHEAD = 0.02
"""The cost of a pass beside its work where nobody measured it, in forwards of 1/P of the model: on emulated devices
host time and launches take 0.3 to 0.5 ms of passes of 20 ms."""


_COLUMNS = ("f", "b", "w", "held", "kept", "copied")


@dataclass(frozen=True)
class Pieces:
    """A model, as what can be dealt to stages: the embedding, each layer, and the head with norm and loss.

    Attributes:
        kept: the same without recomputation, and the share of the microbatches, at each position of the chain, that it
            holds for.
        overhead: time of every pass beside its work.
        shares: ranks that share embedding and head, in passes of their own; 1: the ends of the model have them.
        depths: of multi-token prediction, each with a head.
        modules: of --offload-modules; all of what is held may be copied where there is none.
        hidden: bytes of hidden states, where they are and on a rank with a share of the vocabulary, which sees all.
        wide: bytes of a gradient of keys, which slices add up in float32, over those of a key.
    """

    embedding: Work
    layers: tuple[Work, ...]
    head: Work
    kept: tuple[Pieces, tuple[float, ...]] | None = None
    overhead: float = 0.0
    shares: int = 1
    depths: tuple[Work, ...] = ()
    hidden: tuple[float, float] = (0.0, 0.0)
    wide: float = 1.0
    modules: tuple[str, ...] = ()

    @cached_property
    def _sums(self) -> tuple[tuple[float, ...], ...]:
        rows = zip(*(tuple(getattr(x, name) for name in _COLUMNS) for x in self.layers), strict=True)
        return tuple(tuple(accumulate(row, initial=0.0)) for row in rows)

    def stage(self, span: LayerSpan) -> Work:
        """A stage's share."""
        if span.depth:
            return self._beside[span.depth - 1]
        ends = (self.embedding if span.embedding else Work()) + (self.head if span.loss else Work())
        if self.shares > 1:
            ends = Work() if span.share is None else self.share
        return sum((self.layers[layer] for layer in span.layers), ends)

    @property
    def share(self) -> Work:
        """The part of embedding and heads that one of the ranks has which share them; it keeps all hidden states."""
        head, losses = self.head, 1 + len(self.depths)
        logits = (head.held - 2 * self.hidden[0]) / self.shares
        f, b, w, held = (losses * x for x in (head.f, head.b, head.w, (self.hidden[1] + logits) * self.shares))
        return (self.embedding + replace(head, f=f, b=b, w=w, held=held)).part(self.shares)

    @cached_property
    def _beside(self) -> tuple[Work, ...]:
        """The depths; where the ranks share the heads they keep what their last norms take."""
        if self.shares == 1:
            return self.depths
        head, kept = self.head, self.head.held - self.hidden[0]
        return tuple(
            replace(x, f=x.f - head.f, b=x.b - head.b, w=x.w - head.w, held=x.held - kept, kept=x.kept - head.kept)
            for x in self.depths
        )

    def costs(self, counts: Sequence[int]) -> Costs:
        """Costs of the stages of a split, then of the depths, in the units of Work. counts: layers at each position."""
        f, b, w, held, owed, copied = self._columns(counts)
        if self.kept is not None:  # means, so that a stage that holds its most holds both kinds in these shares
            whole, shares = self.kept
            other = whole.further(self.depths)._columns(counts)
            b, held, copied = (_mixed(x, other[i], shares) for i, x in ((1, b), (3, held), (5, copied)))
        costs = Costs(f, b, w, mem_b=held, mem_w=owed, mem_o=copied if self.modules else None, overhead=self.overhead)
        if self.shares == 1:
            return costs
        share = self.share
        return replace(costs, s=share.f + share.b, t=share.w, mem_s=share.held - self.embedding.held / self.shares)

    def further(self, depths: tuple[Work, ...]) -> Pieces:
        """The pieces with these depths, of which microbatches that are not computed again keep as much as others."""
        kept = self.kept and (self.kept[0], (*self.kept[1], *(0.0 for _ in depths)))
        return replace(self, depths=depths, kept=kept)

    @property
    def without_depths(self) -> Pieces:
        """The pieces of the model's own chain: what `further` was called with is taken away again."""
        kept = self.kept
        if kept is not None:
            of_layers, shares = kept
            kept = of_layers, shares[: len(shares) - len(self.depths)]
        return replace(self, depths=(), kept=kept)

    def of_slices(self, costs: Costs, counts: Sequence[int]) -> Costs:
        """The costs of these stages with what slices of a sequence make a difference of: attention, and keys that are
        kept for the slices behind."""
        ends = list(accumulate(counts, initial=0))
        stages = [sum(self.layers[a:b], Work()) for a, b in pairwise(ends)]
        counted = self._columns(counts)

        def part(name: str, of: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(min(1.0, getattr(x, name) / y) if y else 0.0 for x, y in zip(stages, of, strict=True))

        held = (costs.mem_b,) * len(stages) if not isinstance(costs.mem_b, tuple) else costs.mem_b
        return replace(
            costs,
            attention_f=part("scores_f", counted[0]),
            attention_b=part("scores_b", counted[1]),
            mem_b=tuple(x + stage.kept_keys for x, stage in zip(held, stages, strict=True)),
            mem_k=tuple(stage.keys for stage in stages),
            wide_k=self.wide,
        )

    def on(self, ranks: int) -> Pieces:
        """The pieces with the overhead to expect on so many pipeline ranks."""
        whole = sum((x.f for x in self.layers), self.embedding.f + self.head.f)
        return replace(self, overhead=OVERHEAD * whole / ranks)

    def _columns(self, counts: Sequence[int]) -> list[tuple[float, ...]]:
        """f, b, w, held, kept and copied at each position of the chain."""
        ends, last = list(accumulate(counts, initial=0)), len(counts) - 1
        columns = []
        for name, sums in zip(_COLUMNS, self._sums or ((0.0,),) * len(_COLUMNS), strict=True):
            column = [sums[b] - sums[a] for a, b in pairwise(ends)]
            if self.shares == 1:
                column[0] += getattr(self.embedding, name)
                column[last] += getattr(self.head, name)
            elif name == "held":
                column[0] += self.embedding.held
                column[last] += self.hidden[0]
            columns.append((*column, *(getattr(depth, name) for depth in self._beside)))
        return columns


def _mixed(a: tuple[float, ...], b: tuple[float, ...], shares: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(x + (y - x) * share for x, y, share in zip(a, b, shares, strict=True))


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
    modules: tuple[str, ...] = (),
    gathers: Gathers = NONE,
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
        modules: of --offload-modules.
        gathers: of weights in eight bits.
    """
    assert model.padded_vocab_size is not None
    h, vocab = model.hidden, model.padded_vocab_size
    tokens, shared = seq_length * micro_batch_size // cp, tp if model.sequence_parallel else 1
    meets = cp > 1 and "a2a" not in model.cp_comm_type
    load = Load(seq_length, tokens, tp, shared, element_bytes, meets, ep, etp or tp, modules, gathers)
    learned = model.position_embedding_type == "learned_absolute"
    rows = vocab + (model.max_position_embeddings or 0) * learned
    masks = load.tokens * h / load.shared * bool(model.hidden_dropout)
    alike = model.per_layer_overrides is None and not model.has_experts and not model.first_last_layers_bf16
    different = 1 if alike else model.layers
    configs = [layer_config(model, layer) for layer in range(different)]
    works = {config: layer_work(config, load) for config in dict.fromkeys(configs)}
    layers = tuple(works[config].in_fp8(load) if config.fp8_format else works[config] for config in configs)
    embedding = Work(held=masks, parameters=rows * h)
    head = _head(model, load)
    depth = _depth(model, load) + head
    hidden = load.bytes(h, 0), float(load.element * tokens * h)
    layers, depths = layers * (model.layers // different), (depth,) * model.depths
    wide = 4 / element_bytes
    return Pieces(embedding, layers, head, depths=depths, hidden=hidden, modules=modules, wide=wide)


def _depth(model: ModelConfig, load: Load) -> Work:
    """The layer of a depth of multi-token prediction, and what joins its two inputs; its head and the norm before it
    are as the model's. Weights of embedding and head are the model's own, and counted there."""
    h = model.hidden
    product = 2.0 * load.tokens * 2 * h * h
    join = Work(
        product,
        product,
        product,
        held=load.bytes(4 * h, 0),
        kept=load.bytes(3 * h, 0),
        parameters=2 * h * h + 2 * norm_size(model, h) - h * (model.padded_vocab_size or 0),
    )
    return join + layer_work(layer_config(model, model.layers), load)


def _head(model: ModelConfig, load: Load) -> Work:
    h, vocab = model.hidden, model.padded_vocab_size or 0
    product, parameters = 2.0 * load.tokens * h * vocab, h * vocab + norm_size(model, h)
    if model.cross_entropy_loss_fusion:  # holds a small microbatch's logits, and makes those of others a second time
        holds = load.tokens * vocab / load.tp <= KEPT_ELEMENTS
        logits = vocab if holds else 0
        again = 0.0 if holds else product
        return Work(product, product + again, product, load.bytes(2 * h, logits), load.bytes(h, logits), parameters)
    softmax = 4 * load.tokens * vocab / load.tp  # in float32, in place of the logits
    return Work(product, product, product, load.bytes(2 * h, 0) + softmax, load.bytes(h, vocab), parameters)
