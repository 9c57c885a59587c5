"""Flat buffers under ZeRO-2 and ZeRO-3 (Rajbhandari et al. 2020): sharded gradients and weights.

    grads     full from the first backward of a run of passes until the reduction G.

    total     this rank's share of the step's gradients, to which each reduction adds.

    model     full from the gathering A until the last pass of a run that reads weights (ZeRO-3).

    shard     this rank's share of the weights, always there.

    tied      full gradients of weights that are used several times.

Only the memory of grads and model is released. A storage of 0 bytes keeps its identity, so that
parameters, their `main_grad` and the tensors saved in graphs are valid again once it is filled.
Tied weights need full gradients because their uses have different shares.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.distributed.axis import Axis, Pending
from megapipe.distributed.device import Gauge
from megapipe.optim.buffers import ALIGN, FlatBuffers
from megapipe.optim.sharded.passing import Passing


class ShardedBuffers(FlatBuffers):
    """FlatBuffers under ZeRO-2 or ZeRO-3: full gradients exist only while passes add to them.

    A stage's passes add to full gradients from `begin_grads` until `start_reduce`, which adds this
    rank's share of their sum over ranks to `total`. `sum_tied` and `take_tied` do the same for tied
    weights, once a step.

    Args:
        tied: names of weights that several parameters share.
        params, borrowed, live, given: parameters, names of parameters in another one's memory,
            counter of bytes, and further arguments of FlatBuffers.

    Attributes:
        total: this rank's share of the step's gradients so far, summed over ranks.
        tied: the gradients of tied weights, full and flat.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        borrowed: Collection[str] = (),
        *,
        tied: Collection[str],
        live: Gauge,
        **given: Any,
    ) -> None:
        super().__init__(params, borrowed, live=live, **given)
        self._tied = dict[str, int]()
        end = 0
        for name in params:
            if name in tied:
                self._tied[name] = end
                end += -(-params[name].numel() // ALIGN) * ALIGN
        # Sums over tp of tied gradients are made once a step, in `sum_tied`.
        self._partial_tied = [name for name in self._partial if name in tied]
        self._partial = [name for name in self._partial if name not in tied]
        self.tied = self.grads.new_zeros(end)
        # A device may have no room for both at once.
        self.grads.untyped_storage().resize_(0)
        self.grads = self.grads.new_empty(self.model.numel())
        # A tensor of its own: the memory of `grads` comes and goes.
        self.total = torch.zeros_like(self.grads[self.share])
        for name, param in params.items():
            setattr(param, "main_grad", self._main_grad(name))  # noqa: B010
        self._grads = Passing(self.grads, live)
        self._grads.release()
        self._pending: Pending | None = None
        # Whether `total` holds a sum of this step.
        self._summed = False

    def _main_grad(self, name: str) -> Tensor:
        """Return the tensor in which the full gradient of a parameter is accumulated."""
        if name not in self._tied:
            return self.view(self.grads, name)
        start = self._tied[name]
        _, shape = self._where[name]
        return self.tied[start : start + shape.numel()].view(shape)

    @property
    def reduced(self) -> Tensor:
        """This rank's share of the gradients, summed over data parallelism."""
        return self.total

    @property
    def parts(self) -> list[Tensor]:
        """[total, tied]: the tensors with all gradients once a step's sums over ranks are over."""
        return [self.total, self.tied]

    def zero_grad(self) -> None:
        """Set the gradients to zero at the start of a step, and release the full ones."""
        self.end_reduce()
        self._grads.release()
        self.total.zero_()
        self.tied.zero_()
        self._summed = False

    def begin_grads(self) -> None:
        """Allocate zeros for the full gradients, before the first backward that adds to them."""
        self.end_reduce()
        # Gradients that are not reduced yet are kept, and the run of passes adds to them.
        if not self._grads.there and self.grads.numel():
            self._grads.allocate()
            self.grads.zero_()

    def sum_over_tp(self, tp: Axis) -> None:
        """Sum gradients over tensor parallelism, of parameters whose layout says `sum_over_tp`.

        This has no effect if no gradients were written since the last reduction. Tied gradients are
        left to `sum_tied`.
        """
        if self._grads.there:
            super().sum_over_tp(tp)

    def start_reduce(self, dtype: torch.dtype | None = None) -> Callable[[], None]:
        """Start to add the gradients since the last reduction to `total`, and release `grads`.

        Args:
            dtype: type to which gradients are rounded for the transfer; None for their own.
        Returns: a function that waits for the sums.
        """
        if self._grads.there:
            full = self.grads if dtype is None else self.grads.to(dtype)
            into = None
            if dtype is None:
                # Later sums go to a slice of `grads`, which needs no further memory.
                into = self.grads[self.share] if self._summed else self.total
            self._pending = self.shares.start_reduce_scatter(full, into=into)
        return self.end_reduce

    def end_reduce(self) -> None:
        """Wait for the reduction that is under way, if there is one, and release `grads`."""
        if self._pending is None:
            return
        # Set to None before the wait, which may let another pass run that comes here too.
        pending = self._pending
        self._pending = None
        summed = pending.wait()
        if summed is not self.total:
            # The first sum is copied, so that a single one is bitwise equal to ZeRO-1's.
            if self._summed:
                self.total.add_(summed)
            else:
                self.total.copy_(summed)
        self._summed = True
        self._grads.release()

    def sum_tied(self, tp: Axis, dtype: torch.dtype | None) -> None:
        """Sum the gradients of tied weights once a step. Collective over data parallelism.

        Args:
            tp: tensor parallelism, over which some gradients are summed first.
            dtype: type to which gradients are rounded for the transfer; None for their own.
        """
        if tp.size > 1:
            for name in self._partial_tied:
                tp.all_reduce(self._main_grad(name))
        if self.tied.numel():
            rounded = self.tied if dtype is None else self.tied.to(dtype)
            summed = self.shares.all_reduce(rounded)
            if summed is not self.tied:
                self.tied.copy_(summed)

    def take_tied(self) -> None:
        """Copy this rank's share of the tied weights' gradients to `total`.

        The gradients of all parameters that share these weights must have been added before.
        """
        for name in self._tied.keys() & set(self.own):
            self.own_part(self.total, name).copy_(self.share_of(self._main_grad(name), name))
