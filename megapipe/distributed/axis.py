"""One axis of the mesh as a rank sees it, with its collectives; what is pending is waited for by who reads it."""

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

# torch 2.13 renamed these two and warns about the old names; 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_SHIFT_TAG = 1 << 20

CPU = torch.device("cpu")


class Watch(Protocol):
    """A watch that takes the times at which a pass waits: of each (mark before, mark after)."""

    mark: Callable[[], Any]
    waits: list[tuple[Any, Any]]


class AtWaits(threading.local):
    """The thread's way to wait for a collective. give_turn: lets another pass go on first, see
    `pipeline_parallel.together`."""

    give_turn: Callable[[], None] | None = None
    watch: Watch | None = None

    @contextmanager
    def do(self, give_turn: Callable[[], None] | None, watch: Watch | None) -> Iterator[None]:
        before, self.give_turn, self.watch = (self.give_turn, self.watch), give_turn, watch
        try:
            yield
        finally:
            self.give_turn, self.watch = before


at_waits = AtWaits()


@dataclass(frozen=True)
class Pending:
    """The result of a collective that may still be under way: read it after `wait` only."""

    tensor: Tensor
    work: dist.Work | Started | Sequence[dist.Work] | None = None
    what: Callable[[Tensor], Tensor] = lambda x: x

    def wait(self) -> Tensor:
        """The result, once it is here. To be called once."""
        if self.work is not None:
            if at_waits.give_turn is not None:
                at_waits.give_turn()
            watch = at_waits.watch
            begin = None if watch is None else watch.mark()
            for work in self.work if isinstance(self.work, Sequence) else (self.work,):
                work.wait()
            if watch is not None:
                watch.waits.append((begin, watch.mark()))
        return self.what(self.tensor)

    def then(self, what: Callable[[Tensor], Tensor]) -> Pending:
        """A pending result with something done to it."""
        return Pending(self.tensor, self.work, lambda x: what(self.what(x)))


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as a rank sees it. Size 1 needs no group and its collectives are the identity.

    Attributes:
        rank: position on the axis, 0..size-1.
        ranks: global rank at each position.
        group: communicator; None where size is 1.
        device: where its tensors live.
        shared: a faster way between CPU ranks of one host, where there is one.
        links: of a pipeline over NCCL, communicators of the same ranks for messages of one way, see `groups.link`.
        beside: of tensor parallelism, the axes of experts by name.
    """

    rank: int = 0
    size: int = 1
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None
    device: torch.device = CPU
    shared: SharedMemory | None = None
    links: tuple[dist.ProcessGroup, ...] = ()
    beside: Mapping[str, Axis] = field(default_factory=dict, compare=False)

    def named(self, name: str) -> Axis:
        """The axis of this name beside tensor parallelism, or itself; where none is, experts are split as all else."""
        return self if name == "tp" else self.beside.get(name, ALONE if name == "ep" else self)

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Combine x over the axis in place and return it. op: sum, max or min."""
        return self.start_all_reduce(x, op).wait()

    def all_gather(self, x: Tensor) -> Tensor:
        """[n, ...] on each rank -> [size * n, ...], in rank order."""
        return self.start_all_gather(x).wait()

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[size * n, ...] on each rank -> the sum's own slice [n, ...]."""
        return self.start_reduce_scatter(x).wait()

    def start_all_reduce(self, x: Tensor, op: str = "sum") -> Pending:
        """`all_reduce` that runs while its caller goes on; so are the two below. x must not change before the end."""
        if self.size == 1:
            return Pending(x)
        exchange = self._exchange(x, lambda parts: _combine(parts, x, _OF_TWO[op]))
        op_of_torch = getattr(dist.ReduceOp, op.upper())
        return Pending(x, exchange or dist.all_reduce(x, op=op_of_torch, group=self.group, async_op=True))

    def start_all_gather(self, x: Tensor, into: Tensor | None = None) -> Pending:
        """into: as in `start_reduce_scatter`, of the result's shape; x may be this rank's slice of it."""
        if self.size == 1:
            return Pending(x)
        out = into if into is not None and _fits(x, into) else x.new_empty(self.size * x.shape[0], *x.shape[1:])
        exchange = self._exchange(x, lambda parts: torch.cat(list(parts), out=out))
        return Pending(out, exchange or _all_gather(out, x.contiguous(), group=self.group, async_op=True))

    def start_reduce_scatter(self, x: Tensor, into: Tensor | None = None) -> Pending:
        """into: where the result is to be left. If that is this rank's slice of x, a GPU does so alone: NCCL needs no
        room beside x then."""
        if self.size == 1:
            return Pending(x)
        rows = x.shape[0] // self.size
        mine = slice(self.rank * rows, (self.rank + 1) * rows)
        out = into if into is not None and _fits(x, into) else x.new_empty(rows, *x.shape[1:])
        exchange = self._exchange(x, lambda parts: _combine([part[mine] for part in parts], out, torch.add))
        return Pending(out, exchange or _reduce_scatter(out, x.contiguous(), group=self.group, async_op=True))

    def start_shift(self, x: Tensor, lane: int = 0, into: Tensor | None = None) -> Pending:
        """Around the ring: x goes to the rank after, the rank before's comes; its receive is posted first.

        lane: shifts that are under way side by side have different ones, and begin in one order on all ranks.
        into: where what comes is to be left.
        """
        out, before, after = (
            torch.empty_like(x) if into is None else into,
            (self.rank - 1) % self.size,
            (self.rank + 1) % self.size,
        )
        assert self.group is not None
        if self.device.type == "cuda":
            # Both in one group: NCCL runs what is posted apart in order, and in a ring each rank would wait for the
            # next.
            calls = [dist.P2POp(dist.irecv, out, group=self.group, group_peer=before)]
            calls.append(dist.P2POp(dist.isend, x, group=self.group, group_peer=after))
            return Pending(out, dist.batch_isend_irecv(calls))
        # Of the group itself, which may be one that torch.distributed does not know (threads).
        arrives = self.group.recv([out], before, _SHIFT_TAG + lane)
        return Pending(out, (arrives, self.group.send([x], after, _SHIFT_TAG + lane)))

    def start_all_to_all(self, x: Tensor, rows: Sequence[Sequence[int]]) -> Pending:
        """Rows of x to each rank, one behind the other, rows[this rank] says how many -> those that each rank has for
        this one. rows: [size][size], the same on all ranks."""
        arriving = [row[self.rank] for row in rows]
        out = x.new_empty(sum(arriving), *x.shape[1:])
        starts = [sum(row[: self.rank]) for row in rows]

        def read(parts: Sequence[Tensor]) -> None:
            pieces = [part[start : start + n] for part, start, n in zip(parts, starts, arriving, strict=True)]
            torch.cat(pieces, out=out)

        exchange = self._exchange(x, read, max(map(sum, rows)))
        if exchange is None:
            leaving = [*rows[self.rank]]
            exchange = dist.all_to_all_single(out, x.contiguous(), arriving, leaving, group=self.group, async_op=True)
        return Pending(out, exchange)

    def all_to_all(self, x: Tensor) -> Tensor:
        """x [size, ...], its n-th row for rank n -> [size, ...], the n-th row from rank n."""
        out = torch.empty_like(x)
        work = dist.all_to_all_single(out, x, group=self.group, async_op=True)
        return Pending(out, work).wait()

    def _exchange(
        self, x: Tensor, read: Callable[[Sequence[Tensor]], object], most: int | None = None
    ) -> Started | None:
        return None if self.shared is None else self.shared.start(x, read, most)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrite x with the one at position `source`."""
        if self.size > 1:
            dist.broadcast(x, group=self.group, group_src=source)
        return x

    def barrier(self) -> None:
        """No rank's device gets past it before every rank of the axis has come. Under NCCL this thread goes on."""
        self.all_reduce(torch.zeros(1, device=self.device))

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. JSON, so that nothing is unpickled."""
        if self.size == 1:
            return [value]
        data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=self.device)
        sizes = self.all_gather(torch.tensor([data.numel()], device=self.device)).tolist()
        padded = data.new_zeros(max(sizes))
        padded[: data.numel()] = data
        rows = self.all_gather(padded).view(self.size, -1).cpu()
        return [json.loads(bytes(row[:n].tolist())) for row, n in zip(rows, sizes, strict=True)]


ALONE = Axis()
"""One rank has all."""


_OF_TWO: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def _fits(x: Tensor, into: Tensor) -> bool:
    """Can a result be left there? On a CPU not within what it is made of."""
    return into.is_cuda or x.untyped_storage()._cdata != into.untyped_storage()._cdata


def _combine(parts: Sequence[Tensor], out: Tensor, of_two: Callable[..., Tensor]) -> None:
    """Combine all of them in this order, the same bits on every rank."""
    of_two(parts[0], parts[1], out=out)
    for part in parts[2:]:
        of_two(out, part, out=out)
