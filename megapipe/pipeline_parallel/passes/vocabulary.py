"""A stage's part of the vocabulary that all ranks of the pipeline share: passes E, S, T and EW, and the ends of C."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import tee
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.distributed.tokens import ahead
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.loss import ForwardStep, output_of
from megapipe.pipeline_parallel.passes.begin import Ends, sum_of
from megapipe.schedule import Kind, Pass, Placement
from megapipe.schedule.kinds import Where
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


def shares_of(
    place: Placement, chunks: Mapping[int, tuple[nn.Module, Data]], forward_step: ForwardStep
) -> tuple[dict[int, VocabularyShare], dict[int, Data]]:
    """The shares of the vocabulary among a rank's stages, and the batches of these: at the ends of the model those that
    the share reads too."""
    shares, stages = dict[int, VocabularyShare](), {number: data for number, (_, data) in chunks.items()}
    for number, (module, data) in chunks.items():
        if number in place.shares(number):
            if data is None:
                raise ConfigError(
                    f"{FLAG}: every pipeline rank has a share of the vocabulary and reads tokens, so stage "
                    f"{number} needs a data_iterator, as the first and the last have one."
                )
            end = place.is_first(number) or place.is_last(number)
            # An iterator gives each microbatch once, and at the ends two read it.
            read, stages[number] = tee(data) if end else (data, None)
            shares[number] = VocabularyShare(module, forward_step, read, place.depths)
    return shares, stages


def ends_of(place: Placement, stage: int, config: Any, *, evaluates: bool) -> Ends:
    """What a stage has of the ends of the model.

    With a shared vocabulary a stage that embeds takes the sum of what all shares looked up, from its own first token
    on; a depth after its hidden states, as [s + s, b, h].
    """
    depth = place.depth(stage)
    ends = Ends(
        holds_loss=place.is_last(stage) or depth > 0,
        goes_on=place.next(stage) is not None,
        depth=depth,
        counts=config.depth_weight if depth else 1.0,
    )

    def joined(given: list[Tensor]) -> Tensor:
        looked_up = sum_of(given[depth > 0 :])
        assert looked_up is not None, "every rank has a share"
        own = looked_up[depth : len(looked_up) - place.depths + depth]
        return torch.cat((given[0], own)) if depth else own

    if place.vocabulary and stage in place.meant(stage, Where.LOSSES):
        ends = ends._replace(combines=(depth, _losses(place, evaluates=evaluates)))
    if place.vocabulary and stage in place.meant(stage, Where.EMBEDS):
        ends = ends._replace(joins=joined)
    return ends


def _losses(place: Placement, *, evaluates: bool) -> int:
    """Losses of a microbatch; an evaluation has that of the model alone."""
    return 1 if evaluates else 1 + place.depths


def shape_of(
    place: Placement, whole: tuple[int, int, int], here: int, dtype: torch.dtype, *, evaluates: bool
) -> Callable[[Pass], tuple[int, ...] | None]:
    """The shapes of messages to and from shares of the vocabulary, by the pass that makes them; None for any other.

    Args:
        whole: hidden states [s, b, h] of whole sequences.
        here: of their tokens, those that a rank has.
    """
    (length, batch, hidden), losses = whole, _losses(place, evaluates=evaluates)
    by_kind: dict[Kind, tuple[int, ...]] = {
        Kind.S: (size_of_share(losses * length * batch, hidden, dtype),),
        Kind.C: (size_of_loss(length * batch, dtype),),
        Kind.E: (length + place.depths, batch, hidden),
    }

    def shape(made_by: Pass) -> tuple[int, ...] | None:
        embeds = made_by.kind.is_backward and place.vocabulary
        if embeds and made_by.stage in place.meant(made_by.stage, Where.EMBEDS):
            return here * (place.depth(made_by.stage) > 0) + length, batch, hidden
        return by_kind.get(made_by.kind)

    return shape


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
