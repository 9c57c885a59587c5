"""Diagnose ranks that have stopped: report where each one is, and find the one at fault.

A rank waits for a message. The rank at the other end also waits, or has passed the place of that
message, or does not answer. Following the waits from any rank ends at the one that holds up the
others. The functions are pure: they read what each rank remembers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any, NamedTuple

from torch.distributed import DistError

from megapipe.distributed.device import lacks_memory
from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.messages.transport import InFlight
from megapipe.schedule import Exchange, Message

TERMINATED = "asked to stop (SIGTERM)"


class Link(NamedTuple):
    """A message between two pipeline ranks, seen from one end.

    Attributes:
        what: the pass that makes the message, as text.
        peer: the global rank at the other end.
        sends: whether this rank sends the message.
    """

    what: str
    peer: int
    sends: bool

    def __str__(self) -> str:
        if self.sends:
            return f"to hand {self.what} to rank {self.peer}"
        return f"for {self.what} from rank {self.peer}"


@dataclass(frozen=True)
class Report:
    """A rank's report on where it is, for the other ranks to read.

    `to_json` and `from_json` convert it to text and back.

    Attributes:
        name: such as "rank 1 (pipeline rank 1, stage 1)"; the first number is the global rank.
        place: the pass or call in which the rank is, with its iteration.
        step: only the iteration.
        since_s: seconds that the rank has been in this place.
        waits: the message that the rank waits for; None if it waits for none.
        ahead: messages of this step that it has still to send or receive; None if it has not begun
            the step's passes.
        note: why it reports, such as "timed out".
        cause: the rank's own error, if no other rank has caused it; else None.
    """

    name: str
    place: str
    step: str
    since_s: float
    waits: Link | None
    ahead: list[Link] | None
    note: str
    cause: str | None

    def __str__(self) -> str:
        waits = f"waits {self.waits}, " if self.waits else ""
        since = f"since {self.since_s:.1f} s"
        return f"{self.name} is in {self.place}, {waits}{since}: {self.cause or self.note}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Report:
        fields = json.loads(text)
        # JSON has made lists of the tuples.
        if fields["waits"] is not None:
            fields["waits"] = Link(*fields["waits"])
        if fields["ahead"] is not None:
            fields["ahead"] = [Link(*link) for link in fields["ahead"]]
        return Report(**fields)


def report_of(mesh: ProcessMesh, note: str, cause: str | None = None) -> Report:
    """Return the report of this rank at this moment.

    The thread of `Watch` calls it, while the main thread may go on.

    Args:
        mesh: this rank's mesh.
        note: why the rank reports.
        cause: the rank's own error; None if it has none.
    """
    position = mesh.position
    item, since = position.at or (None, monotonic())
    plan = position.plan
    stages: set[int] = set()
    for one in plan or ():
        if not isinstance(one, Exchange):
            stages |= {call.item.stage for call in one}
    held = ""
    if stages:
        held = f", stage {' and '.join(map(str, sorted(stages)))}"
    step = position.step
    place = step
    if item is not None:
        place = f"{_name(item)} of {step}"
    # Before the passes of a step there is no plan, and every message is still to come.
    ahead = None
    if plan is not None:
        ahead = list(_ahead(mesh, item))
    return Report(
        name=f"rank {mesh.world.rank} (pipeline rank {mesh.pp.rank}{held})",
        place=place,
        step=step,
        since_s=monotonic() - since,
        waits=_waits(mesh, item),
        ahead=ahead,
        note=note,
        cause=cause,
    )


def first_mismatch(reports: Mapping[int, Report], world: int) -> str:
    """Return a sentence that names the rank that holds up the others, and who waits for it.

    It names several ranks if several failed, do not answer, were asked to stop, or are in different
    steps. If no message is missing, it says so and names the rank that is longest in its place.

    Args:
        reports: {global rank: its report} for the ranks that answered.
        world: number of ranks.
    """
    # 1. A rank's own error explains all that others see.
    failed = [rank for rank, report in reports.items() if report.cause]
    if failed:
        ends = [f"rank {r} ended in {reports[r].place}: {reports[r].cause}" for r in failed]
        return "; ".join(ends)
    # 2. A rank that does not answer was killed, stopped or cut off.
    silent = [rank for rank in range(world) if rank not in reports]
    if silent:
        links = {rank: report.waits for rank, report in sorted(reports.items())}
        waiting = [
            f"; rank {rank} waits {link}"
            for rank, link in links.items()
            if link and link.peer in silent
        ]
        does = "does not answer" if len(silent) == 1 else "do not answer"
        return f"{_ranks(silent)} {does}: killed, stopped or cut off{''.join(waiting)}"
    # 3. Some were asked to stop, and the others go on.
    ended = [rank for rank, report in reports.items() if report.note == TERMINATED]
    if ended:
        was = "was" if len(ended) == 1 else "were"
        return f"{_ranks(ended)} {was} {TERMINATED}"
    # 4. All answer, and some wait for a message: follow the waits.
    ends_at = {rank: end for rank in reports if (end := _follow(reports, rank))}
    for culprit, text in ends_at.values():
        others = sorted(rank for rank, end in ends_at.items() if end[0] == culprit != rank)
        wait = "waits" if len(others) == 1 else "wait"
        return f"rank {culprit} {text}; {_ranks(others)} {wait} for it"
    # 5. Nobody waits for a message: ranks are in different steps, or in one long call.
    if len({report.step for report in reports.values()}) > 1:
        steps = [f"rank {rank} is in {report.step}" for rank, report in sorted(reports.items())]
        return "; ".join(steps)
    longest = max(reports, key=lambda rank: reports[rank].since_s)
    place = reports[longest].place
    return f"no message is missing; rank {longest} has been longest in its place, {place}"


def is_lost(error: BaseException) -> bool:
    """Return whether an error is a failed message or collective, perhaps another rank's fault.

    A lack of memory in a collective is this rank's own fault, whichever library met it.
    """
    if lacks_memory(error):
        return False
    of_gloo = any(part in str(error) for part in ("gloo", _CLOSED))
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and of_gloo)


_CLOSED = "Application timeout caused pair closure"
"""The text of gloo's error at ranks that wait for a rank that has timed out.

It is the only one of its errors without the name gloo.
"""


def short(text: str) -> str:
    """Return two words for a known error, such as `timed out`; else the text's first line.

    The line is cut after 200 characters.
    """
    known = {
        "Timed out": "timed out",
        _CLOSED: "timed out",
        "Connection closed": "connection closed",
        "reset by peer": "connection lost",
    }
    for part, words in known.items():
        if part in text:
            return words
    return text.split("\n")[0][:200]


def _follow(reports: Mapping[int, Report], rank: int) -> tuple[int, str] | None:
    """Follow the waits of a rank from peer to peer, until a rank that holds up the one before.

    Such a rank has passed over the message that is missing, or waits for no message itself.

    Args:
        reports: {global rank: its report}.
    Returns: (that rank, the rest of a sentence on its place and the missing message). None if
        `rank` waits for no message, or if the waits form a circle.
    """
    seen = set()
    while (waits := reports[rank].waits) and rank not in seen:
        seen.add(rank)
        here = reports[rank]
        there = reports[waits.peer]
        left = f"sent {waits.what} to rank {rank}"
        if waits.sends:
            left = f"received {waits.what} from rank {rank}"
        # The same message seen from the other end. If it is not ahead there, it was passed over.
        owed = Link(waits.what, rank, not waits.sends)
        if here.step == there.step and there.ahead is not None and owed not in there.ahead:
            return waits.peer, f"is in {there.place} and never {left}"
        if there.waits is None:
            since = f"since {there.since_s:.1f} s"
            return waits.peer, f"is in {there.place} {since} and has not yet {left}"
        rank = waits.peer
    return None


def _waits(mesh: ProcessMesh, item: Any) -> Link | None:
    """Return the message that the main thread waits for; None if it waits for none.

    `item` is the item of the program that now runs; None outside of a program.
    """
    hand = mesh.position.hand
    comm = mesh.position.comm
    if item is None or comm is None:
        return None
    # A pass waits for the first of its inputs that is on its way.
    if isinstance(item, tuple):
        for call in item:
            for made_by, source in call.takes:
                if isinstance(hand.get(made_by), InFlight):
                    return Link(str(made_by), mesh.pp.ranks[source], False)
        return None
    # An exchange waits for shapes, where they are sent.
    if isinstance(item, Exchange) and comm.variable_seq_lengths:
        for message in item.messages:
            if message.dst == mesh.pp.rank:
                return _link(mesh, message)
    # At the end, or with too many sends under way, the oldest send is waited for.
    if comm.sends and (isinstance(item, str) or len(comm.sends) > comm.sends_in_flight):
        return _link(mesh, comm.sends[0][0])
    return None


def _ahead(mesh: ProcessMesh, item: Any) -> Iterable[Link]:
    """Yield the messages that this rank has still to send or receive in this step.

    Sends that were posted and may not have left are among them.

    `item` is the item of the program that now runs.
    """
    plan = list(mesh.position.plan or ())
    for message, _ in list(mesh.position.comm.sends):
        yield _link(mesh, message)
    if item not in plan:
        return
    for later in plan[plan.index(item) :]:
        if isinstance(later, Exchange):
            for message in later.messages:
                if message.src == mesh.pp.rank:
                    yield _link(mesh, message)
        else:
            # A receive counts at the pass that takes it. Where it was posted says little: that may
            # be places earlier, and it may have arrived or not.
            for call in later:
                for made_by, source in call.takes:
                    if source != mesh.pp.rank:
                        yield Link(str(made_by), mesh.pp.ranks[source], False)


def _link(mesh: ProcessMesh, message: Message) -> Link:
    sends = message.src == mesh.pp.rank
    peer = message.dst if sends else message.src
    return Link(str(message.made_by), mesh.pp.ranks[peer], sends)


def _name(item: Any) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, Exchange):
        return f"the exchange of {' '.join(str(message.made_by) for message in item.messages)}"
    return f"pass {' '.join(str(call.item) for call in item)}"


def _ranks(ranks: Iterable[int]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
