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
        lost: {rank whose memory was lost: the rank that sent the state back}, such as {3: 1}. Empty
            if the number of ranks has changed. With `generation` None it is {rank whose state
            nobody has: None}.
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
        pieces: takes the number of ranks of an earlier world, and returns which bytes of that
            world's states make up this rank's state. With None, states of another number of ranks
            are not used.
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
        own = [Piece(copies.name.owner, 0, 0, copies.sizes[copies.name])]
        if before != now:
            if pieces is None:
                continue
            own = pieces(before)
        needs = [[Piece(*x) for x in xs] for xs in world.gather_json(own)]
        has = [{name for name, generation in one if generation == n} for one in held]
        states = _Generation(copies, world, group, n, before, places[n, before], has)
        headers = states.headers(needs)
        moves = []
        missing = set()
        for rank, xs in enumerate(needs):
            for x in xs:
                name = Name(before, x.owner)
                source = _source(name, rank, headers)
                if source is None:
                    missing.add(x.owner)
                elif before != now or source != rank:
                    moves.append(Move(source, rank, name, names[rank], x))
        if missing:
            # A newer generation may be incomplete only. The oldest one shows which states are lost.
            lost = dict.fromkeys(sorted(missing))
            continue
        header = next(of[name] for of in headers for name in of)
        states.bring(moves, header)
        states.keep_again(names, moves, header)
        gone: dict[int, int | None] = {}
        if before == now:
            gone = {x.target: x.source for x in moves}
        # A rank that is done removes what others may need until they are done.
        world.gather_json(None)
        return Back(n, copies.load(n, states.slot), gone, reached, before)
    copies.forget()
    return Back(None, lost=lost, reached=reached, world=before)


@dataclass(frozen=True)
class _Generation:
    """The states of one step that ranks keep in memory, and how the ranks exchange them.

    `headers` finds undamaged states, `bring` moves bytes between states, and `keep_again` restores
    copies that are lost. Each is collective over the world.

    Attributes:
        copies: the states that this rank keeps.
        world: all ranks.
        group: makes a process group of all ranks for CPU tensors.
        step: the step after which the states were copied.
        ranks: the number of ranks at that time.
        slot: 0 or 1, the slot of all these states.
        has: for each rank, the states that it keeps, by their unchecked headers.
    """

    copies: Copies
    world: Axis
    group: Callable[[], Any]
    step: int
    ranks: int
    slot: int
    has: Sequence[set[Name]]

    def headers(self, needs: Sequence[Sequence[Piece]]) -> list[dict[Name, dict[str, Any]]]:
        """Return, for each rank, the undamaged states that it keeps and some rank needs.

        Checksums take time. So each rank first checks the states that it needs itself, and then
        only states that other ranks need and do not have.

        Args:
            needs: for each rank, the pieces that it needs.
        Returns: for each rank, {state: its header}.
        """
        rank = self.world.rank
        found: list[dict[Name, dict[str, Any]]] = [{} for _ in needs]
        needed = [{Name(self.ranks, x.owner) for x in xs} for xs in needs]
        wanted = needed[rank]
        for _ in range(2):
            own = {}
            for name in wanted & self.has[rank]:
                one = self.copies.slot(name, self.slot)
                if one.sound(self.step):
                    own[name.owner] = one.header()
            for r, headers in enumerate(self.world.gather_json(list(own.items()))):
                found[r] |= {Name(self.ranks, owner): header for owner, header in headers}
            lacking = (names - found[r].keys() for r, names in enumerate(needed))
            wanted = set().union(*lacking) - wanted
        return found

    def bring(self, moves: Sequence[Move], header: Mapping[str, Any]) -> None:
        """Send the bytes of all moves, compare checksums, and mark complete states as valid.

        Args:
            moves: what goes where, the same list on all ranks.
            header: the header of any state of the step; only the checksum in it is replaced.
        Raises: CheckpointError on all ranks if any received other bytes than were sent.
        """
        if not moves:
            return
        rank = self.world.rank
        channel: Any = None
        if any(x.source != x.target for x in moves):
            channel = self.group()
        goals = {x.into: self.copies.slot(x.into, self.slot) for x in moves if x.target == rank}
        for goal in goals.values():
            goal.drop()
        sums: dict[int, int] = {}
        works = []
        for n, (source, target, name, into, piece) in enumerate(moves):
            if source == rank:
                given = self.copies.slot(name, self.slot)
                sums[n] = given.checksum(piece.at, piece.size)
                data = given.data[piece.at : piece.at + piece.size]
                if target != rank:
                    works.append(channel.send([data], target, n))
            if target == rank:
                place = goals[into].data[piece.to : piece.to + piece.size]
                if source == rank:
                    place.copy_(data)
                else:
                    works.append(channel.recv([place], source, n))
        for work in works:
            work.wait()
        sent = dict(pair for one in self.world.gather_json(list(sums.items())) for pair in one)
        changed = []
        for n, (source, target, _, into, piece) in enumerate(moves):
            if target == rank and goals[into].checksum(piece.to, piece.size) != sent[n]:
                changed.append(f"a state has changed on its way from rank {source} to {rank}")
        # All ranks raise: the others would wait for this one.
        problems = [text for texts in self.world.gather_json(changed) for text in texts]
        if problems:
            raise CheckpointError(problems)
        # Last: of a rank that is killed before this the state is invalid.
        for goal in goals.values():
            goal.seal({**header, "checksum": goal.checksum()})

    def keep_again(
        self, names: Sequence[Name], moved: Sequence[Move], header: Mapping[str, Any]
    ) -> None:
        """Send copies of states to the ranks that should keep them and do not have them any more.

        After this each rank has all states of its clique again.

        Args:
            names: for each rank, the name of its own state.
            moved: the moves that `bring` has carried out.
            header: the header of any state of the step.
        """
        renewed = {x.into for x in moved}
        moves = []
        for holder, kept in enumerate(self.world.gather_json(list(self.copies.sizes.items()))):
            for name, size in kept:
                state = Name(*name)
                owner = names.index(state)
                # The source of a rank's state has it, and others may have a damaged one.
                is_source = any(x.into == state == x.name and x.source == holder for x in moved)
                there = state in self.has[holder] and state not in renewed
                if holder != owner and names[holder] != state and not (is_source or there):
                    moves.append(Move(owner, holder, state, state, Piece(state.owner, 0, 0, size)))
        self.bring(moves, header)


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
