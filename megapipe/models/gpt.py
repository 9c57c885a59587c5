"""The GPT model: one pipeline stage of it, or all. GPT-2 and Llama are settings of the same code.

Parameter names are global: a layer is named by its number in the whole model, on any stage.
Shapes in this package: s tokens of a sequence, b sequences of a microbatch, h hidden size, v
vocabulary, t tensor-parallel ranks, c context-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout, layout_of, parameter, set_layout
from megapipe.distributed.tokens import positions
from megapipe.models.layer import TransformerLayer
from megapipe.models.mtp import LayerProvider, MultiTokenLayer
from megapipe.models.parts import parts_of
from megapipe.models.recompute import recompute, units
from megapipe.partition.spans import LayerSpan
from megapipe.tensor_parallel.collectives import across, closing
from megapipe.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megapipe.tensor_parallel.embedding import VocabParallelEmbedding
from megapipe.tensor_parallel.fused_cross_entropy import vocab_parallel_linear_cross_entropy
from megapipe.tensor_parallel.linear import ColumnParallelLinear
from megapipe.tensor_parallel.rng import current_microbatch, dropout
from megapipe.tensor_parallel.scaling import scaled
from megapipe.tensor_parallel.softcap import capped
from megapipe.tensor_parallel.vocabulary import VocabularyRows

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
POSITION_EMBEDDINGS = "embedding.position_embeddings.weight"
HEAD = "output_layer.weight"

# Context variables and not attributes: two passes of one module may run at the same time.
_between: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar("between", default=None)
"""The function that this pass calls before each layer."""
_hidden: ContextVar[Tensor | None] = ContextVar("hidden", default=None)
"""The hidden states that this pass has given to its head."""


class Embedding(nn.Module):
    """The word embedding, plus learned positions if the model has them.

    Three kinds of stages have one:

    1. The first stage of the model. 2. A stage with a share (equal part) of the vocabulary; it
    holds these rows of the word embedding. 3. A module (depth) of multi-token prediction. This
    module repeats the weights of the model's embedding. If the vocabulary is split over the ranks,
    it has no word embedding: forward is given the tokens' vectors.
    """

    def __init__(self, config: ModelConfig, span: LayerSpan, tp: Axis) -> None:
        super().__init__()
        assert config.padded_vocab_size is not None
        self.hidden_dropout = config.hidden_dropout
        self.factor = config.mup_embedding_mult
        self.shares_sequence = tp if config.sequence_parallel else None
        self.site = f"embedding of depth {span.depth}" if span.depth else "embedding"
        full = (config.padded_vocab_size, config.hidden)
        self.word_embeddings: VocabParallelEmbedding | VocabularyRows | None = None
        if span.share is not None:
            part = (span.share, span.shares)
            self.word_embeddings = VocabularyRows(full, part, tp, config.embedding_std)
        elif span.shares == 1:
            # A depth's weights repeat the model's, on whatever rank it runs.
            tied_to = WORD_EMBEDDINGS if span.depth else None
            self.word_embeddings = VocabParallelEmbedding(
                *full,
                tp=tp,
                sequence_parallel=config.sequence_parallel,
                init_std=config.embedding_std,
                tied_to=tied_to,
            )
        # For rows that the vocabulary's shares have looked up: each tp rank has a summand of them.
        self._closes = closing(tp, config.sequence_parallel)
        self.position_embeddings = None
        has_positions = config.position_embedding_type == "learned_absolute"
        if has_positions and (span.embedding or span.depth):
            assert config.max_position_embeddings is not None
            shape = (config.max_position_embeddings, config.hidden)
            # Given a weight, torch draws none. Its own draw would import the compiler on the meta
            # device, a second at each start.
            self.position_embeddings = nn.Embedding(*shape, _weight=torch.empty(shape))
            tied_to = POSITION_EMBEDDINGS if span.depth else None
            layout = Layout(
                shape,
                tied_to=tied_to,
                std=config.embedding_std,
                sum_over_tp=config.sequence_parallel,
            )
            self.position_embeddings.weight = parameter(layout)

    def forward(
        self, tokens: Tensor, position_ids: Tensor, looked_up: Tensor | None = None
    ) -> Tensor:
        """Embed tokens, add positions, and apply dropout in training.

        Args:
            tokens, position_ids: [b, s/c], this context-parallel rank's tokens.
            looked_up: [s, b, h], the word embeddings if the vocabulary is split over the pipeline,
                not yet summed over tp; None to look the tokens up here.
        Returns: [s/c, b, h]; under sequence parallelism [s/(c t), b, h].
        """
        tp = self.shares_sequence
        if looked_up is None:
            assert self.word_embeddings is not None, "without rows they come looked up"
            x = self.word_embeddings(tokens.t())
        else:
            x = across(looked_up, self._closes)
        if self.position_embeddings is not None:
            ids = position_ids.t()
            if tp is not None:
                # The word embeddings have this rank's tokens already: their sum over tp was a
                # reduce-scatter.
                ids = ids.chunk(tp.size)[tp.rank]
            x = x + self.position_embeddings(ids)
        x = scaled(x, self.factor)
        if self.training:
            x = dropout(x, self.hidden_dropout, self.site, tp=tp, dim=0)
        return x


class Decoder(nn.Module):
    """The transformer layers of one stage, and the final norm if the stage computes the loss.

    Args:
        span: which layers these are, and whether the stage has embedding or loss.
        layer: builds a layer from (config, tp, the layer's number in the whole model).
    """

    def __init__(
        self, config: ModelConfig, span: LayerSpan, tp: Axis, layer: LayerProvider
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(n): layer(config, tp, n) for n in span.layers})
        self.final_layernorm = None
        if span.loss:
            self.final_layernorm = parts_of(config, tp).norm(config.hidden)
        # Groups of layers, and whether backward recomputes the group. A plain list, in which
        # torch registers no module: each layer is registered once, in self.layers.
        layers = iter(self.layers.values())
        self._groups = [
            (nn.Sequential(*islice(layers, size)), recomputed)
            for size, recomputed in units(config, span.count)
        ]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers: [s, b, h] -> [s, b, h]; under sequence parallelism [s/t, b, h]."""
        between = _between.get()
        for group, recomputed in self._groups:
            if between is not None:
                # The gradient of x says that all later layers have had their backward: the
                # reduction of their weight gradients may begin.
                x = between(x)
            x = recompute(group, x) if recomputed else group(x)
        if self.final_layernorm is None:
            return x
        return self.final_layernorm(x)  # type: ignore[no-any-return]


def head_of(config: ModelConfig, tp: Axis, tied_to: str | None) -> ColumnParallelLinear:
    """Build an output head [v/t, h].

    Args:
        tp: tensor parallelism, which splits the rows.
        tied_to: global name of the parameter whose weight the head repeats, or None.
    """
    assert config.padded_vocab_size is not None
    # A tied head starts as the embedding, and so is drawn with the embedding's deviation.
    std = config.embedding_std if config.tied else config.linear_std
    return ColumnParallelLinear(
        config.hidden,
        config.padded_vocab_size,
        tp=tp,
        bias=config.has_bias("head"),
        sequence_parallel=config.sequence_parallel,
        init_std=std,
        tied_to=tied_to,
    )


class Depth(nn.Module):
    """One module (depth) of multi-token prediction, a pipeline stage of its own.

    The embedding and the head repeat the model's weights. If the vocabulary is split over the
    ranks, the module has neither, and `forward` is given the word embeddings.
    """

    def __init__(
        self, config: ModelConfig, span: LayerSpan, tp: Axis, layer: LayerProvider
    ) -> None:
        super().__init__()
        self.number = str(span.depth - 1)
        depth = MultiTokenLayer(config, tp, span.first, layer)
        self.layers = nn.ModuleDict({self.number: depth})
        self.embeddings = nn.ModuleDict({self.number: Embedding(config, span, tp)})
        self.heads = nn.ModuleDict()
        if span.shares == 1:
            tied_to = WORD_EMBEDDINGS if config.tied else HEAD
            self.heads[self.number] = head_of(config, tp, tied_to)
        # The owner's rank keeps the optimizer state, and sends the weight here after each update.
        for param in (*self.embeddings.parameters(), *self.heads.parameters()):
            set_layout(param, replace(layout_of(param), received=True))

    @property
    def head(self) -> ColumnParallelLinear | None:
        """The output head; None if the vocabulary is split over the ranks."""
        head = self.heads[self.number] if self.heads else None
        assert head is None or isinstance(head, ColumnParallelLinear)
        return head

    @property
    def ends(self) -> list[nn.Module]:
        """The modules whose weight has a row for each token: word embedding and head, if any."""
        embedding = self.embeddings[self.number]
        assert isinstance(embedding, Embedding)
        return [end for end in (embedding.word_embeddings, self.head) if end is not None]

    def forward(self, x: Tensor, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """Return the hidden states of this module, [s, b, h].

        Args:
            x: hidden states of the module before, or of the model: [s, b, h]. If the vocabulary is
                split over the ranks, the word embeddings follow in the same tensor: [2s, b, h].
            tokens, position_ids: [b, s], beginning d tokens after x for module d.
        """
        looked_up = None
        if not self.heads:
            s = tokens.shape[1]
            looked_up = x[-s:]
            x = x[:-s]
        embedded = self.embeddings[self.number](tokens, position_ids, looked_up)
        return self.layers[self.number](x, embedded)  # type: ignore[no-any-return]


class GPTModel(nn.Module):
    """The part of a GPT that a pipeline stage holds.

    `span` says which part: a range of layers, with or without embedding and loss; or one module
    (depth) of multi-token prediction. Module d reads tokens and labels d tokens ahead.

    A tied output head is a parameter of its own with its own gradient; Layout.tied_to names the
    weight that it repeats. Both gradients are then summed in the same way whether or not the two
    parameters are on one rank.

    Args:
        layer: builds a layer from (config, tp, the layer's number in the whole model).
    Attributes:
        most_kept: number of logits that the fused loss may keep for backward.
    """

    def __init__(
        self,
        config: ModelConfig,
        span: LayerSpan,
        tp: Axis,
        *,
        layer: LayerProvider = TransformerLayer,
    ) -> None:
        super().__init__()
        assert config.padded_vocab_size is not None
        self.config = config
        self.span = span
        self.tp = tp
        self.embedding = None
        if span.embedding or span.share is not None:
            self.embedding = Embedding(config, span, tp)
        self.decoder = None if span.depth else Decoder(config, span, tp, layer)
        self.mtp = Depth(config, span, tp, layer) if span.depth else None
        self.output_layer: ColumnParallelLinear | VocabularyRows | None = None
        tied_to = WORD_EMBEDDINGS if config.tied else None
        if span.share is not None:
            std = config.linear_std
            if config.tied:
                # A share of the head repeats the same share of the embedding, on the same rank.
                std = config.embedding_std
                tied_to = f"{WORD_EMBEDDINGS}[{span.share}/{span.shares}]"
            self.output_layer = VocabularyRows(
                (config.padded_vocab_size, config.hidden),
                (span.share, span.shares),
                tp,
                std,
                tied_to,
            )
        elif span.loss and span.shares == 1:
            self.output_layer = head_of(config, tp, tied_to)
        ends = [] if self.mtp is None else self.mtp.ends
        for end in (self.embedding and self.embedding.word_embeddings, self.output_layer, *ends):
            if end is None:
                continue
            # Megatron-LM's mark; the optimizer may have a learning rate of its own for these.
            setattr(end.weight, "is_embedding_or_output_parameter", True)  # noqa: B010
        self.most_kept: int | None = None
        self._input: Tensor | None = None

    def take_hidden_states(self) -> Tensor:
        """Return the hidden states [s, b, h] that the last forward gave to its head.

        Multi-token prediction, without which there are none, continues from them. May be called
        once after each forward.
        """
        hidden = _hidden.get()
        assert hidden is not None, "a forward comes first"
        _hidden.set(None)
        return hidden

    def set_input_tensor(self, x: Tensor | None) -> None:
        """Set the input of the next forward: the output [s, b, h] of the stage before, or None.

        The method has Megatron-LM's name. Stages without an embedding need an input. If the
        vocabulary is split over the ranks, the first stage is given the looked-up embeddings.
        """
        self._input = x

    @contextmanager
    def between_layers(self, cut: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Make forward call a function before each layer, or each group of recomputed layers.

        Args:
            cut: takes the hidden states, and returns the ones to continue with.
        """
        token = _between.set(cut)
        try:
            yield
        finally:
            _between.reset(token)

    def forward(
        self,
        tokens: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Run one microbatch through this stage.

        Args:
            tokens: [b, s], the tokens on this rank. Only the stage with the embedding and
                multi-token prediction need them.
            position_ids: [b, s]; None for the tokens' places in their sequences. Multi-token
                prediction needs them.
            labels: [b, s]; used on a stage with a head. None returns logits.
        Returns: one of
            - hidden states [s, b, h], on a stage without a head of its own;
            - losses of the tokens [b, s], with a head and labels;
            - logits [b, s, v/t], with a head and no labels.
        """
        if self.embedding is not None and self.span.embedding:
            assert tokens is not None, "the stage with the embedding needs tokens"
            if position_ids is None:
                cut = current_microbatch().cut
                row = positions(cut.whole(tokens.shape[1]), cut, None, tokens.device)
                position_ids = row.expand_as(tokens)
            x = self.embedding(tokens, position_ids, self._input)
            self._input = None
        else:
            assert self._input is not None, "a stage without embedding needs set_input_tensor first"
            # Released at once: the graph holds the tensors that backward needs, and a reference
            # here would keep one input more alive.
            x = self._input
            self._input = None
        head = self.output_layer
        if self.mtp is not None:
            assert tokens is not None, "a depth needs the tokens ahead"
            assert position_ids is not None, "a depth needs the positions ahead"
            x = self.mtp(x, tokens, position_ids)
            head = self.mtp.head
        else:
            assert self.decoder is not None
            x = self.decoder(x)
        if head is None or isinstance(head, VocabularyRows):
            # Ranks that share the vocabulary compute the loss in passes of their own.
            return x  # type: ignore[no-any-return]
        # A depth continues from the states after the final norm, the ones that the head reads.
        if self.config.depths:
            _hidden.set(x)
        x = scaled(x, self.config.mup_output_mult)
        if labels is not None and self.config.cross_entropy_loss_fusion:
            losses = vocab_parallel_linear_cross_entropy(
                x,
                head.weight,
                labels.t(),
                self.tp,
                sequence_parallel=self.config.sequence_parallel,
                most_kept=self.most_kept,
                cap=self.config.final_logit_softcapping,
            )
            # Inside the model the sequence comes first. Callers get what they gave: [b, s].
            return losses.t()
        logits = capped(head(x), self.config.final_logit_softcapping)
        if labels is None:
            return logits.transpose(0, 1)
        return vocab_parallel_cross_entropy(logits, labels.t(), self.tp).t()
