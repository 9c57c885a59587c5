"""Run modules of DeepSeek's contract for DualPipe's pairs as stages, under every schedule.

The contract is a module whose class can run a forward and a backward as one
(github.com/deepseek-ai/DualPipe). The module is called with tensors, as nn.Modules are, and its
class has

    @classmethod
    def overlapped_forward_backward(
        cls, module0, inputs0, criterion0, labels0, module1, loss1, outputs1, grads1
    ):
        ...
        return outputs0, loss0

It runs module0(*inputs0) and, if there is a criterion0, loss0 = criterion0(*outputs0, *labels0). It
also runs the backward of loss1, or, where loss1 is None, of outputs1 with the gradients grads1. The
order in which it does so is its own affair.
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
    """The tensors of one microbatch between its forward and its backward.

    Attributes:
        inputs, outputs: the module's inputs and outputs.
        loss: the loss; None on a stage without loss.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    loss: Tensor | None


class DeferredWeightGrads:
    """DeepSeek's WeightGradStore, which lets a module's backward leave weight gradients to pass W.

    Modules call `if WeightGradStore.enabled: WeightGradStore.put(job) else: job()`, where `job`
    computes one weight gradient. `backward` makes the context in which a stage's backward runs, so
    that `enabled` and `put` refer to that stage.
    """

    def __init__(self) -> None:
        # By thread and not by context: on a GPU the backward runs in a thread of autograd's own. It
        # has no owner here, but then the process has one rank only.
        self._of_thread: dict[int, WeightGrads] = {}

    @property
    def enabled(self) -> bool:
        """Whether the backward that runs in this thread leaves its weight gradients to a W pass."""
        owner = self._owner()
        return owner is not None and owner.is_deferring

    def put(self, job: Callable[[], None]) -> None:
        """Keep `job`, which computes a weight gradient, for pass W; without a W, call it now."""
        owner = self._owner()
        if owner is None:
            job()
        else:
            owner.submit(job)

    def _owner(self) -> WeightGrads | None:
        owner = self._of_thread.get(get_ident())
        if owner is None and len(self._of_thread) == 1:
            (owner,) = self._of_thread.values()
        return owner

    @contextmanager
    def backward(self, owner: WeightGrads, microbatch: int, *, weights: bool) -> Iterator[None]:
        """Return a context for the backward of a microbatch.

        Args:
            owner: the stage's store, in which `put` keeps functions until the W pass.
            microbatch: number of the microbatch.
            weights: compute weight gradients at once; otherwise they are left to the W pass.
        """
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
    """A stage whose module is written for DeepSeek's DualPipe. The executor calls the methods.

    `forward`, `backward` and `weight` run F, B (or BW) and W of a microbatch.
    `overlapped_forward_backward` runs a pair: a forward and a backward at the same time.

    Args:
        module: a module for DeepSeek's DualPipe. The classmethod overlapped_forward_backward runs
            pairs of passes; without it, the two passes of a pair run one after the other.
        inputs: the module's arguments for each microbatch; None where they arrive from the previous
            stage.
        criterion, labels: criterion(*outputs, *labels[microbatch]) is the loss of a microbatch;
            None on stages without loss.
        shapes: shapes of the tensors that one stage sends to the next; several are sent as one
            message.
        is_last: whether the stage is the last one, which sends no outputs.
        overlaps: whether to use the module's overlapped_forward_backward, if it has one.
        keeps_outputs: whether to keep the outputs of the last stage.
    Attributes:
        losses: the loss of each microbatch, without graph. Gradients are of the sum of all losses.
        outputs: the outputs of each microbatch, without graph, if they are kept.
        weight_grads: the weight gradients that wait for W passes.
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
        """Run a forward and return its output, as one tensor for the next stage.

        Args:
            microbatch: number of the microbatch.
            x: the input; None at the first stage.
        Returns: the output; None at the last stage.
        """
        # A copy, because a context cannot be entered twice: two forwards may run together.
        return self._context.copy().run(self._forward, microbatch, x)

    def backward(self, microbatch: int, grad: Tensor | None, *, weights: bool) -> Tensor | None:
        """Run the backward of a microbatch.

        Args:
            microbatch: number of the microbatch.
            grad: gradient of the output; None at the last stage.
            weights: compute weight gradients too. Otherwise they are left to `weight`.
        Returns: the gradient of the input; None at the first stage.
        """
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
        """Run a forward of this stage together with a backward of another stage.

        The forward runs first if `overlaps` is False or this stage's module has no classmethod.

        Args:
            microbatch: number of the forward's microbatch.
            x: the forward's input; None at the first stage.
            backward_stage: the stage that runs the backward.
            backward_microbatch: number of the backward's microbatch.
            grad: gradient of the backward's output; None at the last stage.
            weights: compute weight gradients too. Otherwise they are left to `weight`.
        Returns: (output, gradient of the input), each None as in `forward` and `backward`.
        """
        if not (self.overlaps and hasattr(type(self.module), PAIR)):
            output = self.forward(microbatch, x)
            return output, backward_stage.backward(backward_microbatch, grad, weights=weights)
        saved = backward_stage._saved.pop(backward_microbatch)
        # The module differentiates either a loss, or outputs with gradients from the next stage.
        outputs: list[Tensor] = []
        grads: list[Tensor] = []
        if saved.loss is None:
            outputs += saved.outputs
            grads = self._unpacked(grad)
        owner = backward_stage.weight_grads
        with WeightGradStore.backward(owner, backward_microbatch, weights=weights):
            other = (backward_stage.module, saved.loss, outputs, grads)
            output = self._context.copy().run(self._forward, microbatch, x, other)
        return output, backward_stage._grad_of(saved)

    def weight(self, microbatch: int) -> None:
        """Compute the weight gradients that a backward with weights=False left out (pass W)."""
        # As in autograd's own backward: gradients must not grow a graph.
        with torch.no_grad():
            self.weight_grads.run(microbatch)

    def same_waits(self, microbatch: int, other: int) -> bool:
        """Return whether two backwards wait for the same collectives in the same order.

        Always True: these modules do not recompute, and microbatches are not cut.

        Args:
            microbatch, other: the microbatches of the two backwards.
        """
        return True

    def forget(self) -> None:
        """Drop the tensors that forwards have saved, because all forwards will run again."""
        self._saved.clear()

    def _forward(
        self, microbatch: int, x: Tensor | None, other: tuple[Any, ...] | None = None
    ) -> Tensor | None:
        """Run the forward of a microbatch, save its tensors for the backward; return the output.

        Args:
            microbatch: number of the microbatch.
            x: the input; None at the first stage.
            other: (module, loss, outputs, gradients of outputs) for a backward that runs together
                with the forward; None to run the forward alone.
        """
        train = torch.is_grad_enabled()
        if x is None:
            assert self.inputs is not None, "a stage has inputs, or a stage before it"
            inputs = list(self.inputs[microbatch])
        else:
            # Leaves of this stage's own graph: autograd stops here, and their gradients are sent
            # back.
            inputs = [part.detach().requires_grad_(train) for part in self._unpacked(x)]
        labels = [] if self.labels is None else list(self.labels[microbatch])
        # The classmethod does both passes in the one call, and returns what a forward returns.
        if other is not None:
            run = getattr(type(self.module), PAIR)
            outputs, loss = run(self.module, inputs, self.criterion, labels, *other)
        else:
            outputs = self.module(*inputs)
            outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
            loss = None
            if self.criterion is not None:
                loss = self.criterion(*outputs, *labels)
        # The outputs are kept whole until their backward: the module's class differentiates them
        # itself, so a gradient edge alone would not do.
        if train:
            self._saved[microbatch] = _Saved(inputs, outputs, loss)
        if not self.is_last:
            return self._packed(outputs)
        if loss is not None:
            self.losses[microbatch] = loss.detach()
        if self.keeps_outputs:
            self.outputs[microbatch] = [output.detach() for output in outputs]
        return None

    def _packed(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return the outputs without graph as one message: several are flattened and joined.

        Raises: ConfigError if they are not as many as `shapes`, or if several differ from it.
        """
        found = [list(output.shape) for output in outputs]
        expected = list(map(list, self.shapes))
        # The shape of a single tensor is the messenger's to check.
        if len(found) != len(expected) or (len(found) > 1 and found != expected):
            raise ConfigError(
                f"{type(self.module).__name__} gives tensors of {found} for the next stage, "
                f"and stages send {expected}"
            )
        if len(outputs) == 1:
            return outputs[0].detach()
        return torch.cat([output.detach().flatten() for output in outputs])

    def _unpacked(self, message: Tensor | None) -> list[Tensor]:
        """Split a message into tensors of the shapes in `shapes`; return [] for None."""
        if message is None:
            return []
        if len(self.shapes) == 1:
            return [message]
        parts = torch.split(message, [math.prod(shape) for shape in self.shapes])
        return [part.view(*shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def _grad_of(self, saved: _Saved) -> Tensor | None:
        """Return the gradient of a microbatch's inputs as one message; None on the first stage.

        Args:
            saved: the tensors of the microbatch.
        """
        if self.inputs is not None:
            return None
        # Zeros where the output does not depend on an input: the stage before expects a message.
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in saved.inputs]
        return self._packed(grads)


def run_backward(outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Run the backward of the outputs that have a gradient, as DeepSeek's function does.

    Args:
        outputs: outputs of a module. One that does not require a gradient is left out.
        grads: the gradient of each output, or None to leave the output out.
    """
    roots = []
    given = []
    for x, grad in zip(outputs, grads, strict=True):
        if grad is not None and x.requires_grad:
            roots.append(x)
            given.append(grad)
    torch.autograd.backward(roots, given)


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
    """Run forward and backward of all microbatches over modules of DeepSeek's contract.

    Gradients of the sum of losses are added to every parameter's `.grad`.

    Args:
        mesh: this rank's mesh.
        schedule: a table, or the name of a built-in schedule.
        modules: one per stage of this rank, in ascending stage order. A rank of DualPipe has two,
            one of each direction: each stage is on two ranks, whose `.grad` are summed here. Before
            the call `.grad` must be None or 0, as it would be summed too.
        inputs, labels: [microbatch] the tensors for the first stage, and for the criterion. All
            ranks give all of them.
        criterion: criterion(*outputs, *labels[microbatch]) is the loss of a microbatch.
        shape, dtype: shape and type of the tensor that one stage sends to the next.
    Returns: {microbatch: its loss} for microbatches whose last stage is on this rank.
    Raises: ScheduleError for a table that is not valid.
    """
    table = schedule
    if isinstance(table, str):
        table = build(table, mesh.pp.size, len(inputs))
    verify(table)
    place = table.placement
    # Every stage is given what the ends of the model need, and only the ends keep it.
    modules_of = dict(zip(place.stages_on(mesh.pp.rank), modules, strict=True))
    stages = {}
    for number, module in modules_of.items():
        last = place.is_last(number)
        stage = PairedStage(module, shapes=[shape], is_last=last)
        if place.is_first(number):
            stage.inputs = inputs
        if last:
            stage.criterion = criterion
            stage.labels = labels
        stages[number] = stage
    messenger = Messenger(mesh.pp, shape, dtype)
    execute(lower(table)[mesh.pp.rank], place, stages, messenger, position=mesh.position)
    if place.num_chains == 2:
        # Both ranks of a pair hold the same two slices of the model. By position, both sum them in
        # one order.
        for number in sorted(modules_of, key=place.position):
            for param in modules_of[number].parameters():
                if param.requires_grad:
                    if param.grad is None:
                        param.grad = torch.zeros_like(param)
                    mesh.twins.all_reduce(param.grad)
    losses: dict[int, Tensor] = {}
    for stage in stages.values():
        losses |= stage.losses
    return losses
