"""The graph of a microbatch in pieces, so that its backward can run between the layers of another one's forward.

DualPipe's pair (DeepSeek-V3 report, sec. 3.2.1) hides the communication of one microbatch behind the computation of the
other. A model takes part by one method, `overlapped_forward_backward`, see GPTModel's; without it a pair is F, then B.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Cuts:
    """Places where the graph of one microbatch is cut: it ends in one tensor and goes on from a detached one.

    Args:
        meanwhile: another microbatch's backward; one piece of it runs at each cut.
    """

    def __init__(self, meanwhile: Iterable[None] = ()) -> None:
        self._meanwhile = iter(meanwhile)
        self._cuts: list[tuple[GradientEdge, Tensor]] = []

    def __call__(self, x: Tensor) -> Tensor:
        """Cut at x, of any shape."""
        next(self._meanwhile, None)
        if not x.requires_grad:
            return x
        y = x.detach().requires_grad_()
        self._cuts.append((get_gradient_edge(x), y))
        return y

    def backward(self, output: GradientEdge, grad: Tensor | None) -> Iterator[None]:
        """Differentiate the output, one piece at a time, the last one first."""
        torch.autograd.backward(output, grad)
        while self._cuts:
            yield
            end, start = self._cuts.pop()
            torch.autograd.backward(end, start.grad)
