"""The vocabulary of every schedule: passes and tables.

A schedule is a table: for each rank the passes it runs, in order. On which rank a stage is, a
`placement.Placement` says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise, product
from typing import NamedTuple

from megapipe.notebook import shown_by
from megapipe.schedule.kinds import HANDED, OF_SLICES, Lane, Made, Need, Where
from megapipe.schedule.kinds import Kind as Kind
from megapipe.schedule.placement import Placement as Placement


class Pass(NamedTuple):
    """One pass of a table: one microbatch, or one slice of it, going through one stage once.

    A pass prints as stage, kind, microbatch: `2F0`, `1BW3`, and `2F0.1` for its slice 1. `of` is
    its label in pictures.

    Attributes:
        microbatch: number of the microbatch. For kinds with `traits.per_stage`, which run once per
            training step and stage, it is the number of the step.
        slice: number of the slice along the sequence, within the microbatch; None where
            microbatches are not cut.
    """

    kind: Kind
    stage: int
    microbatch: int
    slice: int | None = None

    @property
    def of(self) -> str:
        """Return the pass's label in pictures: "microbatch" or "microbatch.slice"."""
        if self.slice is None:
            return f"{self.microbatch}"
        return f"{self.microbatch}.{self.slice}"

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.of}"


Step = tuple[Pass, ...]
"""One pass, or a pair that runs overlapped: DualPipe's forward and backward, or any other two."""


class Link(NamedTuple):
    """The tensors that passes of one kind and stage take, and the ranks to which they send.

    Attributes:
        takes: the tensors from other stages, each as (result, stage that produced it).
        sends: the other ranks to which the result of these passes is sent.
    """

    takes: tuple[tuple[Made, int], ...]
    sends: tuple[int, ...]


Part = tuple[int, int, int]
"""(slice, first slice of its document, slice after the end of its document)."""


class Last(NamedTuple):
    """The last passes of a stage, by the number of their microbatch (or slice).

    Slices are numbered through all microbatches.

    Attributes:
        backward: number of the last backward.
        weights: number of the last pass that adds to the gradients of its weights.
    """

    backward: int
    weights: int


class Shared(NamedTuple):
    """A stream that several ranks share, such as copies through one PCIe switch.

    This is the stream of copies to the host, or the stream of copies back.

    Attributes:
        ranks: the ranks that share it.
        order: all its passes in the one order in which they run.
    """

    lane: Lane
    ranks: tuple[int, ...]
    order: tuple[Pass, ...]


@dataclass(frozen=True)
class Schedule:
    """A table of steps for each rank. Nothing in it depends on costs, torch or process groups.

    Methods iterate over its passes (`steps`, `passes`) and return changed tables (`map`,
    `without`). Others say how passes depend on each other (`needs`, `links`), and to which slice,
    document or chain a pass belongs.

    Attributes:
        num_microbatches: microbatches of one training step.
        ranks: the row of each rank: its steps in order. A step is one pass or an overlapped pair.
        training_steps: training steps in the table. Microbatches are numbered through all of them.
        cuts: lengths of the slices of a microbatch along the sequence, in tokens or any other unit;
            empty where microbatches are not cut.
        documents: slices that begin a document, other than slice 0: ((3,),) for documents of slices
            0 to 2 and of the rest. One row for each microbatch, or one row for all of them.
        shared: streams that several ranks share.
    """

    name: str
    placement: Placement
    num_microbatches: int
    ranks: tuple[tuple[Step, ...], ...]
    training_steps: int = 1
    cuts: tuple[float, ...] = ()
    documents: tuple[tuple[int, ...], ...] = ()
    shared: tuple[Shared, ...] = ()

    _repr_svg_ = shown_by("schedule.views.screen:picture")

    def __repr__(self) -> str:
        passes = sum(len(step) for step in self.steps())
        size = f"{len(self.ranks)} ranks, {self.num_microbatches} microbatches, {passes} passes"
        return f"Schedule({self.name!r}, {size})"

    def steps(self) -> Iterator[Step]:
        """Yield the steps of all ranks, rank by rank."""
        return chain.from_iterable(self.ranks)

    def passes(self) -> Iterator[Pass]:
        """Yield the passes of all ranks, rank by rank."""
        return chain.from_iterable(self.steps())

    def map(self, change: Callable[[Step], Iterable[Step]]) -> Schedule:
        """Return the table with each step replaced by the steps that `change` returns for it.

        Args:
            change: takes a step and returns the steps that replace it: none, one or several.
        """
        rows = (chain.from_iterable(map(change, row)) for row in self.ranks)
        return replace(self, ranks=tuple(map(tuple, rows)))

    def without(self, kinds: Collection[Kind]) -> Schedule:
        """Return the table without the passes of these kinds.

        Shared streams without a pass are removed from `shared`.
        """
        lanes = {kind.traits.lane for kind in self.kinds - set(kinds)}
        shared = tuple(x for x in self.shared if x.lane in lanes)
        # Pairs consist of F, B, W and BW, so the first pass of a step decides for all of it.
        kept = self.map(lambda step: () if step[0].kind in kinds else (step,))
        return replace(kept, shared=shared)

    @property
    def slices(self) -> Sequence[int | None]:
        """Return the indices of a microbatch's slices; (None,) where microbatches are not cut."""
        return range(len(self.cuts)) if self.cuts else (None,)

    def number(self, item: Pass) -> int:
        """Return the number of a pass's slice, counted through all microbatches.

        If microbatches are not cut, it is the number of the pass's microbatch.
        """
        # With 4 slices, slice 1 of microbatch 2 is number 9.
        if item.slice is None:
            return item.microbatch
        return item.microbatch * len(self.cuts) + item.slice

    def document(self, item: Pass) -> range:
        """Return the slices of the document to which a pass's slice belongs, within its microbatch.

        A slice attends to the keys and values of its own document only.
        """
        return self._documents[item.microbatch % len(self._documents)][item.slice or 0]

    def part(self, item: Pass) -> Part | None:
        """Return which part of its microbatch a pass computes; None for a whole microbatch.

        A part is (slice, first slice of its document, slice after the document's last): (1, 0, 3)
        for slice 1 in a document of slices 0 to 2.
        """
        if item.slice is None:
            return None
        document = self.document(item)
        return item.slice, document.start, document.stop

    @property
    def parts(self) -> set[Part]:
        """Return every value of `part` for the table's passes, but None.

        The result is empty if microbatches are not cut into slices.
        """
        return {
            (n, document.start, document.stop)
            for row in self._documents
            for n, document in enumerate(row)
        }

    @cached_property
    def _documents(self) -> list[list[range]]:
        """Return, for each row of `documents`, [slice]: the range of slices of its document."""
        # Five slices with documents that begin at 0 and 3:
        #
        #     slice      0       1       2     |  3       4
        #     document  0..2    0..2    0..2   | 3..4    3..4
        found = []
        for begins in self.documents or ((),):
            ends = pairwise((0, *begins, len(self.cuts)))
            found.append([range(a, b) for a, b in ends for _ in range(a, b)])
        return found

    @property
    def all_microbatches(self) -> int:
        """Return the number of microbatches of all training steps."""
        return self.num_microbatches * self.training_steps

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """Return the kinds of pass in the table."""
        return frozenset([item[0] for item in self.passes()])

    @property
    def streams(self) -> list[tuple[int, Lane]]:
        """Return (rank, stream) of the streams in use, rank by rank, the compute stream first.

        A stream that any rank uses is listed for all ranks. The compute stream is always listed.
        """
        there = {Lane.COMPUTE, *(kind.traits.lane for kind in self.kinds)}
        used = [lane for lane in Lane if lane in there]
        return [(rank, lane) for rank in range(len(self.ranks)) for lane in used]

    @cached_property
    def needs(self) -> dict[Kind, tuple[Need, ...]]:
        """Return {kind: the results that passes of this kind wait for} for the table's kinds.

        Needs that apply only to tables with other kinds are left out.
        """
        return {kind: tuple(filter(self._applies, kind.traits.needs)) for kind in self.kinds}

    def _applies(self, need: Need) -> bool:
        # An optional need applies if some pass of the table produces the result.
        there = not need.optional or any(need.made in kind.traits.makes for kind in self.kinds)
        # Rows of `kinds` are for all tables. Here a table leaves out what it has no passes for, so
        # that clock and verifier look at few needs of each pass.
        shared = need.where is not Where.SHARES or self.placement.vocabulary
        cut = need.where not in OF_SLICES or bool(self.cuts)
        return there and shared and cut and need.unless not in self.kinds

    @cached_property
    def links(self) -> dict[tuple[Kind, int], Link]:
        """Return {(kind, stage): which tensors such passes take, and to which ranks they send}.

        A result that no pass of the table takes is sent nowhere.
        """
        # By kind and stage and not by pass: all microbatches of a stage go the same way.
        place = self.placement
        there = {item[:2] for item in self.passes()}
        # An evaluation has no passes of depths, whose loss other passes then do not wait for.
        here = {stage for _, stage in there}
        takes: dict[tuple[Kind, int], tuple[tuple[Made, int], ...]] = {}
        for stage, (kind, needs) in product(range(place.num_stages), self.needs.items()):
            if (kind, stage) not in there:
                continue
            taken: list[tuple[Made, int]] = []
            for need in needs:
                # All other needs are met on the rank itself, or by collectives.
                if need.where in HANDED:
                    makers = place.needed(stage, need)
                    taken += [(need.made, x) for x in makers if x in here or not need.optional]
            takes[kind, stage] = tuple(taken)
        # A dict as an ordered set: a rank receives a result once, in the order of its first taker.
        takers: dict[tuple[Made, int], dict[int, None]] = {}
        for (_, stage), results in takes.items():
            for result in results:
                if place.rank_of[stage] != place.rank_of[result[1]]:
                    takers.setdefault(result, {})[place.rank_of[stage]] = None
        links = {}
        for (kind, stage), results in takes.items():
            # Only the first result of a kind leaves its rank: keys and values, say, stay.
            sends = takers.get((kind.traits.makes[0], stage), ())
            links[kind, stage] = Link(results, tuple(sends))
        return links

    @cached_property
    def last(self) -> dict[int, Last]:
        """Return {stage: its last backward and its last pass with weight gradients}.

        Stages without a backward are left out. Microbatches may be in any order.
        """
        backward: dict[int, int] = {}
        weights: dict[int, int] = {}
        # Rows are in order, so a later pass of a stage replaces an earlier one.
        for item in self.passes():
            if item.kind.is_backward:
                backward[item.stage] = self.number(item)
            if Made.WEIGHT_GRADIENT in item.kind.traits.makes:
                weights[item.stage] = self.number(item)
        return {stage: Last(backward[stage], weights[stage]) for stage in backward}

    def chain_of(self, microbatch: int) -> int:
        """Return the number of the chain that a microbatch runs through.

        A chain is the sequence of stages of one copy of the model; DualPipe has two. Each chain
        carries an equal number of consecutive microbatches of a training step.
        """
        # DualPipe with 8 microbatches: 0 to 3 run through chain 0, 4 to 7 through chain 1.
        of_step = microbatch % self.num_microbatches
        return of_step * self.placement.num_chains // self.num_microbatches


def unpaired(schedule: Schedule) -> Schedule:
    """Return the table with the two passes of each overlapped pair one after the other."""
    return schedule.map(lambda step: ((x,) for x in step))


def with_steps(row: Sequence[Step], after: Mapping[int, Sequence[Step]]) -> tuple[Step, ...]:
    """Return a rank's row with further steps in it.

    Args:
        after: {index of a step: the steps to put after it}. Index -1 is the start of the row.
    """
    steps = [*after.get(-1, ())]
    for i, step in enumerate(row):
        steps += [step, *after.get(i, ())]
    return tuple(steps)


def repeated(schedule: Schedule, training_steps: int) -> Schedule:
    """Return a table of one training step repeated, with no barrier between the steps.

    Args:
        training_steps: number of training steps of the returned table.
    """
    m = schedule.num_microbatches

    # G, U, A and V are numbered by training steps, all other passes by microbatches.
    def later(step: Step, n: int) -> Step:
        moved = []
        for item in step:
            each = 1 if item.kind.traits.per_stage else m
            moved.append(item._replace(microbatch=item.microbatch + n * each))
        return tuple(moved)

    rows = []
    for row in schedule.ranks:
        rows.append(tuple(later(step, n) for n in range(training_steps) for step in row))
    shared = []
    for lane in schedule.shared:
        order = chain.from_iterable(later(lane.order, n) for n in range(training_steps))
        shared.append(lane._replace(order=tuple(order)))
    return replace(schedule, ranks=tuple(rows), training_steps=training_steps, shared=tuple(shared))


def overlaps(step: Step) -> bool:
    """Return whether a step is a forward and a backward that run overlapped."""
    return len(step) == 2 and step[0].kind.is_forward and step[1].kind.is_backward
