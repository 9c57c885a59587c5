"""A diagnosis when ranks stop moving: each rank's report, and who is at fault. Pure functions over what each remembers.

A rank waits for a message; the rank at its other end either waits too, or has passed the place of that message, or
says nothing. Following the waits from any rank ends at the one that holds up the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any, NamedTuple

from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.messages.transport import InFlight
from megapipe.schedule import Exchange, Message

TERMINATED = "told to stop (SIGTERM)"


class Link(NamedTuple):
    """A message seen from one end: its pass, the rank in the world at the other end, and whether it leaves here."""

    what: str
    peer: int
    sends: bool

    def __str__(self) -> str:
        return f"to hand {self.what} to rank {self.peer}" if self.sends else f"for {self.what} from rank {self.peer}"


@dataclass(frozen=True)
class Report:
    """The place where a rank is.

    Attributes:
        name: "rank 1 (pipeline rank 1, stage 1)", the first a rank of the world.
        place: the pass or call it is in, with its iteration.
        step: the iteration alone.
        since_s: how long it has been there.
        waits: the message it waits for.
        ahead: messages of this step it has not come to yet; None if it has not begun with the step's passes.
        note: how it came to report.
        cause: what went wrong in itself, which is no other rank's doing.
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
        return f"{self.name} is in {self.place}, {waits}since {self.since_s:.1f} s: {self.cause or self.note}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Report:
        fields = json.loads(text)
        waits, ahead = fields.pop("waits"), fields.pop("ahead")
        return Report(
            waits=None if waits is None else Link(*waits),
            ahead=None if ahead is None else [Link(*link) for link in ahead],
            **fields,
        )


def report_of(mesh: ProcessMesh, note: str, cause: str | None = None) -> Report:
    """The report of this rank as of now."""
    position = mesh.position
    item, since = position.at or (None, monotonic())
    stages = sorted({call.item.stage for i in position.plan or () if not isinstance(i, Exchange) for call in i})
    held = f", stage {' and '.join(map(str, stages))}" if stages else ""
    step = position.step
    return Report(
        name=f"rank {mesh.world.rank} (pipeline rank {mesh.pp.rank}{held})",
        place=step if item is None else f"{_name(item)} of {step}",
        step=step,
        since_s=monotonic() - since,
        waits=_waits(mesh, item),
        ahead=None if position.plan is None else list(_ahead(mesh, item)),
        note=note,
        cause=cause,
    )


def first_mismatch(reports: Mapping[int, Report], world: int) -> str:
    """The rank that holds up the others, and who waits for it. reports: by rank, of those that answered."""
    failed = [rank for rank, report in reports.items() if report.cause]
    if failed:
        return "; ".join(f"rank {rank} ended in {reports[rank].place}: {reports[rank].cause}" for rank in failed)
    silent = [rank for rank in range(world) if rank not in reports]
    if silent:
        links = {rank: report.waits for rank, report in sorted(reports.items())}
        waiting = [f"; rank {rank} waits {link}" for rank, link in links.items() if link and link.peer in silent]
        does = "does not answer" if len(silent) == 1 else "do not answer"
        return f"{_ranks(silent)} {does}: killed, stopped or cut off{''.join(waiting)}"
    ended = [rank for rank, report in reports.items() if report.note == TERMINATED]
    if ended:
        return f"{_ranks(ended)} {'was' if len(ended) == 1 else 'were'} {TERMINATED}"
    ends = {rank: end for rank in reports if (end := _follow(reports, rank))}
    for culprit, text in ends.values():
        others = sorted(rank for rank, end in ends.items() if end[0] == culprit != rank)
        return f"rank {culprit} {text}; {_ranks(others)} {'waits' if len(others) == 1 else 'wait'} for it"
    if len({report.step for report in reports.values()}) > 1:
        return "; ".join(f"rank {rank} is in {report.step}" for rank, report in sorted(reports.items()))
    longest = max(reports, key=lambda rank: reports[rank].since_s)
    return f"no message is missing; rank {longest} has been longest in its place, {reports[longest].place}"


def _follow(reports: Mapping[int, Report], rank: int) -> tuple[int, str] | None:
    """The rank at the end of a chain of waits and what it did or does; None for a rank that waits for none."""
    seen = set()
    while (waits := reports[rank].waits) and rank not in seen:
        seen.add(rank)
        here, there = reports[rank], reports[waits.peer]
        left = f"{'received' if waits.sends else 'sent'} {waits.what} {'from' if waits.sends else 'to'} rank {rank}"
        owed = Link(waits.what, rank, not waits.sends)
        if here.step == there.step and there.ahead is not None and owed not in there.ahead:
            return waits.peer, f"is in {there.place} and never {left}"
        if there.waits is None:
            return waits.peer, f"is in {there.place} since {there.since_s:.1f} s and has not yet {left}"
        rank = waits.peer
    return None


def _waits(mesh: ProcessMesh, item: Any) -> Link | None:
    """The message that the main thread waits for, if it does."""
    hand, comm, rank = mesh.position.hand, mesh.position.comm, mesh.pp.rank
    if item is None or comm is None:
        return None
    if isinstance(item, tuple):
        taken = [(p, r) for call in item for p, r in call.takes if isinstance(hand.get(p), InFlight)]
        return Link(str(taken[0][0]), mesh.pp.ranks[taken[0][1]], False) if taken else None
    if isinstance(item, Exchange) and comm.variable_seq_lengths:  # waits for shapes
        arriving = [message for message in item.messages if message.dst == rank]
        if arriving:
            return _link(mesh, arriving[0])
    if comm.sends and (isinstance(item, str) or len(comm.sends) > comm.sends_in_flight):
        return _link(mesh, comm.sends[0][0])
    return None


def _ahead(mesh: ProcessMesh, item: Any) -> Iterable[Link]:
    """Messages whose place in the plan has not come, and those posted that may not have left."""
    plan = list(mesh.position.plan or ())
    for message, _ in list(mesh.position.comm.sends):
        yield _link(mesh, message)
    for later in plan[plan.index(item) :] if item in plan else []:
        if isinstance(later, Exchange):
            yield from (_link(mesh, message) for message in later.messages if message.src == mesh.pp.rank)
        else:
            taken = (one for call in later for one in call.takes)
            yield from (Link(str(p), mesh.pp.ranks[source], False) for p, source in taken if source != mesh.pp.rank)


def _link(mesh: ProcessMesh, message: Message) -> Link:
    sends = message.src == mesh.pp.rank
    return Link(str(message.made_by), mesh.pp.ranks[message.dst if sends else message.src], sends)


def _name(item: Any) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, Exchange):
        return f"the exchange of {' '.join(str(message.made_by) for message in item.messages)}"
    return f"pass {' '.join(str(call.item) for call in item)}"


def _ranks(ranks: Iterable[int]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
