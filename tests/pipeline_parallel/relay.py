"""Stages that compute nothing and check who wrote what they are given, and transports without a network."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.groups import link
from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.execute import execute
from megapipe.pipeline_parallel.messages.messenger import Messenger
from megapipe.pipeline_parallel.messages.transport import Ahead, Op, P2PMode, Transport
from megapipe.schedule import Kind, Placement, Program, Schedule


def signed(kind: Kind, stage: int, microbatch: int, length: int = 2) -> Tensor:
    """What a pass makes: [length, 1, 3], which says who made it."""
    return torch.tensor([int(kind is Kind.F), stage, microbatch], dtype=torch.float32).expand(length, 1, 3)


class RelayStage:
    """Makes `signed` tensors and refuses any other input than its neighbour's of the same microbatch."""

    def __init__(self, number: int, placement: Placement, length_of: Callable[[int], int]) -> None:
        self.number, self.placement, self.length_of = number, placement, length_of
        self.done: list[tuple[Kind, int]] = []

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        self._check(Kind.F, self.placement.prev(self.number), microbatch, x)
        last = self.placement.is_last(self.number)
        return None if last else signed(Kind.F, self.number, microbatch, self.length_of(microbatch))

    def backward(self, microbatch: int, grad: Tensor | None, *, weights: bool) -> Tensor | None:
        self._check(Kind.B, self.placement.next(self.number), microbatch, grad)
        if weights:
            self.weight(microbatch)
        first = self.placement.is_first(self.number)
        return None if first else signed(Kind.B, self.number, microbatch, self.length_of(microbatch))

    def weight(self, microbatch: int) -> None:
        self.done.append((Kind.W, microbatch))

    def _check(self, kind: Kind, maker: int | None, microbatch: int, given: Tensor | None) -> None:
        self.done.append((kind, microbatch))
        if maker is None:
            assert given is None
        else:
            wanted = signed(kind, maker, microbatch, self.length_of(microbatch))
            assert given is not None
            assert torch.equal(given, wanted), f"{kind} of microbatch {microbatch} from {maker}: {given}"


def relay(
    mesh: ProcessMesh, schedule: Schedule, programs: Sequence[Program], transport: Transport, *, variable: bool = False
) -> None:
    """One step of one rank; every pass must have run, each with the right input."""
    place = schedule.placement
    length_of = (lambda microbatch: 1 + microbatch % 3) if variable else (lambda microbatch: 2)
    stages = {s: RelayStage(s, place, length_of) for s in place.stages_on(mesh.pp.rank)}
    comm = Messenger(mesh.pp, (2, 1, 3), torch.float32, transport=transport, variable_seq_lengths=variable)
    execute(programs[mesh.pp.rank], place, stages, comm)
    mine = [p for step in schedule.ranks[mesh.pp.rank] for p in step]
    assert sum(len(stage.done) for stage in stages.values()) == sum(2 if p.kind is Kind.BW else 1 for p in mine)


class Wires:
    """The links of a pipeline of threads on which a send waits for its receive."""

    def __init__(self) -> None:
        self.links: dict[tuple[int, int], queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)


class Rendezvous(Transport):
    """A send returns when its receive has been posted; with `both`, a receive too returns only with its tensor.

    The first is the least a transport may promise. The second is a communicator that runs one operation at a time.
    """

    def __init__(self, pp: Axis, mode: str, wires: Wires, *, both: bool) -> None:
        super().__init__(pp, mode)
        self.wires, self.both = wires, both

    @property
    def receives_ahead(self) -> Ahead:
        return Ahead(0, frozenset()) if self.both else super().receives_ahead

    def one(self, op: Op) -> Done:
        if op.sends:
            tensor, done = self.wires.links[self.pp.rank, op.peer].get(timeout=20)
            tensor.copy_(op.tensor)
            done.set()
            return Done()
        arrived = threading.Event()
        self.wires.links[op.peer, self.pp.rank].put((op.tensor, arrived))
        if self.both:
            assert arrived.wait(20)
        return Done(arrived)


class Queues(Transport):
    """Communicators of one way as NCCL runs them: each does one operation at a time, a send until its receive has it.

    Ranks hand over where both have come to the operation; receives are posted one place ahead.
    """

    def __init__(self, pp: Axis, mode: str, wires: Wires) -> None:
        super().__init__(pp, mode)
        self.wires = wires
        self.lanes: dict[int, queue.SimpleQueue[tuple[Op, threading.Event] | None]] = {}

    @property
    def receives_ahead(self) -> Ahead:
        return Ahead(1, frozenset(r for r in range(self.pp.size) if link(r, self.pp.rank, self.pp.size) is not None))

    def one(self, op: Op) -> Done:
        ends = (self.pp.rank, op.peer) if op.sends else (op.peer, self.pp.rank)
        lane = link(*ends, self.pp.size)
        assert lane is not None
        if lane not in self.lanes:
            self.lanes[lane] = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self.lanes[lane],), daemon=True).start()
        done = threading.Event()
        self.lanes[lane].put((op, done))
        return Done(done)

    def _run(self, lane: queue.SimpleQueue[tuple[Op, threading.Event] | None]) -> None:
        while (posted := lane.get()) is not None:
            op, done = posted
            if op.sends:
                taken = threading.Event()
                self.wires.links[self.pp.rank, op.peer].put((op.tensor, taken))
                assert taken.wait(20)
            else:
                tensor, taken = self.wires.links[op.peer, self.pp.rank].get(timeout=20)
                op.tensor.copy_(tensor)
                taken.set()
            done.set()

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.put(None)


class Done:
    """A handle that waits for an event, or for nothing."""

    def __init__(self, event: threading.Event | None = None) -> None:
        self.event = event

    def wait(self) -> None:
        assert self.event is None or self.event.wait(20)

    def is_completed(self) -> bool:
        return self.event is None or self.event.is_set()


class Void(Transport):
    """Sends vanish, receives hold what was in memory, nothing waits. `posted` lists the operations."""

    def __init__(self, pp: Axis, mode: str = P2PMode.PLAIN) -> None:
        super().__init__(pp, mode)
        self.posted: list[Op] = []

    def one(self, op: Op) -> Done:
        self.posted.append(op)
        return Done()
