"""A stage's part of the vocabulary that all ranks of the pipeline share: passes E, S, T and EW, and the ends of C."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import tee
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.loss import LossFunc, output_of
from megapipe.schedule import Kind, Pass, Placement
from megapipe.tensor_parallel.collectives import opening
from megapipe.tensor_parallel.vocabulary import (
    Kept,
    VocabularyRows,
    add_head_gradient,
    add_rows_gradient,
    look_up,
    share_of_loss,
    size_of_loss,
    size_of_share,
)

Data = Iterator[Any] | None
FLAG = "--vocab-parallel-pipeline"


class VocabularyShare(nn.Module):
    """Reads every microbatch as the model would: forward_step calls it in the model's place and it looks tokens up.

    Args:
        module: the stage with the rows, `embedding.word_embeddings` and `output_layer`.
        forward_step: Megatron's (data_iterator, model).
    """

    def __init__(
        self,
        module: nn.Module,
        forward_step: Callable[[Iterator[Any] | None, nn.Module], tuple[Tensor, LossFunc]],
        data: Iterator[Any] | None,
    ) -> None:
        super().__init__()
        words, head = _rows(module, "embedding.word_embeddings"), _rows(module, "output_layer")
        self.config = getattr(module, "config", None)
        self._opens = opening(head.tp, getattr(self.config, "sequence_parallel", False))
        self._use = words, head  # in a tuple: they are the module's
        self._forward_step, self._data = forward_step, data
        self._read: tuple[Tensor, Tensor] | None = None
        self._tokens: dict[int, Tensor] = {}
        self._labels: dict[int, Tensor] = {}
        self._kept: dict[int, Kept] = {}

    def forward(
        self, tokens: Tensor, *_: Any, labels: Tensor | None = None, position_ids: Tensor | None = None, **__: Any
    ) -> Tensor:
        """tokens and labels [b, s] -> this rank's part of the embedded tokens [s, b, h]."""
        if labels is None:
            raise ConfigError(f"{FLAG} needs a forward_step that calls model(tokens, ..., labels=labels).")
        words, head = self._use
        # Counted from this rank's first row: what is below 0 or behind the last is another rank's.
        self._read = tokens.t() - words.first, labels.t().reshape(-1) - head.first
        return look_up(self._read[0], words.weight)

    def look_up(self, microbatch: int) -> Tensor:
        """E."""
        with torch.no_grad():
            output, _ = output_of(self._forward_step(self._data, self))
        assert self._read is not None, "forward_step calls its model"
        tokens, self._labels[microbatch] = self._read
        if torch.is_grad_enabled():
            self._tokens[microbatch] = tokens
        self._read = None
        return output

    def give(self, microbatch: int, x: Tensor) -> Tensor:
        """S, of the last hidden states [s, b, h], or [s/t, b, h]."""
        differentiated, labels = torch.is_grad_enabled(), self._labels.pop(microbatch)
        with torch.no_grad():
            rows = self._opens.forward(x).wait().reshape(-1, x.shape[-1])
            share, kept = share_of_loss(rows, self._use[1].weight, labels, differentiated=differentiated)
        if differentiated:
            self._kept[microbatch] = kept
        return share

    @torch.no_grad()
    def head_gradient(self, microbatch: int, loss: Tensor) -> None:
        """T."""
        weight, kept = self._use[1].weight, self._kept.pop(microbatch)
        if weight.requires_grad:
            add_head_gradient(kept, weight, _main_grad(weight), loss)

    @torch.no_grad()
    def rows_gradient(self, microbatch: int, grad: Tensor) -> None:
        """EW, of the gradient of the embedded tokens [s, b, h]."""
        weight, tokens = self._use[0].weight, self._tokens.pop(microbatch)
        if weight.requires_grad:
            add_rows_gradient(tokens, grad, _main_grad(weight))


def data_of_shares(place: Placement, own: Mapping[int, Data]) -> tuple[dict[int, Data], dict[int, Data]]:
    """Batches of the shares of the vocabulary, and of the stages: at the ends of the model the same ones once more."""
    shared, stages = dict[int, Data](), dict(own)
    for number, data in own.items() if place.vocabulary else ():
        if number in place.shares(number):
            if data is None:
                raise ConfigError(
                    f"{FLAG}: every pipeline rank has a share of the vocabulary and reads tokens, so stage "
                    f"{number} needs a data_iterator, as the first and the last have one."
                )
            end = place.is_first(number) or place.is_last(number)
            # An iterator gives each microbatch once, and at the ends two read it.
            shared[number], stages[number] = tee(data) if end else (data, None)
    return shared, stages


def shape_of(
    place: Placement, whole: tuple[int, int, int], dtype: torch.dtype, made_by: Pass
) -> tuple[int, ...] | None:
    """The shape of a message to or from a share of the vocabulary, None for any other.

    whole: hidden states [s, b, h] of whole sequences.
    """
    if made_by.kind is Kind.S:
        return (size_of_share(whole[0] * whole[1], whole[2], dtype),)
    if made_by.kind is Kind.C:
        return (size_of_loss(whole[0] * whole[1], dtype),)
    looked_up = made_by.kind is Kind.E or (made_by.kind.is_backward and place.is_first(made_by.stage))
    return whole if looked_up else None


def check_shares(variable_seq_lengths: bool, context: int) -> None:
    """Raises: ConfigError for what shares of the vocabulary do not do."""
    if variable_seq_lengths:
        raise ConfigError(f"{FLAG} needs microbatches of one length. Leave it or variable_seq_lengths out.")
    if context > 1:
        raise ConfigError(f"{FLAG} takes whole sequences. Leave it or --context-parallel-size out.")


def _rows(module: nn.Module, name: str) -> VocabularyRows:
    while not hasattr(module, "embedding") and isinstance(inner := getattr(module, "module", None), nn.Module):
        module = inner
    try:
        found = module.get_submodule(name)
    except AttributeError:
        found = None
    if not isinstance(found, VocabularyRows):
        raise ConfigError(
            f"{FLAG} shares the vocabulary of megapipe's GPT, and {type(module).__name__} has no rows of it in {name}. "
            f"Leave out {FLAG} or --model-provider."
        )
    return found


def _main_grad(weight: nn.Parameter) -> Tensor:
    """The tensor into which gradients are summed; the parameter's own without buffers of an optimizer."""
    main: Tensor | None = getattr(weight, "main_grad", None)
    if main is None:
        main = weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    return main
