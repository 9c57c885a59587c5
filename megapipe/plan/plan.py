"""A plan: the layers and the rank of each stage, and the predicted time and memory of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import add
from typing import NamedTuple

from megapipe.notebook import shown_by
from megapipe.partition.spans import LayerSpan, spans
from megapipe.plan.layers import Work
from megapipe.plan.pieces import ModelWork
from megapipe.schedule import Costs, Placement, Schedule, Timeline, simulate
from megapipe.schedule.recipe import Recipe


class ParameterBytes(NamedTuple):
    """The bytes of one parameter: of its weight and of its gradient."""

    weight: float
    gradient: float


class OfPlan:
    """An addition to a plan by an optional feature, such as offload or sharding.

    The methods here add nothing; the class of a feature overrides some of them. The methods return
    bytes (`stored`, `least`, `peak`), costs (`priced`) and lines for the user (`changes`,
    `summary`).

    Attributes:
        holds: the name, in errors, of the memory that the feature adds to a rank's peak, such as
            "gathered weights and gradients"; "" for none.
    """

    holds = ""

    def stored(self, whole: ParameterBytes, *, experts: bool) -> ParameterBytes:
        """Return the bytes of one parameter's weight and gradient that a rank keeps.

        Args:
            whole: the bytes if the parameter is not sharded.
            experts: the parameter is an expert's.
        """
        return whole

    def priced(self, plan: Plan, costs: Costs, counted: Costs) -> Costs:
        """Return the costs of the plan's stages with the costs of this feature added.

        Args:
            costs: the costs so far, with the times of --pipeline-costs if given.
            counted: the costs by FLOPs, without --pipeline-costs.
        """
        return costs

    def least(self, plan: Plan) -> Sequence[float]:
        """Return, for each rank, the bytes that the feature needs at least, besides the state."""
        return [0.0] * plan.schedule.placement.num_ranks

    def peak(self, plan: Plan, usual: tuple[float, ...]) -> tuple[float, ...]:
        """Return, for each rank, the most bytes that it holds in a step, not counting its state.

        Args:
            usual: these bytes without this feature: the activations in the simulated step.
        """
        return usual

    def changes(self, plan: Plan) -> list[str]:
        """Return lines for the user on what this feature changes in the schedule; may be empty."""
        return []

    def summary(self, plan: Plan) -> str:
        """Return what the feature does in this plan, as a line for the user; "" for nothing."""
        return ""


@dataclass(frozen=True, repr=False)
class Plan:
    """The division of a model over the ranks, with its predicted time and memory.

    Properties: `spans` are the layers of each stage, `works` its FLOPs and bytes, `costs` the times
    of its passes. `timeline` is the simulated step. `state_bytes`, `least_bytes` and `peak_bytes`
    are bytes of each rank. `shares` are the pipeline ranks that hold equal weights.

    Attributes:
        schedule: the table of passes.
        counts: number of layers of each stage of one copy of the model. DualPipe has two copies.
        pieces: the work of embedding, layers and head.
        state: bytes that a rank keeps for one parameter: weight, gradient and optimizer state.
        of_expert: the same for a parameter of an expert.
        whole: bytes of a parameter's weight and gradient without sharding.
        stored: the part of `whole` that a rank keeps between steps.
        tied: the output head uses the word embedding's weight.
        vocab_weights: elements of the word embedding.
        tp: number of ranks that split each parameter.
        expert_ranks: number of ranks that split the experts.
        own: {feature: what it adds to the plan}, for features such as sharding, slices or CUDA
            graphs.
        before: the plan that an automatic choice replaced: an even split of layers, or embedding
            and head on the end stages, not split over ranks. None if nothing was chosen.
        given: times of passes and messages, from --pipeline-costs; None without the flag.
        recipe: how the table was made; None for a table without passes.
    """

    schedule: Schedule
    counts: tuple[int, ...]
    pieces: ModelWork
    state: float
    of_expert: float
    whole: ParameterBytes
    stored: ParameterBytes
    tied: bool
    vocab_weights: int
    tp: int
    expert_ranks: int = 1
    own: Mapping[str, OfPlan] = field(default_factory=dict)
    before: Plan | None = None
    given: Costs | None = None
    recipe: Recipe | None = None

    _repr_html_ = shown_by("plan.table:to_html")

    def __repr__(self) -> str:
        return f"Plan({self.schedule!r}, layers {self.counts})"

    @cached_property
    def spans(self) -> tuple[LayerSpan, ...]:
        """The layers of each stage, and whether it has embedding, loss or a prediction module."""
        return spans(self.counts, self.schedule.placement)

    @cached_property
    def works(self) -> tuple[Work, ...]:
        """The FLOPs and bytes of each stage."""
        return tuple(map(self.pieces.stage, self.spans))

    @property
    def costs(self) -> Costs:
        """The times and bytes of each stage's passes.

        Times are the ones in --pipeline-costs if the flag is given, else FLOPs.
        """
        counted = self.pieces.costs(self.counts)
        costs = counted
        if self.given is not None:
            # A file of costs has times; bytes of its model are not this run's.
            costs = replace(
                self.given.of_positions(len(self.counts) + len(self.pieces.depths)),
                mem_b=counted.mem_b,
                mem_w=counted.mem_w,
                mem_s=counted.mem_s,
                mem_o=counted.mem_o,
                mem_p=counted.mem_p,
            )
        if self.schedule.cuts:
            costs = self.pieces.of_slices(costs, self.counts)
        # Each part changes what the parts before it made, see the order in `parts`.
        for one in self.own.values():
            costs = one.priced(self, costs, counted)
        return costs

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step: begin and end of each pass, makespan, idle time and peak memory."""
        return simulate(self.schedule, self.costs)

    @cached_property
    def state_bytes(self) -> tuple[float, ...]:
        """Bytes of weights, gradients and optimizer state that each rank keeps between steps."""
        place = self.schedule.placement
        return tuple(self._state_on(place.stages_on(rank)) for rank in range(place.num_ranks))

    @property
    def least_bytes(self) -> tuple[float, ...]:
        """Bytes that each rank needs at least: its state, and what it has to gather at one time."""
        # Less than the peak, which gathers early where there is room: a limit leaves the rest.
        least = self.state_bytes
        for one in self.own.values():
            least = tuple(map(add, least, one.least(self)))
        return least

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """The largest sum of weights, gradients, optimizer state and activations on each rank."""
        most = self.timeline.peak
        for one in self.own.values():
            most = one.peak(self, most)
        return tuple(map(add, self.state_bytes, most))

    @property
    def shares(self) -> dict[str, tuple[int, ...]]:
        """The groups of pipeline ranks that hold equal weights: {name: ranks}.

        `ends`: ranks whose stages use the same embedding or head. `twins`: (0, 1) under DualPipe.
        (0, 1) stands for all pairs of ranks r and p-1-r, which hold equal stages.
        """
        return sharing(self.schedule.placement, tied=self.tied)

    def repeated(self, stage: int) -> float:
        """Return the number of a stage's weights that its rank has already, because they are tied.

        They are a head's on the rank of the embedding, over all tensor-parallel ranks. The result
        is 0 for other stages.
        """
        if not self.tied:
            return 0.0
        if self.spans[stage].share is not None:
            return self.vocab_weights / self.pieces.shares
        if not self.spans[stage].loss or self.pieces.shares > 1:
            return 0.0
        # Of DualPipe's two copies of the model, only the stage's own copy counts.
        place = self.schedule.placement
        own = [
            self.spans[other].embedding
            for other in place.stages_on(place.rank_of[stage])
            if other // place.chain == stage // place.chain
        ]
        return self.vocab_weights * any(own)

    def _state_on(self, stages: Sequence[int]) -> float:
        """Return the bytes that one rank keeps of these stages between steps."""
        chain = self.schedule.placement.chain
        total = 0.0
        for stage in stages:
            embeds = any(self.spans[s].embedding for s in stages if s // chain == stage // chain)
            for size in self._state_of(stage, embeds):
                total += size
        # Ranks that share a vocabulary share it with depths too, which then add none.
        if self.pieces.shares == 1:
            for first in range(0, len(self.spans), chain):
                own = [self.spans[s] for s in stages if first <= s < first + chain]
                gradients, weights = added_by_depths(own, tied=self.tied)
                size = self.whole.gradient * gradients + self.stored.weight * weights
                total += self.vocab_weights * size
        return total / self.tp + sum(self.works[stage].rounded for stage in stages)

    def _state_of(self, stage: int, embeds: bool) -> Iterator[float]:
        """Yield the summands of a stage's bytes between steps, over all tensor-parallel ranks.

        Args:
            embeds: whether the stage's rank has the embedding too, in the same one of DualPipe's
                two copies of the model.
        """
        work = self.works[stage]
        span = self.spans[stage]
        words = self.vocab_weights
        shares = self.pieces.shares
        # The sum is divided by `tp` at its end; parameters of experts are shared by other ranks.
        each = self.state
        of_expert = self.of_expert
        if stage >= self.schedule.placement.chain:
            # DualPipe's second chain has no optimizer state.
            each = sum(self.stored)
            of_expert = each
        dense = each * (work.parameters - work.experts)
        yield dense + of_expert * work.experts * self.tp / self.expert_ranks

        # Tied weights are one, with a gradient for each use.
        yield -((each - self.whole.gradient) * self.repeated(stage))
        if span.share is not None:
            # Rows of a shared vocabulary are never sharded.
            more = sum(self.whole) - sum(self.stored)
            uses = 1 if self.tied else 2
            yield more * uses * words / shares
            return
        # A weight that is used twice has unsharded gradients until both are added.
        shards = self.stored.gradient < self.whole.gradient
        at_end = span.embedding or (span.loss and not embeds)
        if self.tied and shares == 1 and shards and at_end:
            yield self.whole.gradient * words


def sharing(place: Placement, *, tied: bool) -> dict[str, tuple[int, ...]]:
    """Return {name of a group: the pipeline ranks that hold equal weights}, as `Plan.shares` does.

    Args:
        tied: the output head uses the word embedding's weight.
    """
    first = place.rank_of[0]
    last = place.rank_of[place.main - 1]
    depths = place.rank_of[place.main : place.chain]
    if place.vocabulary:
        # Every rank has its own rows. Learned positions alone are used by several stages.
        uses = [{first, *depths}]
    elif tied:
        uses = [{first, last, *depths}]
    else:
        uses = [{first, *depths}, {last, *depths}]
    ends = {rank for ranks in uses if len(ranks) > 1 for rank in ranks}
    groups = {}
    if ends:
        groups["ends"] = tuple(sorted(ends))
    if place.num_chains > 1:
        groups["twins"] = (0, 1)
    return groups


def stages_with_depths(place: Placement) -> tuple[int, ...]:
    """Return, for each module (depth) of multi-token prediction, the last main stage on its rank.

    A layout string has a depth's letter m in this stage. If stages 0 to 3 are on ranks 0, 1, 0 and
    1, a depth on rank 0 gives 2.
    """
    own = place.rank_of[: place.main]
    depths = place.rank_of[place.main : place.chain]
    # A rank may have several stages; a depth follows the last of them.
    last_on = {rank: stage for stage, rank in enumerate(own)}
    return tuple(last_on[rank] for rank in depths)


def added_by_depths(spans: Sequence[LayerSpan], *, tied: bool) -> tuple[int, int]:
    """Return how many vocabulary-sized tensors multi-token prediction adds to a rank.

    Each module uses the embedding and the head, and has a gradient of its own for both. The modules
    of a rank share one copy of the embedding and one of the head. A copy that another stage of the
    rank has already is not counted.

    Args:
        spans: the rank's stages in one copy of the model.
        tied: whether embedding and head are one weight, so that they need one copy.
    Returns: (number of gradients, number of weights).
    """
    # A depth has both from their owners after each update, and sends its gradients back.
    depths = sum(span.depth > 0 for span in spans)
    embeds = any(span.embedding for span in spans)
    ends = any(span.loss for span in spans)
    weights = 2 - embeds - ends
    if tied:
        weights = int(not (embeds or ends))
    return 2 * depths, weights * (depths > 0)
