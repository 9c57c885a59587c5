"""The words of every schedule: passes, placements, tables.

A schedule is a table: for each rank the passes it runs, in order. Where a stage lives is a Placement; the two are
independent, so loop, V and DualPipe's mirror are three one-line placements under the same machinery.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

from megapipe.schedule.kinds import HANDED, OF_SLICES, Lane, Made, Need, Where
from megapipe.schedule.kinds import Kind as Kind


class Pass(NamedTuple):
    """One microbatch through one stage, or a slice of it. Prints as stage, kind, microbatch: `2F0`, `1BW3`, `2F0.1`.

    A pass of a stage as a whole (`kind.traits.per_stage`) has the number of its step in place of a microbatch's.
    """

    kind: Kind
    stage: int
    microbatch: int
    slice: int | None = None

    @property
    def of(self) -> str:
        """The microbatch and the slice, in pictures."""
        return f"{self.microbatch}" if self.slice is None else f"{self.microbatch}.{self.slice}"

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.of}"


Step = tuple[Pass, ...]
"""One pass, or two run together: DualPipe's overlapped pair of a forward and a backward, or any other two."""


@dataclass(frozen=True)
class Placement:
    """A placement of stages on ranks.

    Attributes:
        rank_of: rank of each stage.
        chain: stages from one end of the model to the other. Stage s holds the model's slice s % chain; DualPipe has
            two chains (its stages s and s + chain are replicas on mirrored ranks), everything else one.
        vocabulary: every rank has an equal share of the rows of embedding and head, for each chain that it is part of.
        depths: the last so many slices are no part of the model's own chain, which ends before them with the loss, but
            a side chain: depths of multi-token prediction, the first of which takes the output of the stage with the
            loss, each further one that of the depth before. Any rank may have any of them.
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
        """Slices of the model's own chain, from the embedding to the loss."""
        return self.chain - self.depths

    @property
    def own_chain(self) -> Placement:
        """The placement without depths."""
        rank_of: list[int] = []
        for first in range(0, self.num_stages, self.chain):
            rank_of += self.rank_of[first : first + self.main]
        return replace(self, rank_of=tuple(rank_of), chain=self.main, depths=0)

    def with_depths(self, ranks: Sequence[int]) -> Placement:
        """Return the placement with depths of multi-token prediction on these ranks, after each chain."""
        mirrored = [self.num_ranks - 1 - rank for rank in ranks]
        rank_of: list[int] = []
        for first in range(0, self.num_stages, self.chain):
            rank_of += self.rank_of[first : first + self.chain]
            rank_of += mirrored if first else ranks
        return replace(self, rank_of=tuple(rank_of), chain=self.chain + len(ranks), depths=len(ranks))

    def position(self, stage: int) -> int:
        """The slice of the model that this stage holds, 0..chain-1."""
        return stage % self.chain

    def is_first(self, stage: int) -> bool:
        """Does the stage hold the embedding?"""
        return self.position(stage) == 0

    def is_last(self, stage: int) -> bool:
        """Does the stage hold the loss of the model's own chain?"""
        return self.position(stage) == self.main - 1

    def depth(self, stage: int) -> int:
        """The depth of multi-token prediction that the stage is, from 1; 0 for none."""
        return max(self.position(stage) - self.main + 1, 0)

    def reads(self, stage: int) -> bool:
        """Does the stage look at tokens or labels?"""
        return self.is_first(stage) or self.is_last(stage) or self.depth(stage) > 0

    def prev(self, stage: int) -> int | None:
        """The stage whose output this one takes, None at the embedding."""
        return None if self.is_first(stage) else stage - 1

    def next(self, stage: int) -> int | None:
        """The stage that takes this one's output, None at the end: at the loss, or at the last depth behind it."""
        return None if self.position(stage) == self.chain - 1 else stage + 1

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """Stages of a rank in ascending order; its model chunks are numbered in this order."""
        return tuple(s for s, r in enumerate(self.rank_of) if r == rank)

    def needed(self, stage: int, need: Need) -> tuple[int, ...]:
        """The stages whose results a pass of `stage` needs."""
        there = need.at is None or stage in self.meant(stage, need.at)
        return self.meant(stage, need.where) if there else ()

    def meant(self, stage: int, where: Where) -> tuple[int, ...]:
        """The stages that the word means, said of `stage`."""
        first = stage - self.position(stage)
        if where is Where.SHARES:
            return self.shares(stage)
        if where in (Where.EMBEDS, Where.LOSSES):
            end = first if where is Where.EMBEDS else first + self.main - 1
            return (end, *range(first + self.main, first + self.chain))
        if where in (Where.PREV, Where.NEXT):
            other = self.prev(stage) if where is Where.PREV else self.next(stage)
            return () if other is None else (other,)
        if where in (Where.MICROBATCHES, Where.REPLICAS):
            return self.replicas(stage)
        if where is Where.RANK:
            return self.stages_on(self.rank_of[stage])
        return tuple(range(self.num_stages)) if where is Where.EVERYWHERE else (stage,)

    def shares(self, stage: int) -> tuple[int, ...]:
        """The stage of each rank that has its share of the vocabulary, the first that it has of the model's own chain
        of `stage`, in ascending order; none where the ends of the model have the whole vocabulary."""
        return self._shares[stage // self.chain]

    @cached_property
    def _shares(self) -> tuple[tuple[int, ...], ...]:
        chains = [range(first, first + self.main) for first in range(0, self.num_stages, self.chain)]
        return tuple(
            tuple(sorted({self.rank_of[s]: s for s in reversed(chain)}.values())) if self.vocabulary else ()
            for chain in chains
        )

    def replicas(self, stage: int) -> tuple[int, ...]:
        """The stages that hold the same slice of the model, this one among them: two in DualPipe, else one."""
        return tuple(range(self.position(stage), self.num_stages, self.chain))


class Link(NamedTuple):
    """Links of the passes of a kind and stage: what they take, by what it is and who made it, and the other ranks to
    which what they make is sent."""

    takes: tuple[tuple[Made, int], ...]
    sends: tuple[int, ...]


Part = tuple[int, int, int]
"""A slice of a microbatch, the one with which its document begins, and the one behind its document."""


class Last(NamedTuple):
    """The last microbatches, or slices of all, in the row of a stage: of its backwards, and of the passes that add into
    the gradients of its weights."""

    backward: int
    weights: int


class Shared(NamedTuple):
    """A lane that several ranks share, such as that of the switch before their devices: all its passes, in the one
    order in which they run."""

    lane: Lane
    ranks: tuple[int, ...]
    order: tuple[Pass, ...]


@dataclass(frozen=True)
class Schedule:
    """A table of steps for each rank. Nothing in it depends on costs, torch or process groups.

    Attributes:
        num_microbatches: of one training step.
        training_steps: how many of them follow each other in the table; microbatches are numbered on.
        cuts: lengths of the slices of a microbatch along the sequence, in tokens or any other unit; () leaves it whole.
        documents: of each microbatch, or once for all of them, the slices behind the first that begin a document and so
            need nothing of those before them.
        shared: lanes that several ranks have together.
    """

    name: str
    placement: Placement
    num_microbatches: int
    ranks: tuple[tuple[Step, ...], ...]
    training_steps: int = 1
    cuts: tuple[float, ...] = ()
    documents: tuple[tuple[int, ...], ...] = ()
    shared: tuple[Shared, ...] = ()

    def __repr__(self) -> str:
        passes = sum(len(step) for step in self.steps())
        return (
            f"Schedule({self.name!r}, {len(self.ranks)} ranks, {self.num_microbatches} microbatches, {passes} passes)"
        )

    def steps(self) -> Iterator[Step]:
        """Yield the steps of all ranks, rank by rank."""
        return chain.from_iterable(self.ranks)

    def passes(self) -> Iterator[Pass]:
        """Yield the passes of all ranks, rank by rank."""
        return chain.from_iterable(self.steps())

    def map(self, change: Callable[[Step], Iterable[Step]]) -> Schedule:
        """Return the table with other steps, any number, in the place of each."""
        rows = (chain.from_iterable(map(change, row)) for row in self.ranks)
        return replace(self, ranks=tuple(map(tuple, rows)))

    def without(self, kinds: Collection[Kind]) -> Schedule:
        """Return the table without the passes of these kinds, whose lanes are then of no rank."""
        lanes = {kind.traits.lane for kind in self.kinds - set(kinds)}
        shared = tuple(x for x in self.shared if x.lane in lanes)
        return replace(self.map(lambda step: () if step[0].kind in kinds else (step,)), shared=shared)

    @property
    def slices(self) -> Sequence[int | None]:
        """The slices of a microbatch; of one that is whole, None alone."""
        return range(len(self.cuts)) if self.cuts else (None,)

    def number(self, item: Pass) -> int:
        """The place of its slice among all slices of all microbatches; the number of a microbatch that is whole."""
        return item.microbatch if item.slice is None else item.microbatch * len(self.cuts) + item.slice

    def document(self, item: Pass) -> range:
        """The slices of its document, the only ones that a slice shares keys and values with."""
        return self._documents[item.microbatch % len(self._documents)][item.slice or 0]

    def part(self, item: Pass) -> Part | None:
        """The part of its microbatch that a pass is of; None of whole ones."""
        return None if item.slice is None else (item.slice, (own := self.document(item)).start, own.stop)

    @property
    def parts(self) -> set[Part]:
        """All parts of its microbatches."""
        return {(n, document.start, document.stop) for row in self._documents for n, document in enumerate(row)}

    @cached_property
    def _documents(self) -> list[list[range]]:
        rows = [(0, *begins, len(self.cuts)) for begins in self.documents or ((),)]
        return [[range(a, b) for a, b in pairwise(row) for _ in range(a, b)] for row in rows]

    @property
    def all_microbatches(self) -> int:
        """Microbatches of all training steps together."""
        return self.num_microbatches * self.training_steps

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """Kinds of pass that are in the table."""
        return frozenset([item[0] for item in self.passes()])

    @cached_property
    def needs(self) -> dict[Kind, tuple[Need, ...]]:
        """The needs of each kind in the table, as far as they apply to it."""
        return {kind: tuple(filter(self._applies, kind.traits.needs)) for kind in self.kinds}

    def _applies(self, need: Need) -> bool:
        there = not need.optional or any(need.made in kind.traits.makes for kind in self.kinds)
        shared = need.where is not Where.SHARES or self.placement.vocabulary
        cut = need.where not in OF_SLICES or bool(self.cuts)
        return there and shared and cut and need.unless not in self.kinds

    @cached_property
    def links(self) -> dict[tuple[Kind, int], Link]:
        """Links by kind and stage of the table's passes; a result that none of these takes goes nowhere."""
        place, there = self.placement, {item[:2] for item in self.passes()}
        here = {stage for _, stage in there}
        takes = {
            (kind, stage): tuple(
                (need.made, x)
                for need in needs
                if need.where in HANDED
                for x in place.needed(stage, need)
                if x in here or not need.optional
            )
            for stage in range(place.num_stages)
            for kind, needs in self.needs.items()
            if (kind, stage) in there
        }
        takers: dict[tuple[Made, int], dict[int, None]] = {}
        for (_, stage), taken in takes.items():
            for one in taken:
                if place.rank_of[stage] != place.rank_of[one[1]]:
                    takers.setdefault(one, {})[place.rank_of[stage]] = None
        return {key: Link(takes[key], tuple(takers.get((key[0].traits.makes[0], key[1]), ()))) for key in takes}

    @cached_property
    def last(self) -> dict[int, Last]:
        """The last microbatches by stage, of stages that have one. Rows may have their microbatches in any order."""
        passes = [*self.passes()]
        backward = {x.stage: self.number(x) for x in passes if x.kind.is_backward}
        weights = {x.stage: self.number(x) for x in passes if Made.WEIGHT_GRADIENT in x.kind.traits.makes}
        return {stage: Last(backward[stage], weights[stage]) for stage in backward}

    def chain_of(self, microbatch: int) -> int:
        """The chain a microbatch runs through: each chain carries an equal run of a step's consecutive microbatches."""
        return microbatch % self.num_microbatches * self.placement.num_chains // self.num_microbatches


def unpaired(schedule: Schedule, keep: Callable[[Step], bool] = lambda step: False) -> Schedule:
    """A table with the two passes of every pair one after the other, but for those pairs that are kept."""
    return schedule.map(lambda step: (step,) if keep(step) else ((x,) for x in step))


def repeated(schedule: Schedule, training_steps: int) -> Schedule:
    """Return the table of one step several times in a row, where no rank waits for the end of the others."""
    m = schedule.num_microbatches

    def later(step: Step, n: int) -> Step:
        return tuple(x._replace(microbatch=x.microbatch + n * (1 if x.kind.traits.per_stage else m)) for x in step)

    rows = tuple(tuple(later(step, n) for n in range(training_steps) for step in row) for row in schedule.ranks)
    lanes = [(lane, [x for n in range(training_steps) for x in later(lane.order, n)]) for lane in schedule.shared]
    shared = tuple(lane._replace(order=tuple(order)) for lane, order in lanes)
    return replace(schedule, ranks=rows, training_steps=training_steps, shared=shared)


def overlaps(step: Step) -> bool:
    """Is it a forward and a backward run together?"""
    return len(step) == 2 and step[0].kind.is_forward and step[1].kind.is_backward
