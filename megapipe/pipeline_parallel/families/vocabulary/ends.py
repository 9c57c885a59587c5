"""Connect a stage with the vocabulary that all ranks of the pipeline share.

Stages that embed take the sum of what all shares look up. Stages with a loss combine all shares'
parts of it. This file also has the shapes of the messages between them.
"""

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
from megapipe.pipeline_parallel.families.vocabulary.shares import (
    FLAG,
    VocabularyShare,
    logit_factor,
)
from megapipe.pipeline_parallel.loss import LossFunc
from megapipe.pipeline_parallel.microbatches import Shape
from megapipe.pipeline_parallel.passes.begin import Ends, sum_of
from megapipe.schedule import Kind, Pass, Placement
from megapipe.schedule.kinds import Where
from megapipe.tensor_parallel.collectives import opening
from megapipe.tensor_parallel.vocabulary import combine, packed_loss, size_of_loss, size_of_share


class Shared(OfStage):
    """A stage of a pipeline in which each rank has a share (equal part) of the vocabulary's rows.

    `combine` runs pass C: it computes the loss from the parts that the shares computed.

    Args:
        place: the rank of each stage.
        number: the number of this stage.
        share: the rank's rows of embedding and head; None if another stage of the rank has them.
        read: the data iterator for the stage's own forwards, which reads a copy of the share's
            data. None if only the share reads data. Without a share it is not used.
        evaluates: whether the step is an evaluation, with no gradients and only the model's own
            loss.
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
        self.share = share
        self._read = read
        self._depth = place.depth(number)
        self._depths = place.depths
        self._losses = _losses(place, evaluates=evaluates)
        self._embeds = number in place.meant(number, Where.EMBEDS)
        self._combines = number in place.meant(number, Where.LOSSES)
        # By microbatch: output, loss_func and context-parallel axis, which C needs.
        self._ends: dict[int, tuple[Tensor, LossFunc | None, Axis]] = {}
        # By microbatch: the gradient of the output, which C has found for B.
        self._combined: dict[int, Tensor] = {}

    def data(self, given: Iterator[Any] | None) -> Iterator[Any] | None:
        return given if self.share is None else self._read

    def ends(self, given: Ends) -> Ends:
        return given._replace(joins=self._joined) if self._embeds else given

    def _joined(self, given: list[Tensor]) -> Tensor:
        """Return the input of a stage that embeds tokens.

        The input is the sum of the embeddings from all ranks' shares, cut to the s tokens of this
        stage. Module d of multi-token prediction embeds the tokens from number d on. The module's
        input is the hidden states of the stage before, followed by the embeddings: [s + s, b, h].

        given: the embeddings from each share; for multi-token prediction the hidden states come
            first.
        """
        depth = self._depth
        shares = given
        # A depth is also given the hidden states of the stage before it, which come first.
        if depth:
            shares = given[1:]
        looked_up = sum_of(shares)
        assert looked_up is not None, "every rank has a share"
        # The shares looked up s + `depths` tokens. Depth d predicts from token d on.
        own = looked_up[depth : len(looked_up) - self._depths + depth]
        return torch.cat((given[0], own)) if depth else own

    def takes_loss(
        self, microbatch: int, output: Tensor, loss_func: LossFunc | None, cp: Axis, *, again: bool
    ) -> bool:
        # The loss waits for all shares, which other ranks compute from this output.
        # A forward that runs again finds the loss computed, or under way.
        if self._combines and not again:
            self._ends[microbatch] = (output.detach(), loss_func, cp)
        return self._combines

    def combine(self, stage: Any, microbatch: int, shares: list[Tensor]) -> Tensor | None:
        """Run C: compute the loss, and the gradient of the stage's output for its backward.

        Args:
            stage: the stage with the loss.
            microbatch: number of the microbatch.
            shares: the result of pass S from each share, in the order of the table.
        Returns: the message from which shares compute their weight gradients; None in an
            evaluation.
        """
        x, loss_func, cp = self._ends.pop(microbatch)
        tp = attribute_of(stage.module, "tp")
        of_loss = combine(shares, x.shape[-1], tp, (self._depth, self._losses))
        losses = of_loss.losses.view(-1, x.shape[1]).requires_grad_(torch.is_grad_enabled())
        value, grad = stage.loss(microbatch, losses.t(), loss_func, cp)
        assert not callable(grad), "shares of the vocabulary are of whole microbatches"
        if not torch.is_grad_enabled():
            return None
        # loss_func is the user's and may weigh tokens. Autograd says how each loss counts.
        (scale,) = torch.autograd.grad(value, losses, grad)
        scale = scale.flatten().masked_fill(of_loss.ignored, 0.0)
        factor = logit_factor(stage.module)
        to_x = of_loss.to_input * (scale * factor)[:, None]
        grad_x = to_x.to(x.dtype).view(-1, *x.shape[1:])
        # Under sequence parallelism the output has s/t tokens, and the loss all s.
        shares_sequence = grad_x.shape != x.shape
        # B of this stage takes it from there, as it would take the gradient of a usual loss.
        self._combined[microbatch] = opening(tp, shares_sequence).backward(grad_x).wait()
        return packed_loss(of_loss.log_sum, scale, x.dtype)

    def gradient(self, microbatch: int, own: Tensor | None) -> Tensor | None:
        return self._combined.pop(microbatch, own)

    def forget(self) -> None:
        raise AssertionError("a share of the vocabulary does not read its microbatches again")


def stages_of(setting: Setting) -> dict[int, Shared]:
    """Return {stage: its `Shared`} for all stages; {} if the vocabulary is not shared.

    Args:
        setting: the step of this rank.
    Raises: ConfigError if a stage with a share has no data, or no rows of our GPT's vocabulary.
    """
    table, chunks, step, _ = setting
    place = table.placement
    if not place.vocabulary:
        return {}
    stages: dict[int, Shared] = {}
    for number, (module, data) in chunks.items():
        share = None
        own = data
        if number in place.shares(number):
            if data is None:
                raise ConfigError(
                    f"{FLAG}: every pipeline rank has a share of the vocabulary and reads tokens, "
                    f"so stage {number} needs a data_iterator, as the first and the last have one."
                )
            read = data
            own = None
            # An iterator gives each microbatch once. At the ends of the model the stage itself
            # reads it too.
            if place.is_first(number) or place.is_last(number):
                read, own = tee(data)
            share = VocabularyShare(module, step.forward_step_func, read, place.depths)
        stages[number] = Shared(place, number, share, own, evaluates=step.forward_only)
    return stages


def _losses(place: Placement, *, evaluates: bool) -> int:
    """Return the number of losses: the model's, and in training one for each MTP module.

    `evaluates` says that the step is an evaluation.
    """
    return 1 if evaluates else 1 + place.depths


def shape_of(sizes: Sizes) -> Callable[[Pass], Shape | None] | None:
    """Return a function that returns the shape of a message, given the pass that makes it.

    Returns None if the vocabulary is not shared over the pipeline. The function itself returns None
    for hidden states of the usual shape. `sizes` has the numbers on which shapes depend.
    Raises: ConfigError if sequences differ in length, or under context parallelism.
    """
    place = sizes.place
    length, batch, hidden = sizes.whole
    if not place.vocabulary:
        return None
    if sizes.variable:
        raise ConfigError(
            f"{FLAG} needs microbatches of one length. Leave it or variable_seq_lengths out."
        )
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
            # The gradient of embedded tokens goes to all shares. A depth's follows the gradient of
            # its hidden states, and these are a rank's own tokens only.
            rows = length
            if place.depth(made_by.stage):
                rows += sizes.here
            return rows, batch, hidden
        return by_kind.get(made_by.kind)

    return shape
