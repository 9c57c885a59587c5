"""The graph of a microbatch in pieces, so that its backward can run between the layers of another one's forward.

DualPipe's pair (DeepSeek-V3 report, sec. 3.2.1) hides the communication of one microbatch behind the computation of the
other. A model takes part by being `Layered`; without that a pair is F, then B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge


@runtime_checkable
class Layered(Protocol):
    """A module whose forward can be cut between its layers."""

    def between_layers(self, cut: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
        """While the context lasts, forward calls `cut` before each layer: it takes the hidden states and gives those to
        go on with."""


class Cuts:
    """Places where the graph of one microbatch is cut: it ends in one tensor and goes on from a detached one.

    Args:
        pieces: another microbatch's backward. One piece runs between two cuts: while the layer there waits for a
            tensor-parallel collective, or at the second cut where there is none.
    """

    def __init__(self, pieces: Iterable[None] = ()) -> None:
        self._pieces = iter(pieces)
        self._due = False
        self._cuts: list[tuple[GradientEdge, Tensor]] = []

    def __call__(self, x: Tensor) -> Tensor:
        """Cut at x, of any shape."""
        self.advance()
        self._due = True
        if not x.requires_grad:
            return x
        # A leaf: the piece above ends with y's gradient in hand, from which the piece below goes on later.
        y = x.detach().requires_grad_()
        self._cuts.append((get_gradient_edge(x), y))
        return y

    def advance(self) -> None:
        """Run a piece of the other's backward, once between two cuts."""
        if self._due:
            self._due = False
            next(self._pieces, None)

    def backward(self, output: GradientEdge, grad: Tensor) -> Iterator[None]:
        """Differentiate the output, one piece at a time, the last one first."""
        differentiate(output, grad)
        while self._cuts:
            yield
            end, start = self._cuts.pop()
            assert start.grad is not None
            differentiate(end, start.grad)


def differentiate(output: GradientEdge, grad: Tensor) -> None:
    """torch.autograd.backward(output, grad) without what that asks in Python, a fifth of a small pass's CPU time."""
    _engine_run_backward((output,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True)
