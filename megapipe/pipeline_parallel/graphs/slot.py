"""The graphs of one microbatch in flight: F, B and, where the table has it apart, W, on buffers that never move.

What is captured is the call of a stage's module and its backward; data, loss and messages stay outside. A slot has a
pool of memory of its own: its graphs run in the order in which they were captured, so what one of them frees the next
may use, and no other slot's.
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
from megapipe.tensor_parallel.rng import Stream
from megapipe.tensor_parallel.weight_grad import WeightGrads


@dataclass(frozen=True)
class Form:
    """The form of a pass: what must be the same of two for one graph to serve both.

    Attributes:
        leaves: of the arguments, of a tensor its shape, strides, type and device; x: likewise of the input, or None.
    """

    x: object
    leaves: tuple[object, ...]
    tree: TreeSpec

    @staticmethod
    def of(x: Tensor | None, given: Any) -> tuple[Form, list[Any]]:
        """The form, and the leaves themselves."""
        leaves, tree = tree_flatten(given)
        return Form(_form(x), tuple(map(_form, leaves)), tree), leaves


@dataclass(frozen=True)
class _Like:
    """A tensor without its numbers."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def buffer(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()


def _form(leaf: Any) -> object:
    return _Like(leaf.shape, leaf.stride(), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf


def _buffer(form: object) -> Any:
    return form.buffer() if isinstance(form, _Like) else form


class Slot:
    """Buffers and graphs for one microbatch at a time, captured when it is made.

    Args:
        capture: in a pool of its own, see device.graph_pool.
        splits: the table has B and W; otherwise the products for weights are part of B.
        on_free: called with the slot when its microbatch has had its last pass.
    Raises: RuntimeError for what cannot be captured.
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
        self._on_free, context, weights = on_free, copy_context(), WeightGrads()
        self.x: Tensor | None = _buffer(form.x)
        self.leaves = [_buffer(leaf) for leaf in form.leaves]
        if self.x is not None:
            self.x.requires_grad_()
        context.run(weights.capture)
        context.run(Stream(0, 0).activate)

        def forward() -> Sequence[Tensor]:
            args, kwargs = tree_unflatten(self.leaves, form.tree)
            set_input(self.x)
            output = module(*args, **kwargs)
            if not isinstance(output, Tensor) or not output.requires_grad:
                raise RuntimeError("its module gives no tensor that is trained")
            return (output,)

        def backward() -> Sequence[Tensor]:
            with weights.deferring(0) if splits else nullcontext():
                inputs = params if self.x is None else [self.x, *params]
                grads = list(torch.autograd.grad(output, inputs, self.grad, allow_unused=True))
            own = [] if self.x is None else [grads.pop(0)]
            for param, grad in zip(params, grads, strict=True):
                if grad is not None:  # layers of ours have added theirs
                    param.main_grad.add_(grad)  # type: ignore[attr-defined]
            return [torch.zeros_like(self.x) if grad is None else grad for grad in own]

        def weight() -> Sequence[Tensor]:
            weights.run(0)
            return ()

        params = [param for param in module.parameters() if param.requires_grad]
        # In this thread, which captures; and no watch or other pass may look in where a collective is waited for.
        with torch.autograd.set_multithreading_enabled(False), at_waits.do(None, None):
            (output,), self.forward = capture(lambda: context.run(forward))
            self.grad = torch.zeros(output.shape, dtype=output.dtype, device=output.device)
            grads, self.backward = capture(backward)
            self.weight = capture(torch.no_grad()(weight))[1] if splits else None
        self.output, self.grad_x = output.detach(), grads[0] if grads else None

    def take(self, x: Tensor | None, leaves: Sequence[Any]) -> None:
        """Copy a microbatch's input and arguments to where the graphs read them."""
        with torch.no_grad():
            for own, given in zip([self.x, *self.leaves], [x, *leaves], strict=True):
                if isinstance(own, Tensor):
                    own.copy_(given, non_blocking=True)

    def end(self) -> None:
        """The microbatch's products for weights, if they were put off; then the slot is free."""
        if self.weight is not None:
            self.weight()
        self._on_free(self)


class _Replayed(torch.autograd.Function):
    """The call of a module by graphs. Its gradients have no graph of their own."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, slot: Slot, owner: WeightGrads, lasts: bool) -> Tensor:
        ctx.slot, ctx.owner = slot, owner
        slot.forward()
        # What loss_func makes may be views of it that are read at the end of the step, behind the slot's next F.
        return slot.output.clone() if lasts else slot.output.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        slot: Slot = ctx.slot
        slot.grad.copy_(grad)
        slot.backward()
        # A copy: it is on its way to the rank before when the slot's next B writes another.
        made = None if slot.grad_x is None else slot.grad_x.clone()
        ctx.owner.submit(slot.end)  # at once, or in the W pass
        return made, None, None, None


replayed: Callable[[Tensor, Slot, WeightGrads, bool], Tensor] = _Replayed.apply
"""(input, or any leaf that has a gradient; slot; the stage's weight gradients; is the output read after the last pass?)
-> output."""
