"""DeepSeek's contract for DualPipe's pairs, through one adapter: a module whose class can run a forward and a backward
as one (github.com/deepseek-ai/DualPipe) becomes a stage, and every schedule of the table runs it.

The module is called with tensors, as nn.Modules are, and its class has

    @classmethod
    def overlapped_forward_backward(cls, module0, inputs0, criterion0, labels0, module1, loss1, outputs1, grads1):
        ...
        return outputs0, loss0

which runs module0(*inputs0) and, if there is a criterion0, loss0 = criterion0(*outputs0, *labels0); and the backward
of loss1, or where that is None of outputs1 with the gradients grads1. In which order is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.execute import execute
from megapipe.pipeline_parallel.messenger import Messenger
from megapipe.pipeline_parallel.transport import Shape
from megapipe.schedule import Schedule, build, lower, verify
from megapipe.tensor_parallel.weight_grad import WeightGrads

Criterion = Callable[..., Tensor]
PAIR = "overlapped_forward_backward"


class _Saved(NamedTuple):
    """A microbatch between its forward and its backward."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    loss: Tensor | None


@dataclass(eq=False)
class PairedStage:
    """A stage that runs a module of DeepSeek's contract.

    Args:
        module: as above; without the classmethod a pair is its forward, then the backward.
        inputs: of each microbatch; None where they arrive from the stage before, one tensor each.
        criterion, labels: criterion(*outputs, *labels[microbatch]) is its loss; None on stages without loss.
    Attributes:
        losses: of each microbatch, without graph. Gradients are of their sum.
    """

    module: nn.Module
    inputs: Sequence[Sequence[Tensor]] | None = None
    criterion: Criterion | None = None
    labels: Sequence[Sequence[Tensor]] | None = None

    def __post_init__(self) -> None:
        self.losses: dict[int, Tensor] = {}
        self.weight_grads = WeightGrads()
        self._context = copy_context()
        self._context.run(self.weight_grads.capture)
        self._saved: dict[int, _Saved] = {}

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        """Input (None at the first stage) -> output (None at the loss)."""
        return self._context.run(self._forward, microbatch, x)

    def backward(self, microbatch: int, grad: Tensor | None, *, weights: bool) -> Tensor | None:
        """Gradient of the output (None at the loss) -> of the input (None at the first stage)."""
        saved = self._saved.pop(microbatch)
        with nullcontext() if weights else self.weight_grads.deferring(microbatch):
            _differentiate(saved, _grads(grad))
        return None if self.inputs is not None else saved.inputs[0].grad

    def overlapped_forward_backward(
        self,
        microbatch: int,
        x: Tensor | None,
        backward_stage: PairedStage,
        backward_microbatch: int,
        grad: Tensor | None,
        *,
        weights: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """What `forward` and `backward_stage.backward` return."""
        if not hasattr(type(self.module), PAIR):
            output = self.forward(microbatch, x)
            return output, backward_stage.backward(backward_microbatch, grad, weights=weights)
        saved = backward_stage._saved.pop(backward_microbatch)
        other = (backward_stage.module, saved.loss, None if saved.loss is not None else saved.outputs, _grads(grad))
        with nullcontext() if weights else backward_stage.weight_grads.deferring(backward_microbatch):
            output = self._context.run(self._forward, microbatch, x, other)
        return output, None if backward_stage.inputs is not None else saved.inputs[0].grad

    def weight(self, microbatch: int) -> None:
        """The weight gradients that a backward without weights left out."""
        with torch.no_grad():
            self.weight_grads.run(microbatch)

    def forget(self) -> None:
        """The forwards so far."""
        self._saved.clear()

    def _forward(self, microbatch: int, x: Tensor | None, other: tuple[Any, ...] | None = None) -> Tensor | None:
        """The forward of a microbatch, together with a backward: `other` is module1, loss1, outputs1, grads1."""
        if x is None:
            assert self.inputs is not None, "a stage has inputs, or a stage before it"
            inputs = list(self.inputs[microbatch])
        else:
            inputs = [x.detach().requires_grad_()]
        labels = [] if self.labels is None else list(self.labels[microbatch])
        if other is not None:
            pair = getattr(type(self.module), PAIR)
            outputs, loss = pair(self.module, inputs, self.criterion, labels, *other)
        else:
            outputs = self.module(*inputs)
            outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
            loss = None if self.criterion is None else self.criterion(*outputs, *labels)
        if self.criterion is None and len(outputs) != 1:
            raise ConfigError(f"{type(self.module).__name__} sends {len(outputs)} tensors to the next stage; send one")
        self._saved[microbatch] = _Saved(inputs, outputs, loss)
        if loss is None:
            output: Tensor = outputs[0]
            return output.detach()
        self.losses[microbatch] = loss.detach()
        return None


def paired_step(
    mesh: ProcessMesh,
    schedule: Schedule | str,
    modules: Sequence[nn.Module],
    *,
    inputs: Sequence[Sequence[Tensor]],
    labels: Sequence[Sequence[Tensor]],
    criterion: Criterion,
    shape: Shape,
    dtype: torch.dtype = torch.float32,
) -> dict[int, Tensor]:
    """Forward and backward of all microbatches; gradients of the sum of losses are added to every parameter's `.grad`.

    Args:
        modules: one per stage of this rank, in ascending stage order; a rank of DualPipe has two, of one chain each,
            and the gradients of the two copies of a slice are summed here.
        inputs, labels: of every microbatch; read by the first and by the last stage alone.
        shape, dtype: of what one stage sends to the next.
    Returns: the loss of each microbatch whose last stage is here.
    """
    table = build(schedule, mesh.pp.size, len(inputs)) if isinstance(schedule, str) else schedule
    verify(table)
    place = table.placement
    own = dict(zip(place.stages_on(mesh.pp.rank), modules, strict=True))
    stages = {
        number: PairedStage(
            module,
            inputs if place.is_first(number) else None,
            criterion if place.is_last(number) else None,
            labels if place.is_last(number) else None,
        )
        for number, module in own.items()
    }
    messenger = Messenger(mesh.pp, shape, dtype)
    execute(lower(table)[mesh.pp.rank], place, stages, messenger, position=mesh.position)
    if place.num_chains == 2:  # both ranks of a pair hold the same two slices of the model, in this order
        for number in sorted(own, key=place.position):
            for param in own[number].parameters():
                if param.requires_grad:
                    param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                    mesh.twins.all_reduce(param.grad)
    return {microbatch: loss for stage in stages.values() for microbatch, loss in stage.losses.items()}


def _grads(grad: Tensor | None) -> list[Tensor]:
    return [] if grad is None else [grad]


def _differentiate(saved: _Saved, grads: list[Tensor]) -> None:
    if saved.loss is not None:
        saved.loss.backward()  # type: ignore[no-untyped-call]
    else:
        torch.autograd.backward(saved.outputs, grads)
