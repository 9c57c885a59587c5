"""Records what a rank asks of NCCL: the package's own axes and messages, over groups that only
write down.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch import Tensor

import megapipe.distributed.axis
from megapipe.distributed.axis import Axis
from megapipe.distributed.groups import CTAS, LINK_CTAS
from tools.proofs.gpu.rules import Ask, Host, Item, Meeting, Wait


@dataclass
class Recorder:
    """Everything that one rank's host asks for."""

    rank: int
    items: list[Item] = field(default_factory=list)
    asked: int = 0
    met: Counter[tuple[object, ...]] = field(default_factory=Counter)

    def ask(self, group: Group, meetings: Sequence[tuple[tuple[object, ...], int, str]]) -> Asked:
        """meetings: key, number of ranks and what must be equal, of each."""
        counted = []
        for key, size, what in meetings:
            counted.append(Meeting((*key, self.met[key]), size, what))
            self.met[key] += 1
        self.items.append(Ask(group.name, tuple(counted), group.ctas))
        self.asked += 1
        return Asked(self, self.asked - 1)

    def host_waits(self, why: str) -> None:
        """The host waits for the device."""
        self.items.append(Host(why))


@dataclass(frozen=True)
class Asked:
    """A handle of an operation, as dist.Work; the host is ahead of its device, where nothing is
    over yet.
    """

    by: Recorder
    number: int

    def wait(self) -> bool:
        self.by.items.append(Wait(self.number))
        return True

    def is_completed(self) -> bool:
        return False


class Group:
    """A communicator as a rank has it. ranks: of the world."""

    def __init__(self, by: Recorder, name: str, ranks: Sequence[int]) -> None:
        self.by, self.ranks, self.name = by, tuple(ranks), f"{name} {list(ranks)}"
        self.ctas = LINK_CTAS if name.startswith("link") else CTAS

    def way(self, sends: bool, peer: int, x: Tensor) -> tuple[tuple[object, ...], int, str]:
        """The meeting with the rank at a position, for a message."""
        src, dst = (self.by.rank, self.ranks[peer]) if sends else (self.ranks[peer], self.by.rank)
        return (self.name, src, dst), 2, _text(x)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> Asked:
        return self.by.ask(self, [self.way(True, peer, tensors[0])])

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> Asked:
        return self.by.ask(self, [self.way(False, peer, tensors[0])])

    def all(self, what: str, *tensors: Tensor) -> Asked:
        """A collective; the first tensor is of one size on all ranks."""
        for x in tensors:
            assert x.is_contiguous(), f"NCCL refuses {what} of a tensor that is not contiguous"
        return self.by.ask(self, [((self.name,), len(self.ranks), f"{what} {_text(*tensors[:1])}")])


def seen_from(
    by: Recorder, own: Sequence[Group], other: Recorder, others: Sequence[Group]
) -> Iterator[Item]:
    """Yield the requests of a rank that does the same as `by`, in groups and places of its own."""
    there = {a.name: (a, b) for a, b in zip(own, others, strict=True)}

    def rank_of(comm: str, rank: Any) -> int:
        a, b = there[comm]
        return b.ranks[
            (a.ranks.index(rank) - a.ranks.index(by.rank) + b.ranks.index(other.rank))
            % len(a.ranks)
        ]

    for item in by.items:
        if isinstance(item, Ask):
            comm, name = item.comm, there[item.comm][1].name
            meetings = (
                x._replace(key=(name, *(rank_of(comm, r) for r in x.key[1:-1]), x.key[-1]))
                for x in item.meetings
            )
            item = item._replace(comm=name, meetings=tuple(meetings))
        yield item


def _text(*tensors: Tensor) -> str:
    for x in tensors:
        assert x.device.type != "cpu", f"NCCL refuses a tensor on {x.device}"
    return " ".join(f"{x.numel()} x {x.dtype}" for x in tensors)


class _Call(NamedTuple):
    """dist.P2POp."""

    op: Any
    tensor: Tensor
    group: Group
    group_peer: int


def _batch(calls: Sequence[_Call]) -> list[Asked]:
    (group,) = {call.group for call in calls}
    ways = [group.way(call.op is dist.isend, call.group_peer, call.tensor) for call in calls]
    return [group.by.ask(group, ways)]


def _gather(out: Tensor, x: Tensor, group: Group, async_op: bool) -> Asked:
    """Gather this rank's tensor in place of all ranks'.

    Others here do the same, and a received message is zeros.
    """
    out.view(len(group.ranks), *x.shape).copy_(x.clone())
    return group.all("all_gather", x, out)


def _scatter(out: Tensor, x: Tensor, group: Group, async_op: bool) -> Asked:
    out.copy_(x.view(len(group.ranks), *out.shape)[0].clone())
    return group.all("reduce_scatter", x, out)


def _reduce(x: Tensor, op: object, group: Group, async_op: bool) -> Asked:
    if op is dist.ReduceOp.SUM:
        x.mul_(len(group.ranks))
    return group.all(f"all_reduce {op}", x)


def _broadcast(x: Tensor, group: Group, group_src: int) -> None:
    group.all(f"broadcast {group_src}", x).wait()


def _exchange(
    out: Tensor, x: Tensor, *rows: object, group: Group, async_op: bool = False
) -> Asked | None:
    # Ranks have as many rows as they route: what must be equal are the parts of two ranks, which a
    # table gives to both.
    if not rows:
        out.copy_(x.clone())
    work = group.all("all_to_all", *([] if rows else [x, out]))
    if async_op:
        return work
    work.wait()
    return None


@contextmanager
def recording() -> Iterator[None]:
    """Within the block, calls of torch.distributed go to the recorder of the group."""
    calls: dict[str, Any] = {
        "all_reduce": _reduce,
        "broadcast": _broadcast,
        "all_to_all_single": _exchange,
    }
    calls |= {"P2POp": _Call, "batch_isend_irecv": _batch}
    ways = {"_all_gather": _gather, "_reduce_scatter": _scatter}
    with ExitStack() as stack:
        for module, made in ((dist, calls), (megapipe.distributed.axis, ways)):
            for name, call in made.items():
                stack.enter_context(mock.patch.object(module, name, call))
        yield


@dataclass(frozen=True)
class Recorded(Axis):
    """An axis with one real rank. answers: everyone's answers to questions that are asked once."""

    answers: Sequence[Sequence[Any]] = ()

    def gather_json(self, value: Any) -> list[Any]:
        mine = json.loads(json.dumps(value))
        rows = next(
            (list(row) for row in self.answers if row[self.rank] == mine), [mine] * self.size
        )
        super().gather_json(max(rows, key=lambda row: len(json.dumps(row))))
        return rows
