"""NCCL's order of things, played on what every rank asks for: who waits for whom, does it end, and
how long is it?

A rank's host asks for kernels in an order. Operations of one communicator run in that order on a
stream of their own, each from the place in the compute stream where it was asked for, and are over
when all that take part have begun. Every rule of RULES is one more thing that waits. Time is the
longest way through it: the host takes none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

RULES = {
    "streams": "as NCCL runs them",
    "first": "and ranks that use a connection for the first time wait for each other "
    "on their hosts",
    "queue": "CUDA_DEVICE_MAX_CONNECTIONS=1: nothing starts before what was asked for ahead of it",
    "wait": "TORCH_NCCL_BLOCKING_WAIT=1: the host waits where the compute stream would",
    "device": "one communication kernel of a device at a time, in the order of asking "
    "(compute-sanitizer, ncu)",
    "launch": "CUDA_LAUNCH_BLOCKING=1: the host waits for every kernel that it starts",
}


class Meeting(NamedTuple):
    """Ranks that meet in an operation: all of a communicator, or the two ends of a message.

    Attributes:
        key: communicator, ends, and how many of these met before.
        size: how many ranks.
        what: must be the same for all.
    """

    key: tuple[object, ...]
    size: int
    what: str


class Ask(NamedTuple):
    """An operation is asked for. ctas: blocks that its kernel holds while it waits."""

    comm: str
    meetings: tuple[Meeting, ...]
    ctas: int = 1


class Wait(NamedTuple):
    """The compute stream waits for the rank's operation of this number."""

    number: int


class Work(NamedTuple):
    """A kernel on the compute stream, of a pass."""

    seconds: float


class Host(NamedTuple):
    """The host waits for the compute stream."""

    why: str


Item = Ask | Wait | Work | Host
Records = Mapping[int, Sequence[Item]]
"""Everything that each rank's host asks for, in its order."""


@dataclass
class Played:
    """The outcome of a play.

    Attributes:
        stuck: where each rank stands that does not end; empty if all do.
        unequal: meetings whose members differ in what they bring.
        seconds: until the last kernel is over.
        idle_ctas: blocks of kernels that wait for others, as a mean over the time in which a rank
            computes.
    """

    stuck: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    seconds: float = 0.0
    idle_ctas: float = 0.0

    @property
    def wrong(self) -> list[str]:
        return self.stuck + self.unequal


class _Event:
    """Something that happens once, at a time."""

    def __init__(self, name: str = "") -> None:
        self.name, self.at, self.waiting = name, -1.0, list[Iterator[_Event]]()


class _Joined:
    """The ranks that have come to a meeting, when, and what they bring."""

    def __init__(self, meeting: Meeting) -> None:
        self.ranks, self.at, self.what, self.event = (
            set[int](),
            0.0,
            meeting.what,
            _Event(str(meeting.key)),
        )


class _Rank:
    """A rank's events: each item's asking by the host, of each operation when its stream reaches
    it, and its end.
    """

    def __init__(self, number: int, items: Sequence[Item]) -> None:
        self.number, self.items = number, items
        self.asks = [item for item in items if isinstance(item, Ask)]
        self.issued = [_Event("its host") for _ in items]
        self.done = [_Event("its own stream") for _ in items]
        self.reached = [_Event("its own stream") for _ in self.asks]
        self.over = [
            _Event(f"{' '.join(str(x.key) for x in ask.meetings)} of {ask.comm}")
            for ask in self.asks
        ]
        self.works: list[tuple[float, float]] = []
        self.idle: list[tuple[float, float, int]] = []


class _Player:
    """One play under one rule. Hosts and streams are coroutines that wait for events."""

    def __init__(self, records: Records, rule: str, message: float) -> None:
        assert rule in RULES, rule
        self.rule, self.message, self.played = rule, message, Played()
        self.ranks = {number: _Rank(number, items) for number, items in records.items()}
        self.joined: dict[tuple[object, ...], _Joined] = {}
        self.ready: deque[Iterator[_Event]] = deque()
        self.blocked: dict[Iterator[_Event], tuple[int, str, _Event]] = {}
        for rank in self.ranks.values():
            self._start(rank, "host", self._host(rank))
            self._start(rank, "compute stream", self._compute(rank))
            lanes: dict[str, list[int]] = defaultdict(list)
            for n, ask in enumerate(rank.asks):
                lanes["device" if rule == "device" else ask.comm].append(n)
            for name, numbers in lanes.items():
                self._start(rank, name, self._lane(rank, numbers))

    def _start(self, rank: _Rank, name: str, process: Iterator[_Event]) -> None:
        self.blocked[process] = rank.number, name, _Event()
        self.ready.append(process)

    def run(self) -> Played:
        while self.ready:
            process = self.ready.popleft()
            for event in process:
                if event.at < 0:
                    event.waiting.append(process)
                    self.blocked[process] = *self.blocked[process][:2], event
                    break
            else:
                del self.blocked[process]
        for rank, name, event in self.blocked.values():
            self.played.stuck.append(f"rank {rank}: its {name} waits for {event.name}")
        works = [work for rank in self.ranks.values() for work in rank.works]
        self.played.idle_ctas = sum(map(_beside, self.ranks.values())) / (
            sum(b - a for a, b in works) or 1.0
        )
        return self.played

    def _happen(self, event: _Event, at: float) -> None:
        event.at = at
        self.played.seconds = max(self.played.seconds, at)
        self.ready += event.waiting
        event.waiting.clear()

    def _meet(self, meeting: Meeting, rank: int, at: float) -> _Event:
        """Come to it. Returns: all have come."""
        joined = self.joined.setdefault(meeting.key, _Joined(meeting))
        if joined.what != meeting.what:
            self.played.unequal.append(
                f"{meeting.key}: {meeting.what} on rank {rank}, {joined.what} on another"
            )
        joined.ranks.add(rank)
        joined.at = max(joined.at, at)
        if len(joined.ranks) == meeting.size:
            self._happen(joined.event, joined.at)
        return joined.event

    def _host(self, rank: _Rank) -> Iterator[_Event]:
        number, known = 0, set[object]()
        for n, item in enumerate(rank.items):
            if isinstance(item, Ask):
                if self.rule == "first":  # an operation makes all its connections at once
                    new = [x for x in item.meetings if x.key[:-1] not in known]
                    known.update(x.key[:-1] for x in new)
                    yield from [
                        self._meet(Meeting(("first", *x.key[:-1]), x.size, ""), rank.number, 0.0)
                        for x in new
                    ]
                self._happen(rank.issued[n], 0.0)
                if self.rule == "launch":
                    yield rank.over[number]
                number += 1
            else:
                if isinstance(item, Wait) and self.rule == "wait":
                    yield rank.over[item.number]
                self._happen(rank.issued[n], 0.0)
                if isinstance(item, Host):
                    yield rank.done[n]

    def _compute(self, rank: _Rank) -> Iterator[_Event]:
        now, number, last = 0.0, 0, dict[str, int]()
        for n, item in enumerate(rank.items):
            yield rank.issued[n]
            if isinstance(item, Work):
                rank.works.append((now, now + item.seconds))
                now += item.seconds
            elif isinstance(item, Wait):
                yield rank.over[item.number]
                now = max(now, rank.over[item.number].at)
            elif isinstance(item, Ask):
                if (
                    self.rule == "queue" and item.comm in last
                ):  # the head of the queue waits for its stream
                    yield (before := rank.over[last[item.comm]])
                    now = max(now, before.at)
                last[item.comm] = number
                self._happen(rank.reached[number], now)
                number += 1
            self._happen(rank.done[n], now)

    def _lane(self, rank: _Rank, numbers: Sequence[int]) -> Iterator[_Event]:
        free = 0.0
        for number in numbers:
            ask = rank.asks[number]
            yield rank.reached[number]
            begin = max(free, rank.reached[number].at)
            met = [self._meet(meeting, rank.number, begin) for meeting in ask.meetings]
            yield from met
            together = max((event.at for event in met), default=begin)
            free = together + (self.message if met else 0.0)
            rank.idle.append((begin, together, ask.ctas))
            self._happen(rank.over[number], free)


def play(records: Records, rule: str = "streams", message: float = 0.0) -> Played:
    """Play it. message: seconds of an operation, once all have come."""
    return _Player(records, rule, message).run()


def _beside(rank: _Rank) -> float:
    """Blocks times seconds that wait while the rank computes."""
    begins = [begin for begin, _ in rank.works]
    before = [0.0, *accumulate(end - begin for begin, end in rank.works)]

    def worked(until: float) -> float:
        n = bisect_right(begins, until)
        return before[n] - max(0.0, rank.works[n - 1][1] - until) if n else 0.0

    return sum(ctas * (worked(end) - worked(begin)) for begin, end, ctas in rank.idle)
