"""Capture the graphs of one microbatch in flight: F, B and, where the table has it, W.

A graph reads and writes buffers that never move. It holds the call of a stage's module and its
backward; data, loss and messages stay outside. A slot has its own pool of memory. Its graphs run in
the order in which they were captured, so each may reuse what an earlier one of the slot has freed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megapipe.distributed.axis import at_waits
from megapipe.distributed.device import Capture
from megapipe.tensor_parallel.rng import MicrobatchContext
from megapipe.tensor_parallel.weight_grad import WeightGrads


@dataclass(frozen=True)
class Form:
    """The shapes and types in a call. One graph serves two calls only if their forms are equal.

    `of` makes the form of a call.

    Attributes:
        x: shape, strides, type and device of the stage's input; None without input.
        leaves: the arguments without their nesting. A tensor is replaced by its shape, strides,
            type and device; anything else is kept.
        tree: how the arguments are nested.
    """

    x: object
    leaves: tuple[object, ...]
    tree: TreeSpec

    @staticmethod
    def of(x: Tensor | None, given: Any) -> tuple[Form, list[Any]]:
        """Return (the form of a call, its arguments as a flat list without their nesting).

        Args:
            x: the stage's input; None without input.
            given: (args, kwargs) of the call.
        """
        leaves, tree = tree_flatten(given)
        return Form(_form(x), tuple(map(_form, leaves)), tree), leaves


@dataclass(frozen=True)
class _Like:
    """The properties of a tensor without its values. `buffer` makes a tensor of zeros like it.

    Attributes:
        shape, stride, dtype, device: the properties.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def buffer(self) -> Tensor:
        empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        # An expanded tensor, such as position ids, has one element in several places, and torch
        # copies nothing to it.
        if 0 in self.stride:
            empty = empty.contiguous()
        return empty.zero_()


def _form(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return _Like(leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
    return leaf


def _buffer(form: object) -> Any:
    return form.buffer() if isinstance(form, _Like) else form


class Slot:
    """Buffers and CUDA graphs for one microbatch at a time. Making a slot captures the graphs.

    A microbatch uses a slot in this order: `take`, `forward`, `backward`, `end`.

    Args:
        capture: runs a function and returns (the function's result, a function that replays its
            kernels). The capture is in a memory pool of the slot's own.
        module: the stage.
        set_input: sets the module's input for the next call.
        form: the form of the calls that the graphs serve.
        splits: whether backwards are split into B and W; otherwise the graph of B also computes
            weight gradients.
        on_free: called with the slot when its microbatch has had its last pass.
    Raises: RuntimeError for a module that cannot be captured, or whose output is not one tensor
        that is trained. torch.OutOfMemoryError, a subclass, if the device has no room.
    """

    def __init__(
        self,
        capture: Capture,
        module: nn.Module,
        set_input: Callable[[Tensor | None], None],
        form: Form,
        *,
        splits: bool,
        on_free: Callable[[Slot], None],
    ) -> None:
        self._on_free = on_free
        # The layers find these two in their context, as in a pass without graphs.
        context = copy_context()
        weights = WeightGrads()
        context.run(weights.capture)
        context.run(MicrobatchContext(0, 0).activate)
        self.x: Tensor | None = _buffer(form.x)
        self.leaves = [_buffer(leaf) for leaf in form.leaves]
        if self.x is not None:
            self.x.requires_grad_()

        def forward() -> Sequence[Tensor]:
            args, kwargs = tree_unflatten(self.leaves, form.tree)
            set_input(self.x)
            output = module(*args, **kwargs)
            if not isinstance(output, Tensor) or not output.requires_grad:
                raise RuntimeError("its module gives no tensor that is trained")
            return (output,)

        def backward() -> Sequence[Tensor]:
            inputs = params if self.x is None else [self.x, *params]
            with weights.deferring(0) if splits else nullcontext():
                grads = torch.autograd.grad(output, inputs, self.grad, allow_unused=True)
            # The first, if the stage has an input.
            of_input = len(inputs) - len(params)
            for param, grad in zip(params, grads[of_input:], strict=True):
                # Our own layers add theirs to main_grad and give autograd none.
                if grad is not None:
                    param.main_grad.add_(grad)  # type: ignore[attr-defined]
            # Zeros where the output does not depend on the input.
            return [torch.zeros_like(self.x) if grad is None else grad for grad in grads[:of_input]]

        def weight() -> Sequence[Tensor]:
            weights.run(0)
            return ()

        params = [param for param in module.parameters() if param.requires_grad]
        # Autograd must stay in this thread, which captures. Nothing may run where a collective is
        # waited for: a watch would read the clock, and another pass would be captured too.
        with torch.autograd.set_multithreading_enabled(False), at_waits.do(None, None):
            (output,), self.forward = capture(lambda: context.run(forward))
            self.grad = torch.zeros(output.shape, dtype=output.dtype, device=output.device)
            grads, self.backward = capture(backward)
            self.weight: Callable[[], None] | None = None
            if splits:
                _, self.weight = capture(torch.no_grad()(weight))
        self.output = output.detach()
        self.grad_x = grads[0] if grads else None

    def take(self, x: Tensor | None, leaves: Sequence[Any]) -> None:
        """Copy a microbatch's input and arguments into the buffers that the graphs read.

        Args:
            x: the input; None without input.
            leaves: the arguments as a flat list without their nesting.
        """
        with torch.no_grad():
            for own, given in zip([self.x, *self.leaves], [x, *leaves], strict=True):
                if isinstance(own, Tensor):
                    own.copy_(given, non_blocking=True)

    def end(self) -> None:
        """Compute the weight gradients that B has left to W, if any, and free the slot."""
        if self.weight is not None:
            self.weight()
        self._on_free(self)


class _Replayed(torch.autograd.Function):
    """The autograd function whose forward and backward replay the CUDA graphs of a `Slot`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, slot: Slot, owner: WeightGrads, lasts: bool) -> Tensor:
        ctx.slot = slot
        ctx.owner = owner
        slot.forward()
        # loss_func may keep views of the output until the end of the step, when the slot has
        # served later microbatches.
        return slot.output.clone() if lasts else slot.output.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        slot: Slot = ctx.slot
        slot.grad.copy_(grad)
        slot.backward()
        # A copy, which may still be on its way to the previous rank when the slot's next B writes.
        made = None if slot.grad_x is None else slot.grad_x.clone()
        # Runs at once, or in the microbatch's W pass.
        ctx.owner.submit(slot.end)
        return made, None, None, None


replayed: Callable[[Tensor, Slot, WeightGrads, bool], Tensor] = _Replayed.apply
"""A function (input, slot, owner, lasts) -> output of the stage, by the slot's graphs.

The input may be any leaf with a gradient where the stage has none. `owner` has the stage's weight
gradients. With `lasts` the output is read until the end of the step, and so is a copy.
"""
