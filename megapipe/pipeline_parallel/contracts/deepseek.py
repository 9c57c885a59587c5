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

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import KW_ONLY, dataclass
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.execute import execute
from megapipe.pipeline_parallel.messages.messenger import Messenger
from megapipe.pipeline_parallel.messages.transport import Shape
from megapipe.schedule import Schedule, build, lower, verify
from megapipe.tensor_parallel.weight_grad import WeightGrads

Criterion = Callable[..., Tensor]
OfMicrobatches = Mapping[int, Sequence[Tensor]] | Sequence[Sequence[Tensor]]
PAIR = "overlapped_forward_backward"


class _Saved(NamedTuple):
    """A microbatch between its forward and its backward."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    loss: Tensor | None


class DeferredWeightGrads:
    """DeepSeek's WeightGradStore as its modules use it, in a backward: `if enabled: put(job) else: job()`.

    Kept by thread and not by context: on a GPU a thread of autograd's own asks, and the rank is then the only one here.
    """

    def __init__(self) -> None:
        self._of_thread: dict[int, WeightGrads] = {}

    @property
    def enabled(self) -> bool:
        """Does a W pass come for the backward that runs?"""
        owner = self._owner()
        return owner is not None and owner.is_deferring

    def put(self, job: Callable[[], None]) -> None:
        """Leave a weight gradient to the W pass."""
        if (owner := self._owner()) is None:
            job()
        else:
            owner.submit(job)

    def _owner(self) -> WeightGrads | None:
        owner = self._of_thread.get(get_ident())
        return next(iter(self._of_thread.values())) if owner is None and len(self._of_thread) == 1 else owner

    @contextmanager
    def backward(self, owner: WeightGrads, microbatch: int, *, weights: bool) -> Iterator[None]:
        """The backward of a microbatch, with its weight gradients or without."""
        self._of_thread[get_ident()] = owner
        try:
            if weights:
                yield
            else:
                with owner.deferring(microbatch):
                    yield
        finally:
            del self._of_thread[get_ident()]


WeightGradStore = DeferredWeightGrads()


@dataclass(eq=False)
class PairedStage:
    """A stage that runs a module of DeepSeek's contract.

    Args:
        module: as above; without the classmethod a pair is its forward, then the backward.
        inputs: of each microbatch; None where they arrive from the stage before.
        criterion, labels: criterion(*outputs, *labels[microbatch]) is its loss; None on stages without loss.
        shapes: of the tensors that one stage sends to the next; several travel as one message.
        is_last: nothing is sent on.
        overlaps: pairs are the classmethod's, if there is one.
        keeps_outputs: of the last stage.
    Attributes:
        losses: of each microbatch, without graph. Gradients are of their sum.
        outputs: of each microbatch, without graph, if they are kept.
    """

    module: nn.Module
    inputs: OfMicrobatches | None = None
    criterion: Criterion | None = None
    labels: OfMicrobatches | None = None
    _: KW_ONLY
    shapes: Sequence[Shape]
    is_last: bool
    overlaps: bool = True
    keeps_outputs: bool = False

    def __post_init__(self) -> None:
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Sequence[Tensor]] = {}
        self.weight_grads = WeightGrads()
        self._context = copy_context()
        self._context.run(self.weight_grads.capture)
        self._saved: dict[int, _Saved] = {}

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        """Input (None at the first stage) -> output (None at the loss)."""
        return self._context.copy().run(self._forward, microbatch, x)  # two may run together

    def backward(self, microbatch: int, grad: Tensor | None, *, weights: bool) -> Tensor | None:
        """Gradient of the output (None at the loss) -> of the input (None at the first stage)."""
        saved = self._saved.pop(microbatch)
        with WeightGradStore.backward(self.weight_grads, microbatch, weights=weights):
            if saved.loss is not None:
                saved.loss.backward()  # type: ignore[no-untyped-call]
            else:
                run_backward(saved.outputs, self._unpacked(grad))
        return self._grad_of(saved)

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
        """The results of `forward` and of `backward_stage.backward`."""
        if not (self.overlaps and hasattr(type(self.module), PAIR)):
            output = self.forward(microbatch, x)
            return output, backward_stage.backward(backward_microbatch, grad, weights=weights)
        saved = backward_stage._saved.pop(backward_microbatch)
        outputs, grads = ((), []) if saved.loss is not None else (saved.outputs, self._unpacked(grad))
        with WeightGradStore.backward(backward_stage.weight_grads, backward_microbatch, weights=weights):
            other = (backward_stage.module, saved.loss, list(outputs), grads)
            output = self._context.copy().run(self._forward, microbatch, x, other)
        return output, backward_stage._grad_of(saved)

    def weight(self, microbatch: int) -> None:
        """The weight gradients that a backward without weights left out."""
        with torch.no_grad():
            self.weight_grads.run(microbatch)

    def alike(self, microbatch: int, other: int) -> bool:
        """Do backwards of these microbatches do the same, in the same order?"""
        return True

    def forget(self) -> None:
        """The forwards so far."""
        self._saved.clear()

    def _forward(self, microbatch: int, x: Tensor | None, other: tuple[Any, ...] | None = None) -> Tensor | None:
        """The forward of a microbatch, together with a backward: `other` is module1, loss1, outputs1, grads1."""
        if x is None:
            assert self.inputs is not None, "a stage has inputs, or a stage before it"
            inputs = list(self.inputs[microbatch])
        else:
            inputs = [part.detach().requires_grad_(torch.is_grad_enabled()) for part in self._unpacked(x)]
        labels = [] if self.labels is None else list(self.labels[microbatch])
        if other is not None:
            outputs, loss = getattr(type(self.module), PAIR)(self.module, inputs, self.criterion, labels, *other)
        else:
            outputs, loss = self.module(*inputs), None
            outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
            if self.criterion is not None:
                loss = self.criterion(*outputs, *labels)
        if torch.is_grad_enabled():
            self._saved[microbatch] = _Saved(inputs, outputs, loss)
        if not self.is_last:
            return self._packed(outputs)
        if loss is not None:
            self.losses[microbatch] = loss.detach()
        if self.keeps_outputs:
            self.outputs[microbatch] = [output.detach() for output in outputs]
        return None

    def _packed(self, outputs: Sequence[Tensor]) -> Tensor:
        """The tensor that is sent on: one as it is, of several their elements."""
        given = [list(output.shape) for output in outputs]
        if len(given) != len(self.shapes) or (len(given) > 1 and given != list(map(list, self.shapes))):
            raise ConfigError(
                f"{type(self.module).__name__} gives tensors of {given} for the next stage, and stages send "
                f"{list(map(list, self.shapes))}"
            )
        return (
            outputs[0].detach() if len(outputs) == 1 else torch.cat([output.detach().flatten() for output in outputs])
        )

    def _unpacked(self, message: Tensor | None) -> list[Tensor]:
        if message is None:
            return []
        if len(self.shapes) == 1:
            return [message]
        parts = torch.split(message, [math.prod(shape) for shape in self.shapes])
        return [part.view(*shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def _grad_of(self, saved: _Saved) -> Tensor | None:
        """The gradient of the input, of a stage that has one before it."""
        if self.inputs is not None:
            return None
        return self._packed([torch.zeros_like(x) if x.grad is None else x.grad for x in saved.inputs])


def run_backward(outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """DeepSeek's: the backward of those outputs that have a gradient."""
    pairs = [(x, grad) for x, grad in zip(outputs, grads, strict=True) if grad is not None and x.requires_grad]
    torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])


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
            shapes=[shape],
            is_last=place.is_last(number),
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
