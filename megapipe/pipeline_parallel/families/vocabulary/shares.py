"""A stage's part of the vocabulary that all ranks of the pipeline share: passes E, S, T and EW."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.distributed.tokens import ahead
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.loss import ForwardStep, output_of
from megapipe.tensor_parallel.collectives import opening
from megapipe.tensor_parallel.vocabulary import (
    Kept,
    VocabularyRows,
    add_head_gradient,
    add_rows_gradient,
    look_up,
    share_of_loss,
)

Data = Iterator[Any] | None
FLAG = "--vocab-parallel-pipeline"


class VocabularyShare(nn.Module):
    """Reads every microbatch as the model would: forward_step calls it in the model's place and it looks tokens up.

    Args:
        module: the stage with the rows, `embedding.word_embeddings` and `output_layer`.
        forward_step: Megatron's (data_iterator, model).
        depths: of multi-token prediction, which read the same microbatch so many tokens further. All heads are one
            pass, as no gradient comes back before that of the last depth.
    """

    def __init__(
        self,
        module: nn.Module,
        forward_step: ForwardStep,
        data: Data,
        depths: int = 0,
    ) -> None:
        super().__init__()
        words, head = _rows(module, "embedding.word_embeddings"), _rows(module, "output_layer")
        self.config = getattr(module, "config", None)
        self._opens = opening(head.tp, getattr(self.config, "sequence_parallel", False))
        self._use = words, head  # in a tuple: they are the module's
        self._forward_step, self._data, self._depths = forward_step, data, depths
        self._read: tuple[Tensor, Tensor] | None = None
        self._tokens: dict[int, Tensor] = {}
        self._labels: dict[int, Tensor] = {}
        self._kept: dict[int, Kept] = {}

    def forward(
        self, tokens: Tensor, *_: Any, labels: Tensor | None = None, position_ids: Tensor | None = None, **__: Any
    ) -> Tensor:
        """tokens and labels [b, s] -> this rank's part of the embedded tokens [s, b, h]; of d depths [s + d, b, h], as
        each embeds the tokens from its own number on."""
        if labels is None:
            raise ConfigError(f"{FLAG} needs a forward_step that calls model(tokens, ..., labels=labels).")
        words, head = self._use
        # Counted from this rank's first row: what is below 0 or behind the last is another rank's.
        of_losses = [ahead(labels, depth).t().reshape(-1) for depth in range(1 + self._depths)]
        self._read = F.pad(tokens, (0, self._depths)).t() - words.first, torch.cat(of_losses) - head.first
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

    def give(self, microbatch: int, *hidden: Tensor) -> Tensor:
        """S, of the last hidden states [s, b, h], or [s/t, b, h], and those of each depth."""
        differentiated, labels = torch.is_grad_enabled(), self._labels.pop(microbatch)
        with torch.no_grad():
            rows = torch.cat([self._opens.forward(x).wait().reshape(-1, x.shape[-1]) for x in hidden])
            share, kept = share_of_loss(rows, self._use[1].weight, labels[: len(rows)], differentiated=differentiated)
        if differentiated:
            self._kept[microbatch] = kept
        return share

    @torch.no_grad()
    def head_gradient(self, microbatch: int, *losses: Tensor) -> None:
        """T."""
        weight, kept = self._use[1].weight, self._kept.pop(microbatch)
        if weight.requires_grad:
            add_head_gradient(kept, weight, _main_grad(weight), *losses)

    @torch.no_grad()
    def rows_gradient(self, microbatch: int, *grads: Tensor) -> None:
        """EW, of the gradient of the embedded tokens [s, b, h], and of each depth's, behind that of its other input."""
        weight, tokens = self._use[0].weight, self._tokens.pop(microbatch)
        length = len(tokens) - self._depths
        for depth, grad in enumerate(grads if weight.requires_grad else ()):
            add_rows_gradient(tokens[depth : depth + length], grad[-length:], _main_grad(weight))


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
