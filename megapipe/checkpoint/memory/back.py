"""Find the newest generation of states that all ranks can go back to, and restore lost states.

A generation is the copies of all ranks' states in memory after one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megapipe.checkpoint.memory.copies import Copies
from megapipe.distributed.axis import Axis


@dataclass(frozen=True)
class Back:
    """The result of `go_back`: the ranks are back at an earlier step, loaded from memory.

    A generation is the states of all ranks that were copied after the same step.

    Attributes:
        generation: the number of steps before the states; None if no generation is complete.
        content: the rest of the state, as in a checkpoint's state.json.
        lost: rank that lost its own memory -> the rank that had a copy of its state. If no
            generation is complete: rank whose state nobody has -> None.
        reached: the most steps that any rank had trained before the ranks went back.
    """

    generation: int | None
    content: dict[str, Any]
    lost: dict[int, int | None]
    reached: int


def go_back(copies: Copies, world: Axis) -> Back | None:
    """Load the newest generation with the state of every rank. Collective over the world.

    A generation is the states of all ranks after the same step. A state whose checksum does not
    agree with its bytes is not used.

    Args:
        copies: the states that this rank has in memory.
        world: the axis of all ranks.
    Returns: None if no rank has any state in memory, as at the start of a run.
    """
    everyone = world.gather_json([copies.reached, copies.listed()])
    reached = max(step for step, _ in everyone)
    # Ranks make all copies together, so a generation is in the same slot everywhere.
    places = {n: slot for _, held in everyone for _, n, slot in held}
    if not places:
        return None
    lost: dict[int, int | None] = {}
    for generation in sorted(places, reverse=True):
        slot = places[generation]
        held = [{r for r, n, _ in of_rank if n == generation} for _, of_rank in everyone]
        found = _sources(copies, world, generation, slot)
        if None in found.values():
            # A newer generation may be incomplete only. The oldest one shows which states are lost.
            lost = {rank: None for rank, source in found.items() if source is None}
            continue
        _bring(copies, generation, slot, found, held)
        return Back(generation, copies.load(generation, slot), found, reached)
    copies.forget()
    return Back(None, {}, lost, reached)


def _sources(copies: Copies, world: Axis, generation: int, slot: int) -> dict[int, int | None]:
    """Return the ranks without their own state, and for each the first rank that has it.

    None stands for no rank. Collective over the world.

    Args:
        copies: the states that this rank has in memory.
        world: the axis of all ranks.
        generation: the number of steps before the states.
        slot: 0 or 1, the copy of each rank that has them.
    """
    clique = copies.clique
    own = copies.sound(copies.rank, generation, slot)
    lacking = [rank for rank, has in enumerate(world.gather_json(own)) if not has]
    mine = []
    for rank in lacking:
        if rank in clique.others:
            is_here = copies.sound(rank, generation, slot) if clique.sends else own
            if is_here:
                mine.append(rank)
    everyone = world.gather_json(mine)
    return {
        rank: next((holder for holder, has in enumerate(everyone) if rank in has), None)
        for rank in lacking
    }


def _bring(
    copies: Copies,
    generation: int,
    slot: int,
    sources: dict[int, int | None],
    held: Sequence[set[int]],
) -> None:
    """Send states to the ranks that lost them, and to the ranks that keep copies for others.

    Args:
        copies: this rank's states in memory.
        generation: the number of steps before the states to load.
        slot: the slot with that generation, the same on every rank.
        sources: for each rank without its own state, a rank that has it.
        held: for each rank, the ranks whose states its slots have, as their headers say.
    """
    clique = copies.clique
    for rank, source in sources.items():
        if source is None or rank not in clique.axis.ranks:
            continue
        if source == copies.rank:
            copies.give(rank if clique.sends else source, slot, rank)
        elif rank == copies.rank:
            copies.take(rank, slot, generation, source)
    if not clique.sends:
        return
    # A newcomer keeps the others' states again before it may be needed.
    for owner in clique.axis.ranks:
        for holder in clique.axis.ranks:
            # The source of a rank's state has it, and others may have a damaged one.
            has = owner in held[holder] and owner not in sources
            if holder in (owner, sources.get(owner)) or has:
                continue
            if owner == copies.rank:
                copies.give(owner, slot, holder)
            elif holder == copies.rank:
                copies.take(owner, slot, generation, owner)
