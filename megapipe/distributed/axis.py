"""One axis of the mesh as a rank sees it, with its collectives.

A collective that is started returns a Pending. The code that reads the result waits for it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.distributed.shared_memory import SharedMemory, Started

# torch 2.13 renamed these two and warns about the old names; 2.11 has only the old ones.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_SHIFT_TAG = 1 << 20

CPU = torch.device("cpu")


class Watch(Protocol):
    """A stopwatch for the time that a pass waits for collectives. `Pending.wait` uses it.

    Attributes:
        mark: returns a mark of the present time, in any form that the watch can read later.
        waits: for each wait, (mark before it, mark after it).
    """

    mark: Callable[[], Any]
    waits: list[tuple[Any, Any]]


class AtWaits(threading.local):
    """The actions of a thread around each wait for a collective.

    `do` sets both attributes within a `with` block. `Pending.wait` reads them.

    Attributes:
        give_turn: called before the wait. The function lets another pass of the rank compute, and
            returns when this pass is to go on. None if no other pass runs.
        watch: measures the wait; None if nothing measures it.
    """

    give_turn: Callable[[], None] | None = None
    watch: Watch | None = None

    @contextmanager
    def do(self, give_turn: Callable[[], None] | None, watch: Watch | None) -> Iterator[None]:
        """Set `give_turn` and `watch`, or None, within a `with` block."""
        # Blocks may be nested, as when one pass runs within another one's turn.
        before = (self.give_turn, self.watch)
        self.give_turn = give_turn
        self.watch = watch
        try:
            yield
        finally:
            self.give_turn, self.watch = before


at_waits = AtWaits()


@dataclass(frozen=True)
class Pending:
    """The result of a collective that may still be under way.

    `wait` returns the result, and `then` applies a function to it.

    Attributes:
        tensor: the tensor to which the collective writes. Read it only after `wait`.
        work: one or several handles that wait for the collective; None if it is complete.
        finish: called after the wait. The function takes `tensor` and returns the result.
    """

    tensor: Tensor
    work: dist.Work | Started | Sequence[dist.Work] | None = None
    finish: Callable[[Tensor], Tensor] = lambda x: x

    def wait(self) -> Tensor:
        """Wait for the collective and return the result. Call it once."""
        if self.work is not None:
            # Another pass may compute while this one only waits.
            if at_waits.give_turn is not None:
                at_waits.give_turn()
            watch = at_waits.watch
            # The turn comes first: time in which another pass computes is not lost.
            begin = None if watch is None else watch.mark()
            works = self.work if isinstance(self.work, Sequence) else (self.work,)
            for work in works:
                work.wait()
            if watch is not None:
                watch.waits.append((begin, watch.mark()))
        return self.finish(self.tensor)

    def then(self, function: Callable[[Tensor], Tensor]) -> Pending:
        """Return a pending result that applies `function` to this one's result."""
        return Pending(self.tensor, self.work, lambda x: function(self.finish(x)))


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh, such as tensor parallelism, as one of its ranks sees it.

    The methods are collectives over the ranks of the axis. `start_` methods return at once. An axis
    of size 1 needs no group, and its collectives return their input itself. There `start_shift`,
    `start_all_to_all` and `all_to_all` must not be called.

    Attributes:
        rank: position of this rank on the axis, 0..size-1.
        size: number of ranks.
        ranks: global rank at each position.
        group: communicator; None if size is 1.
        device: device of the tensors.
        shared: faster transfer between CPU ranks of one host, if there is one.
        links: for a pipeline over NCCL, communicators for messages between neighbours in one
            direction.
        expert_axes: on the tensor-parallel axis, {"etp", "ep" and "experts": the axis of the
            experts with this name}; empty on other axes.
    """

    rank: int = 0
    size: int = 1
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None
    device: torch.device = CPU
    shared: SharedMemory | None = None
    links: tuple[dist.ProcessGroup, ...] = ()
    expert_axes: Mapping[str, Axis] = field(default_factory=dict, compare=False)

    def named(self, name: str) -> Axis:
        """Return the axis called "tp", "etp", "ep" or "experts". `self` must be the axis tp.

        "tp" is this axis itself. If `expert_axes` is empty, experts are split like all other
        parameters: "etp" and "experts" are this axis too, and "ep" is an axis of size 1.
        """
        if name == "tp":
            return self
        # Megatron-LM's default, too: experts take the tensor-parallel size of everything else.
        default = ALONE if name == "ep" else self
        return self.expert_axes.get(name, default)

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Combine x over the ranks in place, and return it.

        Args:
            op: "sum", "max" or "min".
        """
        return self.start_all_reduce(x, op).wait()

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather x [n, ...] of each rank into one tensor [size * n, ...], in rank order."""
        return self.start_all_gather(x).wait()

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum x [size * n, ...] over the ranks, and return this rank's slice [n, ...]."""
        return self.start_reduce_scatter(x).wait()

    def start_all_reduce(self, x: Tensor, op: str = "sum") -> Pending:
        """Start `all_reduce` and return at once. x must not be used before the result's `wait`.

        `op` is "sum", "max" or "min".
        """
        if self.size == 1:
            return Pending(x)
        exchange = self._exchange(x, lambda parts: _combine(parts, x, OF_TWO[op]))
        if exchange is not None:
            return Pending(x, exchange)
        op_of_torch = getattr(dist.ReduceOp, op.upper())
        return Pending(x, dist.all_reduce(x, op=op_of_torch, group=self.group, async_op=True))

    def start_all_gather(self, x: Tensor, into: Tensor | None = None) -> Pending:
        """Start `all_gather` and return at once. x must not change before the result's `wait`.

        Args:
            into: [size * n, ...], the tensor for the result; None for a new one. If x is this
                rank's slice of `into`, a GPU writes to `into` all the same, and a CPU to a new
                tensor. On an axis of size 1 the result is x, and `into` is not used.
        """
        if self.size == 1:
            return Pending(x)
        out = into
        if out is None or not _fits(x, out):
            out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        exchange = self._exchange(x, lambda parts: torch.cat(list(parts), out=out))
        if exchange is not None:
            return Pending(out, exchange)
        return Pending(out, _all_gather(out, x.contiguous(), group=self.group, async_op=True))

    def start_reduce_scatter(self, x: Tensor, into: Tensor | None = None) -> Pending:
        """Start `reduce_scatter` and return at once. x must not change before the result's `wait`.

        Args:
            into: [n, ...], the tensor for the result; None for a new one. If `into` is this rank's
                slice of x, a GPU writes to `into` all the same, and a CPU to a new tensor. On an
                axis of size 1 the result is x, and `into` is not used.
        """
        if self.size == 1:
            return Pending(x)
        rows = x.shape[0] // self.size
        own = slice(self.rank * rows, (self.rank + 1) * rows)
        out = into
        if out is None or not _fits(x, out):
            out = x.new_empty(rows, *x.shape[1:])
        exchange = self._exchange(
            x, lambda parts: _combine([part[own] for part in parts], out, torch.add)
        )
        if exchange is not None:
            return Pending(out, exchange)
        return Pending(out, _reduce_scatter(out, x.contiguous(), group=self.group, async_op=True))

    def start_shift(self, x: Tensor, channel: int = 0, into: Tensor | None = None) -> Pending:
        """Start to send x to the next rank of the ring, and to receive the previous rank's x.

        Args:
            channel: a tag. Shifts that are under way at the same time need different tags. All
                ranks must start these shifts in the same order.
            into: the tensor to receive into, with the shape and type of x; None for a new one.
        """
        out = torch.empty_like(x) if into is None else into
        previous = (self.rank - 1) % self.size
        following = (self.rank + 1) % self.size
        assert self.group is not None
        if self.device.type == "cuda":
            # NCCL runs separate calls in order. In a ring, each rank's receive would then wait for
            # a send that waits for the next rank's receive. In one batch both run together.
            calls = [
                dist.P2POp(dist.irecv, out, group=self.group, group_peer=previous),
                dist.P2POp(dist.isend, x, group=self.group, group_peer=following),
            ]
            return Pending(out, dist.batch_isend_irecv(calls))
        # Methods of the group itself: torch.distributed does not know groups of threads.
        tag = _SHIFT_TAG + channel
        arrives = self.group.recv([out], previous, tag)
        leaves = self.group.send([x], following, tag)
        return Pending(out, (arrives, leaves))

    def start_all_to_all(self, x: Tensor, rows: Sequence[Sequence[int]]) -> Pending:
        """Start to send rows of x to each rank, and to receive each rank's rows for this one.

        Args:
            x: the rows for rank 0, then for rank 1, and so on.
            rows: rows[i][j] is the number of rows from rank i to rank j; equal on all ranks.
        Returns: the received rows, pending, in the order of the sending ranks.
        """
        arriving = [row[self.rank] for row in rows]
        out = x.new_empty(sum(arriving), *x.shape[1:])
        starts = [sum(row[: self.rank]) for row in rows]

        def read(parts: Sequence[Tensor]) -> None:
            pieces = []
            for part, start, n in zip(parts, starts, arriving, strict=True):
                pieces.append(part[start : start + n])
            torch.cat(pieces, out=out)

        # Each rank's tensor is shown in full, so the segments need room for the longest one.
        exchange = self._exchange(x, read, max(map(sum, rows)))
        if exchange is not None:
            return Pending(out, exchange)
        leaving = [*rows[self.rank]]
        work = dist.all_to_all_single(
            out, x.contiguous(), arriving, leaving, group=self.group, async_op=True
        )
        return Pending(out, work)

    def all_to_all(self, x: Tensor) -> Tensor:
        """Send row n of x [size, ...] to rank n; return [size, ...] with row n from rank n."""
        # Equal pieces for all ranks, so that no rank needs to know other ranks' sizes.
        out = torch.empty_like(x)
        work = dist.all_to_all_single(out, x, group=self.group, async_op=True)
        return Pending(out, work).wait()

    def _exchange(
        self, x: Tensor, read: Callable[[Sequence[Tensor]], object], most: int | None = None
    ) -> Started | None:
        """Start an exchange through shared memory, if the ranks have shared memory.

        Args:
            read: called at the end of the exchange with every rank's x, in rank order.
            most: if ranks have different numbers of rows in x, the largest number.
        Returns: the started exchange; None without shared memory.
        """
        if self.shared is None:
            return None
        return self.shared.start(x, read, most)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrite x with the x of the rank at position `source` on the axis, and return it."""
        if self.size > 1:
            dist.broadcast(x, group=self.group, group_src=source)
        return x

    def barrier(self) -> None:
        """Make each rank's device wait until all ranks have called this method.

        Under NCCL only the GPU waits; this thread goes on.
        """
        self.all_reduce(torch.zeros(1, device=self.device))

    def gather_json(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. Values must be representable in JSON.

        From several ranks they come as JSON reads them: a tuple comes as a list.
        """
        if self.size == 1:
            return [value]
        # Not pickle: nothing that another process sends may run code here.
        data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=self.device)
        # Values differ in length, and all_gather needs equal ones.
        sizes = self.all_gather(torch.tensor([data.numel()], device=self.device)).tolist()
        padded = data.new_zeros(max(sizes))
        padded[: data.numel()] = data
        rows = self.all_gather(padded).view(self.size, -1).cpu()
        return [json.loads(bytes(row[:n].tolist())) for row, n in zip(rows, sizes, strict=True)]


ALONE = Axis()
"""An axis of size 1."""


OF_TWO: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def _fits(x: Tensor, into: Tensor) -> bool:
    """Return whether a collective on x can write its result to `into`.

    On a CPU it cannot if x and `into` overlap in memory: ranks would overwrite values that other
    ranks still read.
    """
    return into.is_cuda or x.untyped_storage()._cdata != into.untyped_storage()._cdata


def _combine(parts: Sequence[Tensor], out: Tensor, of_two: Callable[..., Tensor]) -> None:
    """Combine tensors in order into `out`, so that all ranks get bitwise equal results.

    Args:
        parts: each rank's tensor, in rank order.
        of_two: takes (a, b, out=) and combines two tensors, such as torch.add.
    """
    of_two(parts[0], parts[1], out=out)
    for part in parts[2:]:
        of_two(out, part, out=out)
