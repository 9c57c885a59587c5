"""On which rank each stage of the model is.

A placement is independent of the table that runs on it. So loop, V and DualPipe's mirror are three
one-line placements under the same machinery.

Stages of each rank, for 4 ranks and 8 stages (the mirror has two chains, 0 to 3 and 4 to 7):

            loop   V      mirror
    rank 0  0 4    0 7    0 7
    rank 1  1 5    1 6    1 6
    rank 2  2 6    2 5    2 5
    rank 3  3 7    3 4    3 4
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megapipe.schedule.kinds import Need, Where


@dataclass(frozen=True)
class Placement:
    """A placement of stages on ranks.

    The model is cut into consecutive parts. A *chain* is one stage for each part, in order: one
    copy of the model. The part of a stage is its *position*. Usually there is one chain, and the
    position of a stage is its number. DualPipe has two chains through the ranks, in opposite
    directions: stages s and s + chain are replicas of one part on mirrored ranks.

    Methods say, for a stage, its position, its neighbours and replicas, and whether it has
    embedding or loss; for a rank, its stages.

    Attributes:
        rank_of: rank of each stage.
        chain: number of stages in each chain, depths included.
        vocabulary: each rank holds an equal share of the rows of embedding and head. A rank with
            stages in two chains holds one share for each of the two.
        depths: number of depths of multi-token prediction (MTP modules). These modules are the last
            stages of each chain, after the stage with the main loss. Depth 1 takes the output of
            that stage, depth 2 takes the output of depth 1, and so on. Any rank may have any depth.
    """

    rank_of: tuple[int, ...]
    chain: int
    vocabulary: bool = False
    depths: int = 0

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    @property
    def num_ranks(self) -> int:
        return max(self.rank_of) + 1

    @property
    def num_chains(self) -> int:
        return self.num_stages // self.chain

    @property
    def main(self) -> int:
        """Return the number of stages of the main model, from the embedding to the loss."""
        return self.chain - self.depths

    @property
    def own_chain(self) -> Placement:
        """Return the placement without the stages of multi-token prediction."""
        rank_of: list[int] = []
        for first in range(0, self.num_stages, self.chain):
            rank_of += self.rank_of[first : first + self.main]
        return replace(self, rank_of=tuple(rank_of), chain=self.main, depths=0)

    def with_depths(self, ranks: Sequence[int]) -> Placement:
        """Return the placement with stages for multi-token prediction (depths) on these ranks.

        The depths follow the other stages of each chain, a copy of the model. In DualPipe the
        second chain has its depths on the mirrored ranks.

        Args:
            ranks: the rank of each depth, from depth 1.
        """
        # Two ranks and two depths, both on rank 1:
        #
        #     stage     0    1    2    3        DualPipe adds a second chain:  4    5    6    7
        #     rank      0    1    1    1                                       1    0    0    0
        #     holds  embed  loss  d1   d2                                   embed  loss  d1   d2
        mirrored = [self.num_ranks - 1 - rank for rank in ranks]
        rank_of: list[int] = []
        for first in range(0, self.num_stages, self.chain):
            rank_of += self.rank_of[first : first + self.chain]
            rank_of += mirrored if first else ranks
        depths = len(ranks)
        return replace(self, rank_of=tuple(rank_of), chain=self.chain + depths, depths=depths)

    def position(self, stage: int) -> int:
        """Return the position of a stage in its copy of the model, 0 to chain - 1."""
        return stage % self.chain

    def is_first(self, stage: int) -> bool:
        """Return whether the stage holds the embedding."""
        return self.position(stage) == 0

    def is_last(self, stage: int) -> bool:
        """Return whether the stage has the model's own loss, not one of multi-token prediction."""
        return self.position(stage) == self.main - 1

    def depth(self, stage: int) -> int:
        """Return which module of multi-token prediction the stage is, from 1; 0 if it is none."""
        return max(self.position(stage) - self.main + 1, 0)

    def reads(self, stage: int) -> bool:
        """Return whether the stage reads tokens or labels from the data iterator."""
        return self.is_first(stage) or self.is_last(stage) or self.depth(stage) > 0

    def prev(self, stage: int) -> int | None:
        """Return the stage whose output this stage takes; None for the stage with the embedding."""
        if self.is_first(stage):
            return None
        return stage - 1

    def next(self, stage: int) -> int | None:
        """Return the stage that takes the output of this stage.

        Returns None at the end of the chain: at the loss, or at the last depth after it.
        """
        if self.position(stage) == self.chain - 1:
            return None
        return stage + 1

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank in ascending order.

        The index in this tuple is the number of the model chunk.
        """
        return tuple(s for s, r in enumerate(self.rank_of) if r == rank)

    def needed(self, stage: int, need: Need) -> tuple[int, ...]:
        """Return the stages that produce what `need` names, for a pass of `stage`.

        The result is () if the need does not apply to this stage.
        """
        # Such as the loss: a backward needs it at the last stage, not at the others.
        if need.at is not None and stage not in self.meant(stage, need.at):
            return ()
        return self.meant(stage, need.where)

    def meant(self, stage: int, where: Where) -> tuple[int, ...]:
        """Return the stages that `where` names for a pass of `stage`.

        For example, Where.PREV names the stage before `stage`.
        """
        first = stage - self.position(stage)
        if where is Where.SHARES:
            return self.shares(stage)
        # A depth of multi-token prediction embeds the next token and has a loss of its own.
        depths = range(first + self.main, first + self.chain)
        if where is Where.EMBEDS:
            return (first, *depths)
        if where is Where.LOSSES:
            return (first + self.main - 1, *depths)
        if where in (Where.PREV, Where.NEXT):
            other = self.prev(stage) if where is Where.PREV else self.next(stage)
            return () if other is None else (other,)
        if where in (Where.MICROBATCHES, Where.REPLICAS):
            return self.replicas(stage)
        if where is Where.RANK:
            return self.stages_on(self.rank_of[stage])
        if where is Where.EVERYWHERE:
            return tuple(range(self.num_stages))
        # OWN, STEP, RUN and the needs between slices stay on the stage.
        return (stage,)

    def shares(self, stage: int) -> tuple[int, ...]:
        """Return the stages that hold the shares of the vocabulary for one copy of the model.

        A share is an equal part of the rows of embedding and head. Each rank has one, on its first
        stage of the copy of the model that has `stage`. The stages are in ascending order. The
        result is () if the vocabulary is not shared over the ranks.
        """
        return self._shares[stage // self.chain]

    @cached_property
    def _shares(self) -> tuple[tuple[int, ...], ...]:
        if not self.vocabulary:
            return ((),) * self.num_chains
        # A rank has one share per chain, however many chunks: more shares would be more messages.
        found = []
        for start in range(0, self.num_stages, self.chain):
            first_of: dict[int, int] = {}
            for stage in range(start, start + self.main):
                first_of.setdefault(self.rank_of[stage], stage)
            found.append(tuple(sorted(first_of.values())))
        return tuple(found)

    def replicas(self, stage: int) -> tuple[int, ...]:
        """Return the stages with the same position, `stage` included: two in DualPipe, else one."""
        return tuple(range(self.position(stage), self.num_stages, self.chain))


def placement_problems(rank_of: Iterable[int], chain: int, ranks: int) -> Iterator[str]:
    """Yield a sentence for each reason why these arguments make no `Placement`.

    Args:
        rank_of: rank of each stage.
        chain: number of stages of one copy of the model.
        ranks: number of ranks.
    """
    # Gaps are an error: a rank without a stage has nothing to do, and its group waits for it.
    stages = list(rank_of)
    named = set(stages)
    # Compare the count first: a file may ask for any number of ranks, and a set of them all.
    if len(named) != ranks or named != set(range(ranks)):
        yield f"rank_of must name every rank from 0 to {ranks - 1} and no other, got {stages}"
    if chain < 1 or len(stages) % chain:
        yield f"chain {chain} must divide the number of stages, {len(stages)}"


def loop(ranks: int, chunks: int = 1) -> Placement:
    """Return the placement with stage s on rank s modulo `ranks`.

    Naive, GPipe, 1F1B, ZB-H1, ZB-H2 and the interleaved schedules have this placement.

    Args:
        chunks: stages on each rank.
    """
    return Placement(tuple(range(ranks)) * chunks, ranks * chunks)


def vee(ranks: int) -> Placement:
    """Return the placement V: two stages on each rank, numbered down the ranks and up again.

    Rank 0 has both ends of the model. ZB-V, V-Half, V-Min and DualPipeV use it.
    """
    return Placement((*range(ranks), *reversed(range(ranks))), 2 * ranks)


def wave(ranks: int, waves: int) -> Placement:
    """Return the V repeated `waves` times, for the schedule Hanayo.

    A V has two stages on each rank, numbered down the ranks and up again. The V begins and ends on
    rank 0.
    """
    return Placement((*range(ranks), *reversed(range(ranks))) * waves, 2 * ranks * waves)


def mirror(ranks: int) -> Placement:
    """Return the placement of two copies of the model in opposite directions: DualPipe and Chimera.

    The stages of one copy go down the ranks, and the stages of the other copy go up.
    """
    return Placement((*range(ranks), *reversed(range(ranks))), ranks)
