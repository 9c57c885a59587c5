"""A communicator with NCCL's rules and real sums, for ranks that are threads with a device each.

Its operations run on a stream of their own: after what the asking stream has so far, one after
another, and what waits for them comes after. Until then what they write is poison. Both sides must
bring the same sizes and types, and tensors of this rank's device. gloo does the sums, on copies of
what was there at the call, so the bits are a CPU's.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tools.proofs.gpu.emulated.streams import Event, Stream


@dataclass(frozen=True)
class Shared:
    """What all ranks know, if they are threads. `launch.Told` is that of processes.

    A part of an operation is what one rank does of it. Its name has the communicator, the kind and
    the number of the operation, and the rank or both ends of a message.

    Attributes:
        brought: by communicator, kind and number of an operation, what the first rank has brought.
        ends: the end of each part that has begun, by its name.
    """

    brought: dict[tuple[object, ...], str] = field(default_factory=dict)
    ends: dict[tuple[object, ...], Event] = field(default_factory=dict)

    def begin(self, part: tuple[object, ...], end: Event) -> None:
        """Let the other ranks know the end of a part of this rank."""
        self.ends[part] = end

    def wait(self, part: tuple[object, ...]) -> None:
        """Let the current stream wait for a part of another rank, if that has begun."""
        end = self.ends.get(part)
        if end is not None:
            end.wait()


class Work:
    """An operation that was asked for, as dist.Work.

    Args:
        stream: of its communicator.
        launch: begins it and returns handles of gloo's.
        written: tensors of the device, each with its values once it is over.
        kept: what torch keeps until somebody has waited.
        wait_others: lets the current stream wait for the parts of other ranks that end before it.
    """

    def __init__(
        self,
        stream: Stream,
        launch: Callable[[], Sequence[Any]],
        written: Sequence[tuple[Tensor, Tensor]],
        kept: Sequence[Tensor],
        wait_others: Callable[[], None],
    ) -> None:
        self._launch, self._written, self._kept = launch, list(written), list(kept)
        self.end, self._wait_others = stream.record_event(), wait_others
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._waited = False

    def run(self) -> None:
        """Begin it and stay until its end."""
        try:
            for work in self._launch():
                work.wait()
        except BaseException as error:
            self._error = error
        self._over.set()

    def wait(self, timeout: object = None) -> bool:
        """Let the current stream wait for it."""
        self._over.wait()
        if self._error is not None:
            raise self._error
        for x, values in self._written:
            torch.ops.emulated.host(x).copy_(values)
        self._written.clear()
        self.end.wait()
        self._wait_others()
        self._waited = True
        self._kept.clear()
        return True

    def is_completed(self) -> bool:
        return self._waited


class Communicator:
    """A process group of one rank.

    Args:
        inner: a gloo group of the same ranks.
        name: of the communicator, with its ranks.
        rank: position of this one.
        shared: by all ranks.
        device: of this rank.
    """

    def __init__(
        self,
        inner: dist.ProcessGroup,
        name: str,
        rank: int,
        shared: Shared,
        device: torch.device,
    ) -> None:
        self.inner, self.name, self.shared = inner, name, shared
        self.device, self._rank = device, rank
        self._stream: Stream | None = None
        self._asked = queue.SimpleQueue[Work | None]()
        self._thread: threading.Thread | None = None
        self._numbers: dict[object, int] = {}
        self._lock = threading.RLock()

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return int(self.inner.size())

    @property
    def stream(self) -> Stream:
        if self._stream is None:
            self._stream = Stream(self.device)
        return self._stream

    def _run(self) -> None:
        """Operations of a communicator begin in the order of asking, each after the one before."""
        while (work := self._asked.get()) is not None:
            work.run()

    def close(self) -> None:
        """Let its thread end after what was asked for: it keeps the group's own threads."""
        self._asked.put(None)

    def _soon(self, work: Work) -> Work:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._asked.put(work)
        return work

    def _agree(self, key: object, what: str) -> int:
        """Compare what this rank brings with the others. Returns: the number of the operation."""
        number = self._numbers[key] = self._numbers.get(key, -1) + 1
        first = self.shared.brought.setdefault((self.name, key, number), what)
        if first != what:
            self._fault(f"{what} on rank {self._rank}, {first} on another")
        return number

    def _fault(self, text: str) -> None:
        Event.lib.fault(f"NCCL: {self.name}: {text}")
        raise RuntimeError(f"NCCL: {self.name}: {text}")

    def _ask(
        self,
        read: Sequence[Tensor],
        written: Sequence[Tensor],
        launch: Callable[[list[Tensor], list[Tensor]], Sequence[Any]],
        what: str,
        mine: Sequence[object],
        others: Sequence[object],
    ) -> Work:
        """Begin an operation.

        Args:
            launch: of copies on the host; what it reads and writes -> gloo's handles.
            mine, others: names of this rank's parts, and of those that are over before its end.
        """
        for x in (*read, *written):
            if x.device != self.device:
                self._fault(f"{what} of a tensor on {x.device}, and the rank has {self.device}")
            if not x.is_contiguous():
                self._fault(f"{what} of a tensor that is not contiguous")
        self.stream.wait_event(_current().record_event())
        for x in read:
            torch.ops.emulated.use(x.detach(), False, self.stream.lane, what)
        for x in written:
            torch.ops.emulated.use(x.detach(), True, self.stream.lane, what)
        given = [torch.ops.emulated.host(x.detach()).clone() for x in read]
        made = [torch.empty(x.shape, dtype=x.dtype) for x in written]
        for x in written:
            torch.ops.emulated.poison(x.detach())
        results = list(zip([x.detach() for x in written], made, strict=True))
        kept = (*read, *written)

        def wait_others() -> None:
            for name in others:
                self.shared.wait((self.name, name))

        work = Work(self.stream, lambda: launch(given, made), results, kept, wait_others)
        for name in mine:
            self.shared.begin((self.name, name), work.end)
        return self._soon(work)

    def _all(
        self,
        read: Sequence[Tensor],
        written: Sequence[Tensor],
        launch: Callable[[list[Tensor], list[Tensor]], Sequence[Any]],
        what: str,
        heard: Sequence[int] | None = None,
    ) -> Work:
        """A collective. heard: ranks whose data come to this one; None for all.

        It ends after those have begun. NCCL says nothing of the others: their data may be on the
        way, or still to be asked for.
        """
        number = self._numbers["all"]
        heard = range(self.size()) if heard is None else heard
        others = [("all", number, rank) for rank in heard if rank != self._rank]
        return self._ask(read, written, launch, what, [("all", number, self._rank)], others)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        (x,) = tensors
        what = f"all_reduce {opts.reduceOp.op} {_text(x)}"
        self._agree("all", what)

        def launch(given: list[Tensor], made: list[Tensor]) -> Sequence[Any]:
            made[0].copy_(given[0])
            return [self.inner.allreduce(made, opts)]

        return self._all([x], [x], launch, what)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        (x,) = tensors
        what = f"broadcast {opts.rootRank} {_text(x)}"
        self._agree("all", what)

        def launch(given: list[Tensor], made: list[Tensor]) -> Sequence[Any]:
            if given:
                made[0].copy_(given[0])
            return [self.inner.broadcast(made, opts)]

        own = [x] if opts.rootRank == self._rank else []
        return self._all(own, [x], launch, what, [opts.rootRank])

    def allgather(
        self, outs: Sequence[Sequence[Tensor]], given: Sequence[Tensor], opts: Any
    ) -> Work:
        (out,), (x,) = outs, given
        what = f"all_gather {_text(x)}"
        self._agree("all", what)
        return self._all(
            [x], out, lambda given, made: [self.inner.allgather([made], given, opts)], what
        )

    def gather(self, outs: Sequence[Sequence[Tensor]], given: Sequence[Tensor], opts: Any) -> Work:
        what = f"gather {opts.rootRank} {_text(given[0])}"
        self._agree("all", what)
        out = outs[0] if opts.rootRank == self._rank else []

        def launch(given: list[Tensor], made: list[Tensor]) -> Sequence[Any]:
            return [self.inner.gather([made] if made else [], given, opts)]

        return self._all(given, out, launch, what, range(len(out)))

    def scatter(self, outs: Sequence[Tensor], given: Sequence[Sequence[Tensor]], opts: Any) -> Work:
        what = f"scatter {opts.rootRank} {_text(outs[0])}"
        self._agree("all", what)
        own = given[0] if opts.rootRank == self._rank else []

        def launch(given: list[Tensor], made: list[Tensor]) -> Sequence[Any]:
            return [self.inner.scatter(made, [given] if given else [], opts)]

        return self._all(own, outs, launch, what, [opts.rootRank])

    def barrier(self, opts: Any = None) -> Work:
        opts = dist.AllreduceOptions()
        opts.reduceOp = dist.ReduceOp.SUM
        return self.allreduce([torch.zeros(1, device=self.device)], opts)

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Work:
        what = f"all_gather {_text(x)}"
        self._agree("all", what)
        if out.numel() != x.numel() * self.size():
            self._fault(f"{what} into {_text(out)}")

        def launch(given: list[Tensor], made: list[Tensor]) -> Sequence[Any]:
            return [dist.all_gather_into_tensor(made[0], given[0], self.inner, async_op=True)]

        return self._all([x], [out], launch, what)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Work:
        what = f"reduce_scatter {_text(x)}"
        self._agree("all", what)
        if out.numel() * self.size() != x.numel():
            self._fault(f"{what} into {_text(out)}")

        def launch(given: list[Tensor], made: list[Tensor]) -> Sequence[Any]:
            return [dist.reduce_scatter_tensor(made[0], given[0], group=self.inner, async_op=True)]

        return self._all([x], [out], launch, what)

    def all_to_all_single(
        self, out: Tensor, x: Tensor, arriving: list[int], leaving: list[int], opts: Any = None
    ) -> Work:
        what = "all_to_all"
        number = self._agree("all", f"{what} {x.dtype}")
        heard = list[int]()
        for peer in range(self.size()):
            sent = leaving[peer] if leaving else len(x) // self.size()
            received = arriving[peer] if arriving else len(out) // self.size()
            heard += [peer] * (received > 0)
            for ends, rows in (
                ((self._rank, peer), sent),
                ((peer, self._rank), received),
            ):
                key = (self.name, "rows", number, ends)
                first = self.shared.brought.setdefault(key, f"{rows}")
                if first != f"{rows}":
                    self._fault(f"{what} from {ends[0]} to {ends[1]}: {rows} rows, and {first}")

        def launch(given: list[Tensor], made: list[Tensor]) -> Sequence[Any]:
            return [
                dist.all_to_all_single(
                    made[0], given[0], arriving or None, leaving or None, self.inner, async_op=True
                )
            ]

        return self._all([x], [out], launch, what, heard)

    def _message(
        self, sends: bool, x: Tensor, peer: int
    ) -> tuple[Callable[[Tensor], Any], str, object]:
        ends = (self._rank, peer) if sends else (peer, self._rank)
        tag = self._agree(("message", sends, *ends), "message")
        what = f"message {ends[0]} to {ends[1]} {_text(x)}"
        first = self.shared.brought.setdefault((self.name, "message", ends, tag), what)
        if first != what:
            self._fault(f"{what}, and {first}")
        if sends:
            return (lambda host: self.inner.send([host], peer, tag)), what, (ends, tag)
        return (lambda host: self.inner.recv([host], peer, tag)), what, (ends, tag)

    def batch(self, calls: Sequence[tuple[bool, Tensor, int]]) -> Work:
        """Sends and receives that begin and end together. calls: is a send, tensor, peer."""
        ways = [self._message(*call) for call in calls]
        read = [x for sends, x, _ in calls if sends]
        written = [x for sends, x, _ in calls if not sends]

        def launch(given: list[Tensor], made: list[Tensor]) -> Sequence[Any]:
            theirs, ours = iter(made), iter(given)
            works = []
            for (sends, _, _), (way, _, _) in zip(calls, ways, strict=True):
                works.append(way(next(ours) if sends else next(theirs)))
            return works

        text = "; ".join(what for _, what, _ in ways)
        mine = [part for (sends, _, _), (_, _, part) in zip(calls, ways, strict=True) if sends]
        others = [
            part for (sends, _, _), (_, _, part) in zip(calls, ways, strict=True) if not sends
        ]
        return self._ask(read, written, launch, text, mine, others)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> Work:
        return self.batch([(True, tensors[0], peer)])

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> Work:
        return self.batch([(False, tensors[0], peer)])


class Call:
    """dist.P2POp."""

    def __init__(self, op: Any, tensor: Tensor, group: Communicator, group_peer: int) -> None:
        self.group = group
        self.call = (op is dist.isend, tensor, group_peer)


def batch(calls: Sequence[Call]) -> list[Work]:
    """dist.batch_isend_irecv."""
    (group,) = {call.group for call in calls}
    return [group.batch([call.call for call in calls])]


def _current() -> Stream:
    return Stream(lane=Stream.lib.c.get_stream(-1))


def _text(x: Tensor) -> str:
    return f"{x.numel()} x {x.dtype}"
