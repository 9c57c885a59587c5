"""Find the newest generation of states that all ranks can go back to, and restore lost states.

A generation is the copies of all ranks' states in memory after one step. Ranks may have other
numbers than the ones that they made their copies with, and there may be fewer or more of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megapipe.checkpoint.memory.copies import Copies, Name
from megapipe.checkpoint.memory.relayout import Piece
from megapipe.distributed.axis import Axis
from megapipe.errors import CheckpointError

Pieces = Callable[[int], list[Piece]]
"""Number of ranks of an earlier world -> pieces of this rank's state in states of that world."""


@dataclass(frozen=True)
class Back:
    """The result of `go_back`: the ranks are back at an earlier step, loaded from memory.

    The states of all ranks that were copied after the same step are a generation. A generation is
    named by the number of that step.

    Attributes:
        generation: the step to which the ranks went back; None if no step had the states of all.
        content: the rest of the state, as in a checkpoint's state.json.
        lost: {rank whose memory was lost: the rank that sent the state back}, such as {3: 1}. With
            `generation` None it is {rank whose state nobody has: None}.
        reached: the most steps that any rank had trained before the ranks went back.
        world: the number of ranks when the generation was copied.
    """

    generation: int | None
    content: Mapping[str, Any] = field(default_factory=dict)
    lost: Mapping[int, int | None] = field(default_factory=dict)
    reached: int = 0
    world: int = 0


class Move(NamedTuple):
    """Bytes of a state that the rank `source` sends to the rank `target`.

    If source and target are the same rank, the bytes are copied.

    Attributes:
        source: the rank that has the bytes.
        target: the rank that needs the bytes.
        name: the state from which the bytes are read, at the source.
        into: the state into which the bytes are written, at the target.
        piece: the place of the bytes in both states.
    """

    source: int
    target: int
    name: Name
    into: Name
    piece: Piece


def go_back(
    copies: Copies, world: Axis, group: Callable[[], Any], pieces: Pieces | None = None
) -> Back | None:
    """Load the states of the newest step for which every rank's state is found in memory.

    Collective over the world. A state whose checksum does not agree with its bytes is not used.

    Args:
        copies: the states that this rank keeps in memory, its own and some of other ranks.
        world: all ranks.
        group: makes a process group of all ranks for CPU tensors; called only if bytes must be
            sent between ranks.
        pieces: number of ranks of an earlier world -> which bytes of its states make up this rank's
            state. With None, states of another number of ranks are not used.
    Returns: the step, the state without tensors, and the ranks that had lost their memory. None if
        no rank has any state in memory, as at the start of a run.
    """
    everyone = world.gather_json([copies.reached, copies.name, copies.listed()])
    reached = max(step for step, *_ in everyone)
    names = [Name(*name) for _, name, _ in everyone]
    held = [{(Name(*name), n): slot for name, n, slot in listed} for *_, listed in everyone]
    # Ranks make all copies together, so a generation is in the same slot everywhere.
    places = {(n, name.world): slot for one in held for (name, n), slot in one.items()}
    if not places:
        return None
    now = copies.name.world
    lost: dict[int, int | None] = {}
    before = 0
    # Of one generation in two worlds the newer one is this one's, not yet complete everywhere.
    for n, before in sorted(places, key=lambda x: (x[0], x[1] == now), reverse=True):
        if before != now and pieces is None:
            continue
        slot = places[n, before]
        own = [Piece(copies.name.owner, 0, 0, copies.sizes[copies.name])]
        if before != now:
            assert pieces is not None
            own = pieces(before)
        needs = [[Piece(*x) for x in xs] for xs in world.gather_json(own)]
        has = [{name for name, generation in one if generation == n} for one in held]
        headers = _sound(copies, world, (n, before, slot), needs, has)
        sources = {
            (rank, x.owner): _source(Name(before, x.owner), rank, headers)
            for rank, xs in enumerate(needs)
            for x in xs
        }
        if None in sources.values():
            # A newer generation may be incomplete only. The oldest one shows which states are lost.
            lost = {owner: None for (_, owner), source in sources.items() if source is None}
            continue
        header = next(of[name] for of in headers for name in of)
        moves = []
        for rank, xs in enumerate(needs):
            for x in xs:
                source = sources[rank, x.owner]
                assert source is not None
                if before != now or source != rank:
                    moves.append(Move(source, rank, Name(before, x.owner), names[rank], x))
        _bring(copies, world, group, slot, moves, header)
        _keep_again(copies, world, group, slot, names, has, moves, header)
        gone: dict[int, int | None] = {}
        if before == now:
            gone = {x.target: x.source for x in moves}
        # A rank that is done removes what others may need until they are done.
        world.gather_json(None)
        return Back(n, copies.load(n, slot), gone, reached, before)
    copies.forget()
    return Back(None, lost=lost, reached=reached, world=before)


def _sound(
    copies: Copies,
    world: Axis,
    which: tuple[int, int, int],
    needs: Sequence[Sequence[Piece]],
    has: Sequence[set[Name]],
) -> list[dict[Name, dict[str, Any]]]:
    """Return, for each rank, the undamaged states that it keeps and some rank needs.

    Checksums take time. So each rank first checks the states that it needs itself, and then only
    states that other ranks need and do not have.

    Args:
        copies: this rank's states.
        world: all ranks.
        which: (step of the states, number of ranks then, slot 0 or 1).
        needs: for each rank, the pieces that it needs.
        has: for each rank, the states of that step that it keeps, by their unchecked headers.
    Returns: for each rank, {state: its header}.
    """
    n, before, slot = which
    rank = world.rank
    found: list[dict[Name, dict[str, Any]]] = [{} for _ in needs]
    wanted = {Name(before, x.owner) for x in needs[rank]}
    for _ in range(2):
        own = {}
        for name in wanted & has[rank]:
            one = copies.slot(name, slot)
            if one.sound(n):
                own[name.owner] = one.header()
        for r, headers in enumerate(world.gather_json(list(own.items()))):
            found[r] |= {Name(before, owner): header for owner, header in headers}
        tried = wanted
        wanted = set()
        for r, xs in enumerate(needs):
            wanted |= {Name(before, x.owner) for x in xs} - found[r].keys() - tried
    return found


def _source(name: Name, rank: int, headers: Sequence[Mapping[Name, object]]) -> int | None:
    """Return the rank that gives a state to `rank`: the first that has it, or `rank` itself.

    Args:
        name: the state.
        rank: the rank that needs the state.
        headers: for each rank, the undamaged states that it has.
    Returns: None if no rank has the state.
    """
    if name in headers[rank]:
        return rank
    return next((n for n, of_rank in enumerate(headers) if name in of_rank), None)


def _bring(
    copies: Copies,
    world: Axis,
    group: Callable[[], Any],
    slot: int,
    moves: Sequence[Move],
    header: Mapping[str, Any],
) -> None:
    """Send the bytes of all moves, compare checksums, and mark complete states as valid.

    Args:
        copies: this rank's states.
        world: all ranks.
        group: makes a process group of all ranks, if any move is between two ranks.
        slot: 0 or 1, the slot of all these states.
        moves: what goes where, the same list on all ranks.
        header: the header of any state of the same step; only the checksum in it is replaced.
    Raises: CheckpointError on the rank that received other bytes than were sent.
    """
    if not moves:
        return
    rank = world.rank
    channel: Any = None
    if any(x.source != x.target for x in moves):
        channel = group()
    sums: dict[int, int] = {}
    works = []
    for into in {x.into for x in moves if x.target == rank}:
        copies.slot(into, slot).drop()
    for n, (source, target, name, into, piece) in enumerate(moves):
        if source == rank:
            given = copies.slot(name, slot)
            sums[n] = given.checksum(piece.at, piece.size)
            data = given.data[piece.at : piece.at + piece.size]
            if target != rank:
                works.append(channel.send([data], target, n))
        if target == rank:
            goal = copies.slot(into, slot).data[piece.to : piece.to + piece.size]
            if source == rank:
                goal.copy_(data)
            else:
                works.append(channel.recv([goal], source, n))
    for work in works:
        work.wait()
    sent = dict(pair for one in world.gather_json(list(sums.items())) for pair in one)
    for n, (source, target, _, into, piece) in enumerate(moves):
        got = sent[n]
        if target == rank:
            got = copies.slot(into, slot).checksum(piece.to, piece.size)
        if got != sent[n]:
            raise CheckpointError(f"a state has changed on its way from rank {source} to {rank}")
    # Last: of a rank that is killed before this the state is invalid.
    for into in {x.into for x in moves if x.target == rank}:
        made = copies.slot(into, slot)
        made.seal({**header, "checksum": made.checksum()})


def _keep_again(
    copies: Copies,
    world: Axis,
    group: Callable[[], Any],
    slot: int,
    names: Sequence[Name],
    has: Sequence[set[Name]],
    moved: Sequence[Move],
    header: Mapping[str, Any],
) -> None:
    """Send copies of states to the ranks that should keep them and do not have them any more.

    After this every state is kept twice again.

    Args:
        copies, world, group: this rank's states, all ranks, and a function that makes their group.
        slot, header: the slot of all these states, 0 or 1, and the header of any of them.
        names: for each rank, the name of its own state.
        has: for each rank, the states that it kept before `_bring`.
        moved: the moves that `_bring` has carried out.
    """
    renewed = {x.into for x in moved}
    moves = []
    for holder, kept in enumerate(world.gather_json(list(copies.sizes.items()))):
        for name, size in kept:
            state = Name(*name)
            owner = names.index(state)
            # The source of a rank's state has it, and others may have a damaged one.
            is_source = any(x.into == state == x.name and x.source == holder for x in moved)
            there = state in has[holder] and state not in renewed
            if holder != owner and names[holder] != state and not (is_source or there):
                moves.append(Move(owner, holder, state, state, Piece(state.owner, 0, 0, size)))
    _bring(copies, world, group, slot, moves, header)
