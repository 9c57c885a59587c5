"""Flat buffers whose gradients, and whose weights if asked for, are whole only while passes use them (Rajbhandari et
al. 2020, stages 2 and 3).

    grads     whole from the first backward of a run of passes until its reduction G, whose sums are added to `total`
    model     whole from the gathering A until the last pass of a run that reads weights; `shard` is always there

Only the memory of the two goes: a storage of 0 bytes keeps its identity, so parameters, their `main_grad` and what
graphs have saved of them are views that are right again when it is filled again.

Weights that are used several times have their gradients whole in `tied`, as their uses have other shares.
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
    """FlatBuffers under ZeRO-1 whose gradients come and go; other arguments as there.

    Args:
        tied: names of weights that are used several times.
    Attributes:
        total: this rank's share of the step's gradients, summed.
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
        for name in (name for name in params if name in tied):
            self._tied[name] = end
            end += -(-params[name].numel() // ALIGN) * ALIGN
        self._partial_tied = [name for name in self._partial if name in tied]
        self._partial = [name for name in self._partial if name not in tied]
        self.tied = self.grads.new_zeros(end)
        self.grads = torch.empty_like(self.grads[: self.model.numel()])
        self.total = torch.zeros_like(self.grads[self.share])
        for name, param in params.items():
            setattr(param, "main_grad", self._main_grad(name))  # noqa: B010
        self._grads = Passing(self.grads, live)
        self._grads.go()
        self._pending: Pending | None = None
        self._summed = False

    def _main_grad(self, name: str) -> Tensor:
        start, shape = self._tied.get(name), self._where[name][1]
        return self.view(self.grads, name) if start is None else self.tied[start : start + shape.numel()].view(shape)

    @property
    def reduced(self) -> Tensor:
        return self.total

    @property
    def parts(self) -> list[Tensor]:
        return [self.total, self.tied]

    def zero_grad(self) -> None:
        self.end_reduce()
        self._grads.go()
        self.total.zero_()
        self.tied.zero_()
        self._summed = False

    def begin_grads(self) -> None:
        """Before the first backward of a run."""
        self.end_reduce()
        if not self._grads.there and self.grads.numel():
            self._grads.come()
            self.grads.zero_()

    def sum_over_tp(self, tp: Axis) -> None:
        if self._grads.there:
            super().sum_over_tp(tp)

    def start_reduce(self, dtype: torch.dtype | None = None) -> Callable[[], None]:
        """Begin to reduce the gradients since the last reduction: the sums are added to `total`, and `grads` goes."""
        if self._grads.there:
            whole = self.grads if dtype is None else self.grads.to(dtype)
            into = None if dtype is not None else self.grads[self.share] if self._summed else self.total
            self._pending = self.shares.start_reduce_scatter(whole, into=into)
        return self.end_reduce

    def end_reduce(self) -> None:
        """Wait for the reduction that is under way, if one is."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        if (summed := pending.wait()) is not self.total:
            # Copied the first time: the bits of ZeRO-1, which sums once.
            self.total.add_(summed) if self._summed else self.total.copy_(summed)
        self._summed = True
        self._grads.go()

    def sum_tied(self, tp: Axis, dtype: torch.dtype | None) -> None:
        """Sum the gradients of weights that are used several times, once a step. Collective over data parallel."""
        for name in self._partial_tied if tp.size > 1 else ():
            tp.all_reduce(self._main_grad(name))
        if self.tied.numel():
            rounded = self.tied if dtype is None else self.tied.to(dtype)
            if (summed := self.shares.all_reduce(rounded)) is not self.tied:
                self.tied.copy_(summed)

    def take_tied(self) -> None:
        """Put this rank's shares of them among the others, once the gradients of all uses are added."""
        for name in self._tied.keys() & set(self.own):
            self.own_part(self.total, name).copy_(self.share_of(self._main_grad(name), name))
