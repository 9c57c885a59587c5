"""A recipe says how a table is made. Only this file knows the order of the transforms.

    order -> slices -> pairs -> depths and vocabulary -> offload and sharding -> step -> replicas

Pairs come before the later parts because they consist of F, B, W and BW. A pair may also have the
pass of a depth of multi-token prediction, so with depths the pairs come after the depths. Offload
and sharding are chosen together, because both use the same memory. "step" adds G, U, A and V,
"replicas" adds P. Flags, commands, searches, growing batches and rescheduling make recipes. Nothing
else calls a transform.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import inf
from typing import Any

from megapipe.errors import ScheduleError
from megapipe.schedule.catalogue import build, entry_of, is_file
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.families.offload.asked import Offload
from megapipe.schedule.families.offload.copies import copied
from megapipe.schedule.families.offload.rules import MOVES
from megapipe.schedule.families.offload.solve import solve
from megapipe.schedule.families.replicas import with_replicas
from megapipe.schedule.families.sharding.asked import Sharding
from megapipe.schedule.families.sharding.runs import SHARDS
from megapipe.schedule.families.sharding.sharded import (
    sharded_within,
    whole_at_most,
    with_sharded_weights,
)
from megapipe.schedule.families.step.asked import NO_STEP, StepPasses
from megapipe.schedule.families.vocabulary.shares import all_shared, with_vocabulary
from megapipe.schedule.ingredients import EXCLUDED, CostModel, FixedCosts, Pairing, Refused, Search
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Schedule, unpaired
from megapipe.schedule.patterns import SLICED, check_size
from megapipe.schedule.search.offloaded import searched
from megapipe.schedule.shapes.depths import with_depths
from megapipe.schedule.shapes.pairs.pairs import pairs
from megapipe.schedule.shapes.slices.slices import Documents, in_place, slices
from megapipe.schedule.simulate import simulate
from megapipe.schedule.text import load

_PLAIN = frozenset({Kind.F, Kind.B, Kind.W, Kind.BW})


@dataclass(frozen=True)
class Built:
    """A finished table, with the tables from which it was made step by step.

    Attributes:
        recipe: the recipe of the table.
        table: the result.
        plain: the table before passes of offload and sharding were added.
        chain: the table before multi-token prediction and a shared vocabulary were added.
    """

    recipe: Recipe
    table: Schedule
    plain: Schedule
    chain: Schedule


@dataclass(frozen=True)
class Recipe:
    """The settings from which a table of passes is made, in the order in which they are applied.

    `build` makes the table. A plan computes new costs in between, so it calls `chain`,
    `with_pairs`, `with_ends` and `finish` in turn. `terms` gives them the costs and memory limits.
    `whole` also adds passes of the whole step. `problems` yields contradictions.

    Attributes:
        order: a name of the catalogue, a .json or .csv file, or FILE.py:NAME of a function.
        ranks, microbatches: the size of the table.
        chunks: stages on each rank, where the order leaves a choice.
        options: further arguments of the generator.
        fitted: costs used to put W where a rank would wait; None for the papers' tables.
        table: the order itself if it exists already; `order` is then only its name.
        search: settings of the search, for an order that is searched.
        cuts: lengths of the slices of a microbatch; () for no slices.
        documents: slices that begin a document, as in `Schedule.documents`.
        room_of_slices: limit on a rank's activation; up to it, forwards of slices may come early.
        pairs: True keeps the order's overlapped pairs of passes, False separates them, a Pairing
            chooses new ones.
        depths: the rank of each module of multi-token prediction.
        vocabulary: each rank holds an equal share of the rows of embedding and head.
        offload, sharding, step: the settings of these families; None or NO_STEP adds no passes.
        replicas: each stage's state is copied to a peer once a step.
        lenient: if nothing fits the memory limit, make the table that needs least. The caller then
            reports it.
    """

    order: str
    ranks: int = 1
    microbatches: int = 1
    chunks: int | None = None
    options: tuple[tuple[str, Any], ...] = ()
    fitted: Costs | None = None
    table: Schedule | None = None
    search: Search | None = None
    cuts: tuple[float, ...] = ()
    documents: Documents = ()
    room_of_slices: float | None = None
    pairs: bool | Pairing = True
    depths: tuple[int, ...] = ()
    vocabulary: bool = False
    offload: Offload | None = None
    sharding: Sharding | None = None
    step: StepPasses = NO_STEP
    replicas: bool = False
    lenient: bool = False

    def problems(self, flags: Mapping[str, str]) -> Iterator[str]:
        """Yield a sentence for every two fields of the recipe that exclude each other.

        Args:
            flags: {field of this class: the flag that the sentence names}.
        """
        asked = {
            "cuts": bool(self.cuts),
            "pairs": isinstance(self.pairs, Pairing),
            "depths": bool(self.depths),
            "vocabulary": self.vocabulary,
            "sharding": self.sharding is not None,
            # Shards of gradients alone leave the gather of updated weights to the step.
            "step": self.step.reduce
            or (self.step.gather and self.sharding is not None and self.sharding.weights),
        }
        for first, second, why in EXCLUDED:
            if asked[first] and asked[second]:
                yield why.format(flags.get(first, first), flags.get(second, second))

    def build(self, terms: CostModel) -> Built:
        """Return the table of all fields but `step` and `replicas`; `around` adds their passes.

        `terms` gives the costs and memory limits of each table on the way.

        Raises: Refused, which names the field, or ScheduleError for the order itself.
        """
        chain = self.with_pairs(self.chain(terms), terms)
        return self.finish(self.with_ends(chain, terms), terms, chain)

    def whole(self, costs: Costs = UNIT, memory: float | None = None) -> Schedule:
        """Return the table of all fields, including `step` and `replicas`, under fixed costs.

        `memory` limits a rank's activation; None for no limit. Errors are as in `build`.
        """
        recipe = self
        # A search without settings has the catalogue's, and searches under these costs.
        named = not (self.table or self.search or self.cuts or is_file(self.order))
        if named and entry_of(self.order).searched:
            given = {"chunks": self.chunks, "costs": costs, "memory": memory, **dict(self.options)}
            recipe = replace(self, table=build(self.order, self.ranks, self.microbatches, **given))
        built = recipe.build(FixedCosts(costs, memory, len(self.depths)))
        return self.around(built.table, costs)

    def around(self, table: Schedule, costs: Costs = UNIT) -> Schedule:
        """Return `table` with the passes that run once per step, by `step` and `replicas`."""
        table = self.step.around(table, costs)
        return with_replicas(table) if self.replicas else table

    def chain(self, terms: CostModel) -> Schedule:
        """Return the table that `order` names, of the main model's forwards and backwards alone.

        It keeps the order's own overlapped pairs of passes, unless `pairs` is False. A plan splits
        the layers by this table, and chooses other pairs under the costs of that split.
        """
        table = self._ordered(terms)
        return unpaired(table) if self.pairs is False else table

    def with_pairs(self, chain: Schedule, terms: CostModel) -> Schedule:
        """Return the table `chain` with overlapped pairs, if `pairs` says to choose them.

        With multi-token prediction `finish` chooses the pairs instead.
        """
        return chain if self.depths else self._paired(chain, terms)

    def with_ends(self, chain: Schedule, terms: CostModel) -> Schedule:
        """Return `chain`, a result of `with_pairs`, with passes for `depths` and `vocabulary`."""
        if not (self.depths or self.vocabulary):
            return chain
        place = replace(chain.placement.with_depths(self.depths), vocabulary=self.vocabulary)
        # Costs name each stage, depths too, so ask for the costs of the new placement.
        costs = self.linked(terms.costs(replace(chain, placement=place)))
        with _naming("vocabulary" if self.vocabulary else "depths"):
            if not self.depths:
                return with_vocabulary(chain, costs)
            shared = all_shared if self.vocabulary else None
            return with_depths(chain, self.depths, costs, shared=shared)

    def finish(self, table: Schedule, terms: CostModel, chain: Schedule | None = None) -> Built:
        """Return the finished table: with offload, sharding, and pairs if there are `depths`.

        Args:
            table: the table that `with_ends` returned.
            chain: the table of `with_pairs`, to keep as `Built.chain`; None keeps `table` there.
        """
        plain = self._paired(table, terms) if self.depths else table
        costs = terms.costs(plain)
        room = terms.room(plain)
        asked, made = self.offload, plain
        tables = [plain]
        if asked is not None and asked.other:
            tables = [self.with_ends(other, terms) for other in asked.other]
        # A table from a file may have its own gathers and reductions.
        if self.sharding is not None and plain.kinds.isdisjoint(SHARDS):
            made = self._sharded(self.sharding, tables, costs, room)
        elif self.sharding is None and asked is not None:
            made = self._moved(asked, tables, costs, room)
        return Built(self, made, plain, chain or table)

    def _ordered(self, terms: CostModel) -> Schedule:
        """Return the table of the order, with microbatches cut into slices if `cuts` are given."""
        if self.table is not None:
            return self.table
        if self.search is not None:
            return self._searched(self.search, terms)
        if is_file(self.order):
            if self.cuts:
                return in_place(load(self.order), self.cuts, self.documents)
            return build(self.order, self.ranks, self.microbatches)
        made_for = self._generated
        if not self.cuts:
            return made_for(self.microbatches)
        # TeraPipe, Seq1F1B and SlimPipe have slices already; only their lengths are replaced.
        if self.order.lower() in SLICED:
            return replace(made_for(self.microbatches), cuts=self.cuts)
        limits: dict[str, Any] = {"memory": self.room_of_slices, "documents": self.documents}
        try:
            return slices(made_for, self.microbatches, self.cuts, self.fitted or UNIT, **limits)
        except ScheduleError as error:
            # The generator names its own count, so say what the user asked for.
            count = self.microbatches * len(self.cuts)
            if f"got {count}" not in str(error):
                raise
            raise ScheduleError(
                f"{error} (its {self.microbatches} microbatches are {count} in slices)"
            ) from None

    def _generated(self, microbatches: int) -> Schedule:
        size = self.ranks, microbatches, self.chunks
        # A user's function may return another table on each call, so it is not cached.
        if ":" in self.order:
            return _built.__wrapped__(self.order, *size, self.options, self.fitted)
        return _built(self.order, *size, self.options, self.fitted)

    def _searched(self, search: Search, terms: CostModel) -> Schedule:
        """Return the best table that a search finds on any of the placements of its settings."""
        # Only a search takes the time to import it.
        from megapipe.schedule.core.sliced_search import fastest_slices
        from megapipe.schedule.search.auto import CandidatePlacement, limits, search_among

        check_size(self.order, self.ranks, self.microbatches, 1)
        candidates = []
        for place in search.placements:
            rows = ((),) * place.num_ranks
            empty = Schedule(self.order, place, self.microbatches, rows, cuts=self.cuts)
            costs = terms.costs(empty)
            most = limits(place, costs, self._left(empty, costs, terms))
            candidates.append(CandidatePlacement(place, costs, most))
        chosen: dict[str, Any] = {
            "effort": search.effort,
            "progress": search.progress,
        }
        if self.cuts:
            return fastest_slices(
                candidates, self.microbatches, self.cuts, documents=self.documents, **chosen
            )
        chosen |= {"objective": search.objective, "seconds": search.seconds}
        return search_among(candidates, self.microbatches, **chosen).schedule

    def _left(self, table: Schedule, costs: Costs, terms: CostModel) -> tuple[float, ...] | None:
        """Return the memory that each rank has for activations; None for no limit.

        The least memory that gathered weights and full gradients need is already subtracted.
        """
        room = terms.room(table)
        if room is None or self.sharding is None:
            return room
        least = whole_at_most(table, costs, self.sharding.shortest)
        return tuple(most - held for most, held in zip(room, least, strict=True))

    def linked(self, costs: Costs) -> Costs:
        """Return the costs with the communication that `pairs` assumes in F and B, if any."""
        return self.pairs.linked(costs) if isinstance(self.pairs, Pairing) else costs

    def _paired(self, table: Schedule, terms: CostModel) -> Schedule:
        if not isinstance(self.pairs, Pairing):
            return table
        room = terms.room(table)
        costs = self.linked(terms.costs(table))
        with _naming("pairs"):
            return pairs(table, costs, memory=min(room) if room else None, split=self.pairs.split)

    def _sharded(
        self,
        asked: Sharding,
        tables: Sequence[Schedule],
        costs: Costs,
        room: tuple[float, ...] | None,
    ) -> Schedule:
        """Return the fastest of the tables with the sharding `asked`, within the memory `room`.

        If gathered weights leave too little memory, activations are offloaded or recomputed.
        """
        start, *_ = tables
        moved = None
        if self.offload is not None and self.offload.when == "all":
            start = self._moved(self.offload, tables, costs, None)
        elif self.offload is not None:
            moved = partial(_fitted, self.offload, tables, costs)
        with _naming("sharding"):
            if asked.living is not None:
                return with_sharded_weights(start, costs, asked.living)
            smallest = with_sharded_weights(start, costs, asked.shortest)
            limits = (inf,) * len(start.ranks) if room is None else room
            try:
                return sharded_within(start, costs, limits, gathers=asked.weights, moved=moved)
            except ScheduleError:
                if not self.lenient:
                    raise
                return smallest

    def _moved(
        self,
        asked: Offload,
        tables: Sequence[Schedule],
        costs: Costs,
        room: tuple[float, ...] | None,
    ) -> Schedule:
        """Return the first table, or the fastest for "fits", with the offload `asked`."""
        plain, *_ = tables
        if asked.when == "needed":
            if room is None or plain.kinds & MOVES:
                return plain
            return _where_needed(asked, plain, costs, room)
        if asked.when == "fits" and room is not None:
            with suppress(ScheduleError) if self.lenient else _naming("offload"):
                return _fitted(asked, tables, costs, room)
        with _naming("offload"):
            return copied(plain, costs, asked.chunks, asked.switch)


@lru_cache(maxsize=16)
def _built(
    order: str,
    ranks: int,
    microbatches: int,
    chunks: int | None,
    options: tuple[tuple[str, Any], ...],
    costs: Costs | None,
) -> Schedule:
    """Return a verified table, cached: a launch makes the same one repeatedly."""
    return build(order, ranks, microbatches, chunks=chunks, costs=costs, **dict(options))


def _fitted(
    asked: Offload, tables: Sequence[Schedule], costs: Costs, room: float | tuple[float, ...]
) -> Schedule:
    """Return the fastest of the tables with the offload `asked`, within the memory `room`."""
    return solve(tables, costs, room, tries=asked.tries, most=asked.most).schedule


def _where_needed(
    asked: Offload, plain: Schedule, costs: Costs, room: tuple[float, ...]
) -> Schedule:
    """Return `plain` if it fits `room` or no table does, else the fastest that fits with offload.

    With `asked.any_order`, a table more than 1% faster also replaces a `plain` that fits.
    """
    time = simulate(plain, costs)
    tight = any(held > most for held, most in zip(time.peak, room, strict=True))
    if min(room) <= 0 or not (asked.any_order or tight):
        return plain
    tables = [plain]
    if asked.any_order and plain.kinds <= _PLAIN and not (plain.placement.depths or plain.cuts):
        place = plain.placement
        tables += searched(place.num_ranks, plain.num_microbatches, costs, room, place=place)
    try:
        found = replace(solve(tables, costs, room, tries=asked.tries).schedule, name=plain.name)
    except ScheduleError:
        return plain
    # Costs are estimates, so a gain of 1% does not justify offloading.
    if tight or simulate(found, costs).makespan < 0.99 * time.makespan:
        return found
    return plain


@contextmanager
def _naming(part: str) -> Iterator[None]:
    """Turn a ScheduleError within the block into a Refused with the recipe's field `part`."""
    try:
        yield
    except ScheduleError as error:
        raise Refused(part, error) from None
