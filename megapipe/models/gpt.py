"""The GPT: one stage of it, or all. GPT-2 and Llama styles are settings of the same files.

Parameter names are global: a layer is called by its number in the whole model wherever it lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice

import torch
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout, set_layout
from megapipe.distributed.tokens import positions
from megapipe.models.layer import TransformerLayer
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

LayerProvider = Callable[[ModelConfig, Axis, int], nn.Module]
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
_between: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar("between", default=None)
"""Of the pass that runs, not of a module: two passes of one may run together."""


class Embedding(nn.Module):
    """Word embedding plus learned positions, if the model has them; of a span that only has a share of the vocabulary,
    its rows."""

    def __init__(self, config: ModelConfig, span: LayerSpan, tp: Axis) -> None:
        super().__init__()
        assert config.padded_vocab_size is not None
        self.hidden_dropout = config.hidden_dropout
        self.shares_sequence = tp if config.sequence_parallel else None
        full = config.padded_vocab_size, config.hidden
        self.word_embeddings: VocabParallelEmbedding | VocabularyRows
        if span.share is None:
            self.word_embeddings = VocabParallelEmbedding(
                *full, tp=tp, sequence_parallel=config.sequence_parallel, init_std=config.embedding_std
            )
        else:
            self.word_embeddings = VocabularyRows(full, (span.share, span.shares), tp, config.embedding_std)
        self._closes = closing(tp, config.sequence_parallel)
        self.position_embeddings = None
        if config.position_embedding_type == "learned_absolute" and span.embedding:
            assert config.max_position_embeddings is not None
            shape = (config.max_position_embeddings, config.hidden)
            self.position_embeddings = nn.Embedding(*shape, _weight=torch.empty(shape))
            layout = Layout(shape, std=config.embedding_std, sum_over_tp=config.sequence_parallel)
            self.position_embeddings.weight = set_layout(nn.Parameter(torch.empty(shape)), layout)

    def forward(self, tokens: Tensor, position_ids: Tensor, looked_up: Tensor | None = None) -> Tensor:
        """tokens and position_ids [b, s/c] -> [s/c, b, h]; under sequence parallelism [s/(c t), b, h].

        looked_up: [s, b, h], what the shares of the vocabulary have of the tokens; to be summed over tp.
        """
        tp = self.shares_sequence
        x = self.word_embeddings(tokens.t()) if looked_up is None else across(looked_up, self._closes)
        if self.position_embeddings is not None:
            ids = position_ids.t()
            x = x + self.position_embeddings(ids if tp is None else ids.chunk(tp.size)[tp.rank])
        return dropout(x, self.hidden_dropout, "embedding", tp=tp, dim=0) if self.training else x


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


class GPTModel(nn.Module):
    """The part of a GPT that `span` names: any run of layers, with or without embedding, with or without the loss.

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
        self.decoder = Decoder(config, span, tp, layer)
        self.output_layer: ColumnParallelLinear | VocabularyRows | None = None
        if span.share is not None:
            part, full = (span.share, span.shares), (config.padded_vocab_size, config.hidden)
            std = config.embedding_std if config.tied else config.linear_std
            tied_to = f"{WORD_EMBEDDINGS}[{span.share}/{span.shares}]" if config.tied else None
            self.output_layer = VocabularyRows(full, part, tp, std, tied_to)
        elif span.loss and span.shares == 1:
            self.output_layer = ColumnParallelLinear(
                config.hidden,
                config.padded_vocab_size,
                tp=tp,
                bias=False,
                sequence_parallel=config.sequence_parallel,
                init_std=config.embedding_std if config.tied else config.linear_std,
                tied_to=WORD_EMBEDDINGS if config.tied else None,
            )
        embeds = [self.embedding.word_embeddings] if self.embedding is not None else []
        for end in (*embeds, *([self.output_layer] if self.output_layer is not None else [])):
            # Megatron-LM's mark; the optimizer may have a rate for them
            setattr(end.weight, "is_embedding_or_output_parameter", True)  # noqa: B010
        self.most_kept: int | None = None
        self._input: Tensor | None = None

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
        x = self.decoder(x)
        if self.output_layer is None or isinstance(self.output_layer, VocabularyRows):
            return x  # type: ignore[no-any-return]
        if labels is not None and self.config.cross_entropy_loss_fusion:
            return vocab_parallel_linear_cross_entropy(
                x,
                self.output_layer.weight,
                labels.t(),
                self.tp,
                sequence_parallel=self.config.sequence_parallel,
                most_kept=self.most_kept,
            ).t()
        logits = self.output_layer(x)
        if labels is None:
            return logits.transpose(0, 1)  # type: ignore[no-any-return]
        return vocab_parallel_cross_entropy(logits, labels.t(), self.tp).t()
