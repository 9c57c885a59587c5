"""What stages have of a vocabulary that all ranks of the pipeline share: its rows, sums at both ends, and messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import tee
from typing import Any

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.attributes import attribute_of
from megapipe.pipeline_parallel.families.family import OfStage, Setting, Sizes
from megapipe.pipeline_parallel.families.vocabulary.shares import FLAG, VocabularyShare
from megapipe.pipeline_parallel.loss import LossFunc
from megapipe.pipeline_parallel.microbatches import Shape
from megapipe.pipeline_parallel.passes.begin import Ends, sum_of
from megapipe.schedule import Kind, Pass, Placement
from megapipe.schedule.kinds import Where
from megapipe.tensor_parallel.collectives import opening
from megapipe.tensor_parallel.vocabulary import combine, packed_loss, size_of_loss, size_of_share


class Shared(OfStage):
    """A stage of a pipeline whose ranks share the vocabulary.

    Args:
        share: its rows of embedding and head, if it has some.
        read: the batches of its own forwards, where the share reads them too.
        evaluates: no gradients, and the loss of the model alone.
    """

    def __init__(
        self,
        place: Placement,
        number: int,
        share: VocabularyShare | None,
        read: Iterator[Any] | None,
        *,
        evaluates: bool,
    ) -> None:
        self.share, self._read = share, read
        self._depth, self._depths = place.depth(number), place.depths
        self._losses = _losses(place, evaluates=evaluates)
        self._embeds, self._combines = (number in place.meant(number, where) for where in (Where.EMBEDS, Where.LOSSES))
        self._ends: dict[int, tuple[Tensor, LossFunc | None, Axis]] = {}
        self._combined: dict[int, Tensor] = {}

    def data(self, given: Iterator[Any] | None) -> Iterator[Any] | None:
        return given if self.share is None else self._read

    def ends(self, given: Ends) -> Ends:
        return given._replace(joins=self._joined) if self._embeds else given

    def _joined(self, given: list[Tensor]) -> Tensor:
        """Return the sum of what all shares looked up, from the stage's own first token on; a depth takes it after its
        hidden states, as [s + s, b, h]."""
        depth = self._depth
        looked_up = sum_of(given[depth > 0 :])
        assert looked_up is not None, "every rank has a share"
        own = looked_up[depth : len(looked_up) - self._depths + depth]
        return torch.cat((given[0], own)) if depth else own

    def takes_loss(self, microbatch: int, output: Tensor, loss_func: LossFunc | None, cp: Axis, *, again: bool) -> bool:
        # The loss waits for the shares of the vocabulary, which other ranks compute from this output.
        if self._combines and not again:
            self._ends[microbatch] = output.detach(), loss_func, cp
        return self._combines

    def combine(self, stage: Any, microbatch: int, shares: list[Tensor]) -> Tensor | None:
        """Sums over all shares of the vocabulary of a microbatch -> input of their weight gradients; the stage then has
        the gradient of its output."""
        x, loss_func, cp = self._ends.pop(microbatch)
        tp = attribute_of(stage.module, "tp")
        of_loss = combine(shares, x.shape[-1], tp, (self._depth, self._losses))
        losses = of_loss.losses.view(-1, x.shape[1]).requires_grad_(torch.is_grad_enabled())
        value, grad = stage.loss(microbatch, losses.t(), loss_func, cp)
        assert not callable(grad), "shares of the vocabulary are of whole microbatches"
        if not torch.is_grad_enabled():
            return None
        # loss_func is the user's and may weigh tokens: what it does to each loss is asked of autograd.
        (scale,) = torch.autograd.grad(value, losses, grad)
        scale = scale.flatten().masked_fill(of_loss.ignored, 0.0)
        grad_x = (of_loss.to_input * scale[:, None]).to(x.dtype).view(-1, *x.shape[1:])
        shares_sequence = grad_x.shape != x.shape
        self._combined[microbatch] = opening(tp, shares_sequence).backward(grad_x).wait()
        return packed_loss(of_loss.log_sum, scale, x.dtype)

    def gradient(self, microbatch: int, own: Tensor | None) -> Tensor | None:
        return self._combined.pop(microbatch, own)

    def forget(self) -> None:
        raise AssertionError("a share of the vocabulary does not read its microbatches again")


def stages_of(setting: Setting) -> dict[int, Shared]:
    """Return what each stage has of a shared vocabulary; none where it is not shared."""
    table, chunks, step, _ = setting
    place, stages = table.placement, dict[int, Shared]()
    for number, (module, data) in chunks.items() if place.vocabulary else ():
        share, own = None, data
        if number in place.shares(number):
            if data is None:
                raise ConfigError(
                    f"{FLAG}: every pipeline rank has a share of the vocabulary and reads tokens, so stage "
                    f"{number} needs a data_iterator, as the first and the last have one."
                )
            end = place.is_first(number) or place.is_last(number)
            # An iterator gives each microbatch once, and at the ends two read it.
            read, own = tee(data) if end else (data, None)
            share = VocabularyShare(module, step.forward_step_func, read, place.depths)
        stages[number] = Shared(place, number, share, own, evaluates=step.forward_only)
    return stages


def _losses(place: Placement, *, evaluates: bool) -> int:
    """Losses of a microbatch; an evaluation has that of the model alone."""
    return 1 if evaluates else 1 + place.depths


def shape_of(sizes: Sizes) -> Callable[[Pass], Shape | None] | None:
    """Return the shapes of messages to and from shares of the vocabulary; None where there are none.

    Raises: ConfigError for what shares of the vocabulary do not do.
    """
    place, (length, batch, hidden) = sizes.place, sizes.whole
    if not place.vocabulary:
        return None
    if sizes.variable:
        raise ConfigError(f"{FLAG} needs microbatches of one length. Leave it or variable_seq_lengths out.")
    if sizes.context > 1:
        raise ConfigError(f"{FLAG} takes whole sequences. Leave it or --context-parallel-size out.")
    losses = _losses(place, evaluates=sizes.evaluates)
    by_kind: dict[Kind, Shape] = {
        Kind.S: (size_of_share(losses * length * batch, hidden, sizes.dtype),),
        Kind.C: (size_of_loss(length * batch, sizes.dtype),),
        Kind.E: (length + place.depths, batch, hidden),
    }

    def shape(made_by: Pass) -> Shape | None:
        if made_by.kind.is_backward and made_by.stage in place.meant(made_by.stage, Where.EMBEDS):
            return sizes.here * (place.depth(made_by.stage) > 0) + length, batch, hidden
        return by_kind.get(made_by.kind)

    return shape
