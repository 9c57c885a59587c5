"""The pieces of a model that a split deals to stages: embedding, layers, head, and depths.

Their work is counted by formula. Time is FLOPs of matrix products, so that an embedding look-up
and the softmax of the loss, which wait for memory, count as nothing. Measured costs can stand in
for the counted ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil
from typing import NamedTuple

from megapipe.config import ModelConfig
from megapipe.config.layers import layer_config
from megapipe.partition.spans import LayerSpan
from megapipe.plan.layers import (
    NOT_GATHERED,
    Gathers,
    RankLoad,
    Work,
    head_work,
    layer_work,
    norm_size,
    passing,
)
from megapipe.schedule import Costs

OVERHEAD = 0.02
"""The cost of a pass in addition to its work, in forwards of 1/P of the model.

It stands where nobody measured it. On emulated devices host time and launches take 0.3 to 0.5 ms
of passes of 20 ms.
"""

Floats = tuple[float, ...]


class _Columns(NamedTuple):
    """Some fields of `Work` as columns, for all stages.

    A column has one value for each stage in the model's order, then one for each module of
    multi-token prediction.

    Attributes:
        f, b, w: times of the passes.
        held, kept, copied: bytes, as in `Work`.
    """

    f: Floats
    b: Floats
    w: Floats
    held: Floats
    kept: Floats
    copied: Floats


@dataclass(frozen=True)
class ModelWork:
    """The work of each piece of a model: embedding, layers, head and multi-token prediction (MTP).

    `stage`, `costs` and `of_slices` return the work of stages made of these pieces. `share` is one
    rank's part of a split embedding and head. `on` sets the overhead for a number of pipeline
    ranks.

    Attributes:
        embedding, layers, head: the work of each piece. The head has the last norm and the loss.
        kept: None unless some microbatches recompute and others do not. Then (the pieces without
            recomputation, for each stage the fraction of microbatches that do not recompute).
        overhead: time of every pass in addition to its work.
        shares: number of pipeline ranks over which embedding and head are split; 1 if they are on
            the stages at the ends of the model.
        depths: the work of each MTP module, with a head.
        hidden: bytes of a microbatch's hidden states: (of the tokens on one rank, of all tokens). A
            rank's part of a split vocabulary needs those for all tokens.
        wide: bytes of a key's gradient divided by the bytes of a key, such as 2 for bf16. Slices
            add these gradients in float32.
        modules: modules whose activations may be copied to the host; () for all.
        together: under full recomputation, the number of layers that backward makes again at once.
            Such a group keeps one input. A stage with fewer layers is one group.
    """

    embedding: Work
    layers: tuple[Work, ...]
    head: Work
    kept: tuple[ModelWork, Floats] | None = None
    overhead: float = 0.0
    shares: int = 1
    depths: tuple[Work, ...] = ()
    hidden: tuple[float, float] = (0.0, 0.0)
    wide: float = 1.0
    modules: tuple[str, ...] = ()
    together: int = 1

    @cached_property
    def _sums(self) -> _Columns:
        """Running sums of each field over the layers: entry n of a column sums n layers."""
        # A search judges thousands of splits: a stage's work is the difference of two sums.
        sums = []
        for name in _Columns._fields:
            sizes = [getattr(layer, name) for layer in self.layers]
            sums.append(tuple(accumulate(sizes, initial=0.0)))
        return _Columns(*sums)

    def stage(self, span: LayerSpan) -> Work:
        """Return the FLOPs and bytes of a stage.

        Args:
            span: the layers of the stage, and whether it has embedding, loss or multi-token
                prediction.
        """
        if span.depth:
            return self._depths_alone[span.depth - 1]
        ends = Work()
        if self.shares == 1:
            if span.embedding:
                ends = self.embedding
            if span.loss:
                ends += self.head
        elif span.share is not None:
            ends = self.share
        return sum((self.layers[layer] for layer in span.layers), ends)

    @property
    def share(self) -> Work:
        """One rank's part of a split embedding and head, with losses of multi-token prediction."""
        head = self.head
        losses = 1 + len(self.depths)
        here, of_all = self.hidden
        # Each rank keeps the hidden states of all tokens, and its part of the logits.
        logits = (head.held - 2 * here) / self.shares
        held = (of_all + logits) * self.shares
        heads = replace(
            head, f=losses * head.f, b=losses * head.b, w=losses * head.w, held=losses * held
        )
        return (self.embedding + heads).part(self.shares)

    @cached_property
    def _depths_alone(self) -> tuple[Work, ...]:
        """The work of each multi-token prediction module, without a head that ranks share."""
        if self.shares == 1:
            return self.depths
        head = self.head
        # The last norm before a shared head stays with the depth, and keeps its input.
        held = head.held - self.hidden[0]
        gone = Work(-head.f, -head.b, -head.w, held=-held, kept=-head.kept)
        return tuple(depth + gone for depth in self.depths)

    def costs(self, counts: Sequence[int]) -> Costs:
        """Return the times and bytes of each stage, then of each module of multi-token prediction.

        Times are in the unit of the pieces' work.

        Args:
            counts: number of layers of each stage, in the model's order.
        """
        column = self._columns(counts)
        if self.kept is not None:
            # Means over microbatches with and without recomputation. A stage that holds its most
            # has both kinds in these proportions.
            whole, fractions = self.kept
            other = replace(whole, depths=self.depths)._columns(counts)
            # Both kinds have the same depths, so any fraction is right.
            fractions = (*fractions, *(0.0 for _ in self.depths))
            column = column._replace(
                b=_mixed(column.b, other.b, fractions),
                held=_mixed(column.held, other.held, fractions),
                copied=_mixed(column.copied, other.copied, fractions),
            )
        costs = Costs(
            column.f,
            column.b,
            column.w,
            mem_b=column.held,
            mem_w=column.kept,
            mem_o=column.copied if self.modules else None,
            mem_p=self._passing(counts),
            overhead=self.overhead,
        )
        if self.shares == 1:
            return costs
        share = self.share
        mask = self.embedding.held / self.shares  # stays on the first stage
        return replace(costs, s=share.f + share.b, t=share.w, mem_s=share.held - mask)

    def of_slices(self, costs: Costs, counts: Sequence[int]) -> Costs:
        """Return the costs of stages whose microbatches are cut into slices of the sequence.

        Fields are added: attention's fraction of F and B, since attention differs between slices,
        and the bytes of keys and values, which later slices read.

        Args:
            costs: the costs of the stages for microbatches that are not cut.
            counts: number of layers of each stage, in the model's order.
        """
        # Slices exclude depths and a shared vocabulary: a stage has layers, and perhaps an end.
        stages = []
        for begin, end in pairwise(accumulate(counts, initial=0)):
            stages.append(sum(self.layers[begin:end], Work()))
        counted = self._columns(counts)
        held = costs.mem_b
        if not isinstance(held, tuple):
            held = (held,) * len(stages)
        return replace(
            costs,
            attention_f=_fractions([stage.scores_f for stage in stages], counted.f),
            attention_b=_fractions([stage.scores_b for stage in stages], counted.b),
            mem_b=tuple(x + stage.kept_keys for x, stage in zip(held, stages, strict=True)),
            mem_k=tuple(stage.keys for stage in stages),
            wide_k=self.wide,
        )

    def on(self, ranks: int) -> ModelWork:
        """Return the pieces with the overhead of a pass: its time beyond its work.

        The overhead is a fiftieth of the forward of 1/`ranks` of the model.
        """
        # A stage with 1/P of the model is the unit, however many stages a rank has.
        whole = sum((layer.f for layer in self.layers), self.embedding.f + self.head.f)
        return replace(self, overhead=OVERHEAD * whole / ranks)

    def _passing(self, counts: Sequence[int]) -> Floats:
        """Return for each stage, and then each depth, the bytes that F and B need while they run.

        Args:
            counts: number of layers of each stage, in the model's order.
        """
        found = []
        for begin, end in pairwise(accumulate(counts, initial=0)):
            found.append(passing(self.layers[begin:end], self.together))
        # A depth has a layer like the last one.
        of_depth = passing(self.layers[-1:], 1)
        if self.shares == 1:
            # The layers' backward follows the head's, which frees what the head holds.
            head = self.head
            found[-1] = max(head.passing, found[-1] - head.held)
            of_depth = max(head.passing, of_depth - head.held)
        return (*found, *[of_depth] * len(self.depths))

    def _columns(self, counts: Sequence[int]) -> _Columns:
        """Return the work of each stage, then of each multi-token prediction, field by field.

        Args:
            counts: number of layers of each stage, in the model's order.
        """
        ends = list(accumulate(counts, initial=0))
        columns = []
        for name, sums in zip(_Columns._fields, self._sums, strict=True):
            column = [sums[end] - sums[begin] for begin, end in pairwise(ends)]
            if name == "held" and self.together > 1:
                # Of a group of layers only the first keeps its input.
                for stage, count in enumerate(counts):
                    column[stage] -= (count - ceil(count / self.together)) * self.hidden[0]
            if self.shares == 1:
                column[0] += getattr(self.embedding, name)
                column[-1] += getattr(self.head, name)
            elif name == "held":
                # Both ends of a shared vocabulary keep something on their own stage: the dropout
                # mask of the embedding, and the input of the last norm.
                column[0] += self.embedding.held
                column[-1] += self.hidden[0]
            of_depths = [getattr(depth, name) for depth in self._depths_alone]
            columns.append((*column, *of_depths))
        return _Columns(*columns)


def _mixed(some: Floats, others: Floats, fractions: Floats) -> Floats:
    """Return, for each stage, a weighted mean of two values.

    Args:
        some, others: the values of each stage.
        fractions: the weight of `others`, from 0 to 1.
    """
    places = zip(some, others, fractions, strict=True)
    return tuple(x + (y - x) * fraction for x, y, fraction in places)


def _fractions(parts: Sequence[float], wholes: Sequence[float]) -> Floats:
    """Return parts[i] / wholes[i] for each stage i, at most 1; 0 if the whole is 0."""
    pairs = zip(parts, wholes, strict=True)
    # Rounding of the sums can make a part larger than its whole.
    return tuple(min(1.0, part / whole) if whole else 0.0 for part, whole in pairs)


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
    gathers: Gathers = NOT_GATHERED,
) -> ModelWork:
    """Return the work of each piece of a GPT. Layers may have overrides of their own.

    FLOPs are summed over tensor-parallel ranks, for the tokens of one context-parallel rank. A
    multiplication and an addition count as two. Half of the scores of causal attention count, and
    the head has the padded vocabulary (Narayanan et al. 2021, appendix). An input gradient costs as
    much as the forward, but twice as much for attention's products. A weight gradient costs as much
    as the forward without attention's products (Qi et al. 2023, table 1). Recomputation is added to
    the input gradient.

    Bytes are counted on one rank: inputs of linear layers, norms and attention, and one byte for
    each element that dropout may zero. The source is Korthikanti et al. 2022, section 4.1, with
    attention that keeps no scores. Full recomputation with the method `block` counts as no
    recomputation.

    Args:
        seq_length: tokens of a sequence.
        micro_batch_size: sequences of a microbatch.
        tp, cp: number of tensor- and of context-parallel ranks.
        ep: number of expert-parallel ranks. Tokens are assumed to be spread evenly over them.
        etp: number of ranks that split each expert; None for `tp`.
        element_bytes: bytes of an element of an activation.
        modules: modules whose activations may be copied to the host; () for all.
        gathers: numbers of data-parallel ranks that gather weights from each other in eight bits.
    """
    assert model.padded_vocab_size is not None
    h = model.hidden
    tokens = seq_length * micro_batch_size // cp
    shared = tp if model.sequence_parallel else 1
    # By all-to-all a rank has whole sequences of some heads; other ways bring keys in blocks.
    meets = cp > 1 and "a2a" not in model.cp_comm_type
    etp = etp or tp
    load = RankLoad(seq_length, tokens, tp, shared, element_bytes, meets, ep, etp, modules, gathers)
    layers = _layers(model, load)
    head = head_work(model, load)
    depth = _depth(model, load) + head
    rows = model.padded_vocab_size
    if model.position_embedding_type == "learned_absolute":
        rows += model.max_position_embeddings or 0
    masks = load.tokens * h / load.shared * bool(model.hidden_dropout)
    together = 1
    if model.recompute_granularity == "full" and model.recompute_method != "block":
        together = model.recompute_num_layers or 1
    return ModelWork(
        Work(held=masks, parameters=rows * h),
        layers,
        head,
        depths=(depth,) * model.depths,
        hidden=(load.bytes(h, 0), float(load.element * tokens * h)),
        modules=modules,
        wide=4 / element_bytes,
        together=together,
    )


def _layers(model: ModelConfig, load: RankLoad) -> tuple[Work, ...]:
    """Return the work of each layer, with its overrides of the model's configuration.

    Args:
        load: the tokens of a microbatch on one rank, and the ranks that split a layer.
    """
    different = model.layers
    mixed = model.per_layer_overrides or model.has_experts or model.has_delta
    if not (mixed or model.first_last_layers_bf16):
        different = 1
    configs = [layer_config(model, layer) for layer in range(different)]
    # A search of plans counts thousands of models: equal layers are counted once.
    works: dict[ModelConfig, Work] = {}
    for config in dict.fromkeys(configs):
        work = layer_work(config, load)
        works[config] = work.in_fp8(load) if config.fp8_format else work
    return tuple(works[config] for config in configs) * (model.layers // different)


def _depth(model: ModelConfig, load: RankLoad) -> Work:
    """Return the work of a module of multi-token prediction, before its head is added.

    A module has a projection of two normed inputs, followed by a layer. The caller adds a head. Its
    parameters are the main model's, so as many are subtracted here.

    Args:
        load: the tokens of a microbatch on one rank, and the ranks that split a layer.
    """
    h = model.hidden
    product = 2.0 * load.tokens * 2 * h * h
    # Its embedding and head are the model's weights and count there: they are subtracted here.
    vocabulary = h * (model.padded_vocab_size or 0)
    join = Work(
        product,
        product,
        product,
        held=load.bytes(4 * h, 0),
        kept=load.bytes(3 * h, 0),
        parameters=2 * h * h + 2 * norm_size(model, h) - vocabulary,
    )
    return join + layer_work(layer_config(model, model.layers), load)
