"""A plan: which stages with which layers are on which ranks, and what that is predicted to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add
from statistics import fmean

from megapipe.partition.spans import LayerSpan, spans
from megapipe.plan.families.offload import FLOPS_PER_BYTE, Copies
from megapipe.plan.families.sharding import Sharding, own_of
from megapipe.plan.graphs import held
from megapipe.plan.work import Pieces, Work
from megapipe.schedule import Costs, Placement, Schedule, Timeline, simulate
from megapipe.schedule.recipe import Recipe


@dataclass(frozen=True)
class Plan:
    """The division of work over the ranks, and the prediction of what it takes.

    Attributes:
        counts: layers at each position of the chain.
        pieces: what embedding, layers and head cost.
        state: bytes of a parameter with its gradient and optimizer state; replica: without the latter.
        kept: bytes of a parameter with optimizer state that post-validation keeps until V.
        gradient: bytes of a parameter's gradient, which is not saved.
        tied: the output head repeats the word embedding's weight, of `vocab_weights` elements.
        tp: ranks that share each parameter.
        expert_ranks: those that share the experts; of_expert: bytes of a parameter of theirs, state and kept.
        copies: of activations to the host.
        sharding: of gradients, and of weights, over data parallel between runs of passes.
        graphs: bytes of a microbatch's hidden states where CUDA graphs have their passes; else 0.
        before: what an automatic split replaced: the even one, or with a shared vocabulary the other way to place it.
        given: what passes and messages take, of --pipeline-costs.
        recipe: how the table was made.
    """

    schedule: Schedule
    counts: tuple[int, ...]
    pieces: Pieces
    state: float
    replica: float
    tied: bool
    vocab_weights: int
    tp: int
    before: Plan | None = None
    given: Costs | None = None
    kept: float = 0.0
    gradient: float = 4.0
    expert_ranks: int = 1
    of_expert: float = 0.0
    copies: Copies | None = None
    sharding: Sharding | None = None
    graphs: float = 0.0
    recipe: Recipe | None = None

    @cached_property
    def spans(self) -> tuple[LayerSpan, ...]:
        """The layers of each stage."""
        return spans(self.counts, self.schedule.placement)

    @cached_property
    def works(self) -> tuple[Work, ...]:
        """The work of each stage."""
        return tuple(map(self.pieces.stage, self.spans))

    @property
    def costs(self) -> Costs:
        """The costs of the stages: times as given, else by FLOPs; memory in bytes."""
        timed = counted = self.pieces.costs(self.counts)
        if self.given is not None:
            given = self.given.of_positions(len(self.counts) + len(self.pieces.depths))
            timed = replace(given, mem_b=counted.mem_b, mem_w=counted.mem_w, mem_s=counted.mem_s, mem_o=counted.mem_o)
        timed = self.pieces.of_slices(timed, self.counts) if self.schedule.cuts else timed
        timed = self.copies.priced(timed, self._copied_byte(counted, timed)) if self.copies else timed
        if self.sharding:
            own, lends = self._own_works
            stages = own_of(own, tp=self.tp, expert_ranks=self.expert_ranks)
            lighter = [work.lighter for work in own]
            timed = self.sharding.priced(timed, *stages, sum(_tuple(counted.f)), lighter=lighter, lends=lends)
        return timed

    def _copied_byte(self, counted: Costs, timed: Costs) -> float:
        """The time of a byte to the host, in the unit of the given times: ranks share FLOPs over tp, and not a copy."""
        each = FLOPS_PER_BYTE * self.tp
        given, flops = (sum(fmean(_tuple(x)) for x in (costs.f, costs.b, costs.w)) for costs in (timed, counted))
        return each if self.given is None else each * given / flops

    @property
    def _own_works(self) -> tuple[list[Work], int]:
        """The work of each position, without the rows of a shared vocabulary, and without the weights of a head that
        its rank has with the embedding, and the position that borrows them, 0 for none."""
        place, works = self.schedule.placement, list(self.works[: self.schedule.placement.chain])
        last = place.main - 1
        if place.vocabulary:
            rows = 2 * self.vocab_weights // self.pieces.shares
            left = (x.parameters - rows * (span.share is not None) for x, span in zip(works, self.spans, strict=False))
            return [replace(x, parameters=n) for x, n in zip(works, left, strict=True)], 0
        firsts = place.rank_of[: place.chain * place.num_chains : place.chain]
        if not self.tied or place.rank_of[last] not in firsts:
            return works, 0
        works[last] = replace(works[last], parameters=works[last].parameters - self.vocab_weights)
        return works, last

    @cached_property
    def timeline(self) -> Timeline:
        """The schedule under these costs."""
        return simulate(self.schedule, self.costs)

    @cached_property
    def state_bytes(self) -> tuple[float, ...]:
        """Bytes that each rank keeps between steps."""
        place = self.schedule.placement
        return tuple(self._state_on(place.stages_on(rank)) for rank in range(place.num_ranks))

    @property
    def least_bytes(self) -> tuple[float, ...]:
        """These bytes and what must be whole of weights and gradients for one stage to run."""
        whole = self.sharding.least(self.schedule, self.costs) if self.sharding else [0.0] * len(self.state_bytes)
        return tuple(state + size for state, size in zip(self.state_bytes, whole, strict=True))

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Parameters, gradients, optimizer state and activations of each rank at their most."""
        most = held(self.schedule, self.costs, self.graphs) if self.graphs else self.timeline.peak
        return tuple(map(add, self.state_bytes, most))

    @property
    def shares(self) -> dict[str, tuple[int, ...]]:
        """The groups with the same weights: `ends` for weights that several stages of a chain use, and the ranks of a
        pipeline that do; DualPipe's `twins`."""
        return sharing(self.schedule.placement, tied=self.tied)

    def _state_on(self, stages: Sequence[int]) -> float:
        chain, words = self.schedule.placement.chain, self.vocab_weights
        total = 0.0
        for stage in stages:
            each, work = self.state + self.kept if stage < chain else self.replica, self.works[stage]
            of_expert = self.of_expert if stage < chain else self.replica
            total += each * (work.parameters - work.experts) + of_expert * work.experts * self.tp / self.expert_ranks
            embeds = any(self.spans[other].embedding and other // chain == stage // chain for other in stages)
            shares, span = self.pieces.shares, self.spans[stage]
            if self.tied and (span.loss and embeds if shares == 1 else span.share is not None):
                total -= (each - self.gradient) * words / shares  # one weight, and a gradient for each use
            if self.sharding and span.share is not None:  # rows are whole for ever
                more = self.sharding.element + self.gradient - sum(self.sharding.kept())
                total += more * (1 if self.tied else 2) * words / shares
            elif self.tied and self.sharding and (span.embedding or (span.loss and not embeds)):
                total += self.gradient * words  # whole until those of the other use are added
        for first in range(0, len(self.spans), chain) if self.pieces.shares == 1 else ():
            gradients, weights = lent([self.spans[s] for s in stages if first <= s < first + chain], tied=self.tied)
            kept = self.sharding.kept()[1] if self.sharding else self.gradient
            total += words * (self.gradient * gradients + (self.replica - kept) * weights)
        return total / self.tp + sum(self.works[stage].rounded for stage in stages)


def _tuple(value: float | tuple[float, ...]) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


def sharing(place: Placement, *, tied: bool) -> dict[str, tuple[int, ...]]:
    """The groups of Plan.shares."""
    first, last, depths = place.rank_of[0], place.rank_of[place.main - 1], place.rank_of[place.main : place.chain]
    uses = [{first, last, *depths}] if tied else [{first, *depths}, {last, *depths}]
    if place.vocabulary:  # learned positions alone, which no share has
        uses = [{first, *depths}]
    ends = {rank for ranks in uses if len(ranks) > 1 for rank in ranks}
    there = {"ends": ends, "twins": range(2) if place.num_chains > 1 else ()}
    return {name: tuple(sorted(ranks)) for name, ranks in there.items() if ranks}


def stages_with_depths(place: Placement) -> tuple[int, ...]:
    """A stage of the first chain on each depth's rank, as a layout string lists it."""
    own = place.rank_of[: place.main]
    return tuple(max(s for s, r in enumerate(own) if r == rank) for rank in place.rank_of[place.main : place.chain])


def lent(spans: Sequence[LayerSpan], *, tied: bool) -> tuple[int, int]:
    """The numbers of gradients of embedding and head that the depths among a chain's stages on a rank need, and of
    weights, which other stages there may have anyway."""
    depths = sum(span.depth > 0 for span in spans)
    embeds, ends = any(span.embedding for span in spans), any(span.loss for span in spans)
    weights = int(not (embeds or ends)) if tied else 2 - embeds - ends
    return 2 * depths, weights * (depths > 0)
