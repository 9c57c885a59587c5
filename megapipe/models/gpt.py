"""The GPT: one stage of it, or all. GPT-2 and Llama styles are settings of the same files.

Parameter names are global: a layer is called by its number in the whole model wherever it lives.
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
from megapipe.distributed.layout import Layout, layout_of, set_layout
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
from megapipe.tensor_parallel.rng import current_stream, dropout
from megapipe.tensor_parallel.vocabulary import VocabularyRows

WORD_EMBEDDINGS, POSITION_EMBEDDINGS = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
HEAD = "output_layer.weight"
_between: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar("between", default=None)
_hidden: ContextVar[Tensor | None] = ContextVar("hidden", default=None)
"""The function that is called between layers, and the hidden states that the head was given: of the pass that runs and
not of a module, as two passes of one may run together."""


class Embedding(nn.Module):
    """Word embedding plus learned positions, if the model has them; of a span that only has a share of the vocabulary,
    its rows. A depth of multi-token prediction repeats the weights of the model's; the rows that shares look up for it
    are theirs."""

    def __init__(self, config: ModelConfig, span: LayerSpan, tp: Axis) -> None:
        super().__init__()
        assert config.padded_vocab_size is not None
        self.hidden_dropout = config.hidden_dropout
        self.shares_sequence = tp if config.sequence_parallel else None
        self.site = f"embedding of depth {span.depth}" if span.depth else "embedding"
        full = config.padded_vocab_size, config.hidden
        self.word_embeddings: VocabParallelEmbedding | VocabularyRows | None = None
        if span.share is not None:
            self.word_embeddings = VocabularyRows(full, (span.share, span.shares), tp, config.embedding_std)
        elif span.shares == 1:
            self.word_embeddings = VocabParallelEmbedding(
                *full,
                tp=tp,
                sequence_parallel=config.sequence_parallel,
                init_std=config.embedding_std,
                tied_to=WORD_EMBEDDINGS if span.depth else None,
            )
        self._closes = closing(tp, config.sequence_parallel)
        self.position_embeddings = None
        if config.position_embedding_type == "learned_absolute" and (span.embedding or span.depth):
            assert config.max_position_embeddings is not None
            shape = (config.max_position_embeddings, config.hidden)
            self.position_embeddings = nn.Embedding(*shape, _weight=torch.empty(shape))
            tied_to = POSITION_EMBEDDINGS if span.depth else None
            layout = Layout(shape, tied_to=tied_to, std=config.embedding_std, sum_over_tp=config.sequence_parallel)
            self.position_embeddings.weight = set_layout(nn.Parameter(torch.empty(shape)), layout)

    def forward(self, tokens: Tensor, position_ids: Tensor, looked_up: Tensor | None = None) -> Tensor:
        """tokens and position_ids [b, s/c] -> [s/c, b, h]; under sequence parallelism [s/(c t), b, h].

        looked_up: [s, b, h], what the shares of the vocabulary have of the tokens; to be summed over tp.
        """
        tp = self.shares_sequence
        if looked_up is None:
            assert self.word_embeddings is not None, "without rows they come looked up"
            x = self.word_embeddings(tokens.t())
        else:
            x = across(looked_up, self._closes)
        if self.position_embeddings is not None:
            ids = position_ids.t()
            x = x + self.position_embeddings(ids if tp is None else ids.chunk(tp.size)[tp.rank])
        return dropout(x, self.hidden_dropout, self.site, tp=tp, dim=0) if self.training else x


class Decoder(nn.Module):
    """The layers of a span, and the final norm where the loss is."""

    def __init__(self, config: ModelConfig, span: LayerSpan, tp: Axis, layer: LayerProvider) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(n): layer(config, tp, n) for n in span.layers})
        norm = parts_of(config).norm
        self.final_layernorm = norm(config, config.hidden, sum_over_tp=config.sequence_parallel) if span.loss else None
        layers = iter(self.layers.values())
        # A plain list: nothing is registered twice.
        self._runs = [(nn.Sequential(*islice(layers, size)), again) for size, again in units(config, span.count)]

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]; under sequence parallelism [s/t, b, h]."""
        between = _between.get()
        for run, again in self._runs:
            if between is not None:
                x = between(x)
            x = recompute(run, x) if again else run(x)
        return x if self.final_layernorm is None else self.final_layernorm(x)


def head_of(config: ModelConfig, tp: Axis, tied_to: str | None) -> ColumnParallelLinear:
    """An output head. tied_to: the parameter whose weight it repeats."""
    assert config.padded_vocab_size is not None
    return ColumnParallelLinear(
        config.hidden,
        config.padded_vocab_size,
        tp=tp,
        bias=False,
        sequence_parallel=config.sequence_parallel,
        init_std=config.embedding_std if config.tied else config.linear_std,
        tied_to=tied_to,
    )


class Depth(nn.Module):
    """A depth of multi-token prediction, whose embedding and head repeat the model's weights; it has neither where all
    ranks share the vocabulary."""

    def __init__(self, config: ModelConfig, span: LayerSpan, tp: Axis, layer: LayerProvider) -> None:
        super().__init__()
        self.number = str(span.depth - 1)
        self.layers = nn.ModuleDict({self.number: MultiTokenLayer(config, tp, span.first, layer)})
        self.embeddings = nn.ModuleDict({self.number: Embedding(config, span, tp)})
        tied_to = WORD_EMBEDDINGS if config.tied else HEAD
        self.heads = nn.ModuleDict({self.number: head_of(config, tp, tied_to)} if span.shares == 1 else {})
        for param in (*self.embeddings.parameters(), *self.heads.parameters()):
            set_layout(param, replace(layout_of(param), lent=True))

    @property
    def head(self) -> ColumnParallelLinear | None:
        head = self.heads[self.number] if self.heads else None
        assert head is None or isinstance(head, ColumnParallelLinear)
        return head

    @property
    def ends(self) -> list[nn.Module]:
        """The modules with rows of the vocabulary."""
        embedding = self.embeddings[self.number]
        assert isinstance(embedding, Embedding)
        return [end for end in (embedding.word_embeddings, self.head) if end is not None]

    def forward(self, x: Tensor, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """[s, b, h] of the depth before, and tokens and positions [b, s] so far ahead -> [s, b, h]. Of shares of the
        vocabulary what they looked up stands behind x."""
        looked_up = None
        if not self.heads:
            x, looked_up = x[: -tokens.shape[1]], x[-tokens.shape[1] :]
        return self.layers[self.number](x, self.embeddings[self.number](tokens, position_ids, looked_up))  # type: ignore[no-any-return]


class GPTModel(nn.Module):
    """The part of a GPT that `span` names: any run of layers, with or without embedding, with or without the loss; or a
    depth of multi-token prediction, whose tokens and labels are those so many tokens ahead (data.loader.Batch.ahead).

    A tied output head is a parameter of its own with its own gradient (Layout.tied_to says whose weight it repeats), so
    that the sum of both uses is the same number whether they share a rank or not.

    Args:
        layer: builds a layer from the configuration, the tensor-parallel axis and its number in the whole model.
    Attributes:
        most_kept: logits that the fused loss may keep for backward, see plan.logits.
    """

    def __init__(
        self, config: ModelConfig, span: LayerSpan, tp: Axis, *, layer: LayerProvider = TransformerLayer
    ) -> None:
        super().__init__()
        assert config.padded_vocab_size is not None
        self.config, self.span, self.tp = config, span, tp
        self.embedding = Embedding(config, span, tp) if span.embedding or span.share is not None else None
        self.decoder = None if span.depth else Decoder(config, span, tp, layer)
        self.mtp = Depth(config, span, tp, layer) if span.depth else None
        self.output_layer: ColumnParallelLinear | VocabularyRows | None = None
        if span.share is not None:
            part, full = (span.share, span.shares), (config.padded_vocab_size, config.hidden)
            std = config.embedding_std if config.tied else config.linear_std
            tied_to = f"{WORD_EMBEDDINGS}[{span.share}/{span.shares}]" if config.tied else None
            self.output_layer = VocabularyRows(full, part, tp, std, tied_to)
        elif span.loss and span.shares == 1:
            self.output_layer = head_of(config, tp, WORD_EMBEDDINGS if config.tied else None)
        ends = [self.embedding and self.embedding.word_embeddings, self.output_layer]
        for end in (*filter(None, ends), *([] if self.mtp is None else self.mtp.ends)):
            # Megatron-LM's mark; the optimizer may have a rate for them
            setattr(end.weight, "is_embedding_or_output_parameter", True)  # noqa: B010
        self.most_kept: int | None = None
        self._input: Tensor | None = None

    def take_hidden_states(self) -> Tensor:
        """The hidden states [s, b, h] that the last forward has given to its head, for the next depth."""
        hidden = _hidden.get()
        assert hidden is not None, "a forward comes first"
        _hidden.set(None)
        return hidden

    def set_input_tensor(self, x: Tensor | None) -> None:
        """Give a stage without embedding the output [s, b, h] of the one before it (Megatron's name)."""
        self._input = x

    @contextmanager
    def between_layers(self, cut: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Forward calls `cut` before each layer; it takes the hidden states and gives those to go on with."""
        token = _between.set(cut)
        try:
            yield
        finally:
            _between.reset(token)

    def forward(
        self, tokens: Tensor | None = None, position_ids: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        """One microbatch through this span.

        Args:
            tokens, position_ids: [b, s], the tokens that are here; used with the embedding, position_ids default to
                those of undivided documents.
            labels: [b, s]; with the loss.
        Returns: hidden states [s, b, h]; with the loss, token losses [b, s] if there are labels, else logits
            [b, s, v/t]. Where the pipeline shares the vocabulary always hidden states, the last ones at the end.
        """
        if self.embedding is not None and self.span.embedding:
            assert tokens is not None, "the stage with the embedding needs tokens"
            if position_ids is None:
                cut = current_stream().cut
                position_ids = positions(cut.whole(tokens.shape[1]), cut, None, tokens.device).expand_as(tokens)
            x = self.embedding(tokens, position_ids, self._input)
            self._input = None
        else:
            assert self._input is not None, "a stage without embedding needs set_input_tensor first"
            # Let go at once: the stage's graph holds what it needs, and an input kept here would be one more.
            x, self._input = self._input, None
        head = self.output_layer
        if self.mtp is not None:
            assert tokens is not None and position_ids is not None, "a depth needs the tokens that far ahead"  # noqa: PT018
            x, head = self.mtp(x, tokens, position_ids), self.mtp.head
        else:
            assert self.decoder is not None
            x = self.decoder(x)
        if head is None or isinstance(head, VocabularyRows):
            return x  # type: ignore[no-any-return]
        if self.config.depths:
            _hidden.set(x)
        if labels is not None and self.config.cross_entropy_loss_fusion:
            return vocab_parallel_linear_cross_entropy(
                x,
                head.weight,
                labels.t(),
                self.tp,
                sequence_parallel=self.config.sequence_parallel,
                most_kept=self.most_kept,
            ).t()
        logits = head(x)
        if labels is None:
            return logits.transpose(0, 1)  # type: ignore[no-any-return]
        return vocab_parallel_cross_entropy(logits, labels.t(), self.tp).t()
