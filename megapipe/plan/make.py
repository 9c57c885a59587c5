"""A plan, made once from the configuration alone: every rank makes the same one before any process group exists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from megapipe.config import Config, ModelConfig
from megapipe.errors import ConfigError, ScheduleError
from megapipe.partition.layout import AUTO
from megapipe.partition.spans import LayerSpan, nearly_even, spans
from megapipe.plan.auto import Judge, balanced, search
from megapipe.plan.paired import with_pairs
from megapipe.plan.slices import best_of_slices, chosen
from megapipe.plan.split import counts_of, given_costs, is_searched, kept_shares, placements, schedule_name, schedule_of
from megapipe.plan.state import GIB as GIB
from megapipe.plan.state import bytes_of_expert, bytes_of_state, too_much
from megapipe.plan.work import Pieces, Work, pieces
from megapipe.schedule import Costs, Schedule, Timeline, simulate
from megapipe.schedule.transforms.vocabulary import with_vocabulary


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
        before: what an automatic split replaced: the even one, or with a shared vocabulary the other way to place it.
        given: what passes and messages take, of --pipeline-costs.
    """

    schedule: Schedule
    counts: tuple[int, ...]
    pieces: Pieces
    state: float
    replica: int
    tied: bool
    vocab_weights: int
    tp: int
    before: Plan | None = None
    given: Costs | None = None
    kept: float = 0.0
    gradient: float = 4.0
    expert_ranks: int = 1
    of_expert: float = 0.0

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
        counted = self.pieces.costs(self.counts)
        timed = (
            counted
            if self.given is None
            else replace(self.given, mem_b=counted.mem_b, mem_w=counted.mem_w, mem_s=counted.mem_s)
        )
        return self.pieces.of_slices(timed, self.counts) if self.schedule.cuts else timed

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
    def peak_bytes(self) -> tuple[float, ...]:
        """Parameters, gradients, optimizer state and activations of each rank at their most."""
        return tuple(state + held for state, held in zip(self.state_bytes, self.timeline.peak, strict=True))

    @property
    def shares(self) -> frozenset[str]:
        """Names of the groups with the same weights: `ends` for a tie between a chain's ends, DualPipe's `twins`."""
        place = self.schedule.placement
        first, last = place.rank_of[0], place.rank_of[place.chain - 1]
        there = {"ends": self.tied and first != last and not place.vocabulary, "twins": place.num_chains > 1}
        return frozenset(name for name, needed in there.items() if needed)

    def saved_bytes(self, parameters: Sequence[int], *, optimizer: bool) -> int:
        """Bytes that a checkpoint takes at least; under ZeRO-1 a share of its optimizer state is counted.

        parameters: of each stage, over all tp ranks.
        """
        each = (self.state if optimizer else self.replica) - self.gradient
        return int(sum(parameters[: self.schedule.placement.chain]) * each)

    def _state_on(self, stages: Sequence[int]) -> float:
        chain = self.schedule.placement.chain
        total = 0.0
        for stage in stages:
            each, work = self.state + self.kept if stage < chain else self.replica, self.works[stage]
            of_expert = self.of_expert if stage < chain else self.replica
            total += each * (work.parameters - work.experts) + of_expert * work.experts * self.tp / self.expert_ranks
            embeds = any(self.spans[other].embedding and other // chain == stage // chain for other in stages)
            shares, span = self.pieces.shares, self.spans[stage]
            if self.tied and (span.loss and embeds if shares == 1 else span.share is not None):
                total -= (each - self.gradient) * self.vocab_weights / shares  # one weight, and a gradient for each use
        return total / self.tp + sum(self.works[stage].rounded for stage in stages)


@lru_cache(maxsize=8)
def make_plan(config: Config) -> Plan:
    """The plan of a validated configuration with a padded vocabulary.

    Raises: ConfigError if it needs more than --memory-limit-gib, or flags do not fit; ScheduleError.
    """
    return plan_of(config, pieces_of(config, config.model), recomputes=True)


def pieces_of(config: Config, model: ModelConfig) -> Pieces:
    """The work of a run's model, counted."""
    train, par = config.train, config.parallel
    counted = pieces(
        model,
        train.seq_length or 0,
        train.micro_batch_size or 1,
        tp=par.tensor_model_parallel_size,
        cp=par.context_parallel_size,
        ep=par.expert_model_parallel_size,
        etp=par.etp,
        element_bytes=2 if train.half else 4,
    )
    return counted.on(par.pipeline_model_parallel_size)


def plan_of(config: Config, work: Pieces, *, recomputes: bool = False) -> Plan:
    """The plan of a configuration whose pieces take what `work` says; errors as of `make_plan`.

    recomputes: count what --num-microbatches-with-partial-activation-checkpoints does not compute again, in FLOPs.
    """
    model, train, par = config.model, config.train, config.parallel
    if par.pipeline_slices == AUTO:
        return best_of_slices(config, lambda c: plan_of(c, work, recomputes=recomputes), _step_time)
    if par.vocab_parallel_pipeline and par.pipeline_model_parallel_layout == AUTO:
        return _shared_if_it_pays(config, work, recomputes)
    schedule = schedule_of(config, config.num_microbatches)
    if par.vocab_parallel_pipeline:
        work = replace(work, shares=par.pipeline_model_parallel_size)
    element = 2 if train.half else 4
    # ZeRO-1 splits all but the gradient.
    shards = config.weight_replicas if par.use_distributed_optimizer else 1
    gradient, moments, master = bytes_of_state(train)
    state, replica = element + gradient + (moments + master) / shards, element + gradient
    counts, given = counts_of(config, schedule.placement), given_costs(config)
    words = (model.padded_vocab_size or 0) * model.hidden
    tp = par.tensor_model_parallel_size
    kept = (moments + (master or element)) / shards if par.enable_optimizer_post_validation else 0.0
    parts = model.tied, words, tp
    plan = Plan(schedule, counts, work, state, replica, *parts, given=given, kept=kept, gradient=gradient)
    plan = replace(plan, expert_ranks=par.expert_model_parallel_size * par.etp, of_expert=bytes_of_expert(config))
    limit = None if par.memory_limit_gib is None else par.memory_limit_gib * GIB
    if is_searched(schedule_name(config)):
        plan = _searched(config, plan, limit)
    plan = _paired(plan, config)
    if (some := model.num_microbatches_with_partial_activation_checkpoints) and recomputes:
        whole = pieces_of(config, replace(model, recompute_granularity=None, recompute_activations=False))
        whole = replace(whole, shares=work.shares)
        plan = replace(plan, pieces=replace(work, kept=(whole, kept_shares(plan.schedule, some))))
    if par.vocab_parallel_pipeline:
        plan = replace(plan, schedule=with_vocabulary(plan.schedule, plan.costs))
    if par.pipeline_model_parallel_layout == AUTO:
        plan = balanced_by_cost(plan, limit)
    _check_limit(plan, config)
    return plan


def _step_time(plan: Plan) -> float:
    return plan.timeline.makespan


def _paired(plan: Plan, config: Config) -> Plan:
    limit = config.parallel.memory_limit_gib
    room = None if limit is None else limit * GIB - max(plan.state_bytes)
    return replace(plan, schedule=with_pairs(config, plan.schedule, plan.costs, room))


def _check_limit(plan: Plan, config: Config) -> None:
    gib = config.parallel.memory_limit_gib
    if gib is not None and max(plan.peak_bytes) > gib * GIB:
        auto = plan.before is None
        raise ConfigError(too_much(plan.schedule.name, plan.peak_bytes, plan.state_bytes, gib * GIB, auto=auto))


def _shared_if_it_pays(config: Config, work: Pieces, recomputes: bool) -> Plan:
    """The better one of a shared vocabulary with even stages and of the best whole-layer split, by simulated time."""
    par = config.parallel
    ways = (replace(par, pipeline_model_parallel_layout=None), replace(par, vocab_parallel_pipeline=False))
    plans, errors = [], []
    for way in ways:
        try:
            plans.append(plan_of(replace(config, parallel=way), work, recomputes=recomputes))
        except ConfigError as error:  # too much memory, or layers that do not divide
            errors.append(error)
    if not plans:
        raise errors[-1]
    # FLOPs do not count the messages of the shares: a hundredth less is no reason for them
    best, *other = sorted(plans, key=lambda p: p.timeline.makespan * (1.01 if p.schedule.placement.vocabulary else 1.0))
    return replace(best, before=other[0]) if other else best


def with_batch(plan: Plan, config: Config) -> Plan:
    """A plan of the same layers on the same ranks, under the table of another batch size.

    Raises: ScheduleError, ConfigError if the schedule cannot mean its number of microbatches, or they do not fit.
    """
    if config.num_microbatches == plan.schedule.num_microbatches:
        return plan
    config = chosen(config, len(plan.schedule.cuts) or 1)
    place, count = replace(plan.schedule.placement, vocabulary=False), config.num_microbatches
    if is_searched(schedule_name(config)):
        limit = config.parallel.memory_limit_gib
        empty = replace(plan, schedule=Schedule(plan.schedule.name, place, count, ((),) * place.num_ranks))
        made = _searched(config, empty, None if limit is None else limit * GIB, fixed=True)
    elif (schedule := schedule_of(config, count)).placement == place:
        made = replace(plan, schedule=schedule)
    else:
        raise ConfigError(
            f"--pipeline-schedule {schedule.name} has other stages for {count} microbatches than for "
            f"{plan.schedule.num_microbatches}, and layers stay where they are while a batch grows"
        )
    made = _paired(made, config)
    if (some := config.model.num_microbatches_with_partial_activation_checkpoints) and made.pieces.kept:
        made = replace(made, pieces=replace(made.pieces, kept=(made.pieces.kept[0], kept_shares(made.schedule, some))))
    if plan.schedule.placement.vocabulary:
        made = replace(made, schedule=with_vocabulary(made.schedule, made.costs))
    _check_limit(made, config)
    return made


def _searched(config: Config, plan: Plan, limit: float | None, *, fixed: bool = False) -> Plan:
    """The plan with the best schedule that a search finds under the costs of the stages, in every split it may make.

    Same configuration, same result: every rank searches by itself. The plan as it is where no split fits the limit.

    Args:
        limit: bytes that a rank may need; None: activations as 1F1B holds them.
        fixed: in the plan's own split alone.
    """
    from megapipe.schedule.search.auto import Candidate, limits, search_among  # only who searches pays for loading it

    drafts, candidates = {}, []
    for place in (plan.schedule.placement,) if fixed else placements(config):
        empty = Schedule(plan.schedule.name, place, plan.schedule.num_microbatches, ((),) * place.num_ranks)
        auto = config.parallel.pipeline_model_parallel_layout == AUTO
        counts = plan.counts if fixed else balanced(plan.pieces, place.chain) if auto else counts_of(config, place)
        draft = drafts[place] = replace(plan, schedule=empty, counts=counts)
        room = None if limit is None else tuple(limit - state for state in draft.state_bytes)
        candidates.append(Candidate(place, draft.costs, limits(place, draft.costs, room)))
    # seconds on one core: more for larger tables
    effort = min(4.0, plan.schedule.num_microbatches * plan.schedule.placement.num_ranks / 32)
    try:
        late = config.parallel.enable_optimizer_post_validation  # steps follow each other without a barrier
        objective = "period" if late else "makespan"
        m = plan.schedule.num_microbatches
        found = search_among(candidates, m, objective=objective, effort=effort, portable=True).schedule
    except ScheduleError:  # no split can hold one microbatch: `make_plan` says what is needed
        return plan
    return replace(drafts[found.placement], schedule=found)


def balanced_by_cost(plan: Plan, limit: float | None = None) -> Plan:
    """The plan with the split of least simulated time. limit: bytes that a rank may need."""
    even = replace(plan, counts=nearly_even(len(plan.pieces.layers), plan.schedule.placement.chain))

    def room(counts: tuple[int, ...]) -> list[float]:
        assert limit is not None
        return [limit - state for state in replace(even, counts=counts).state_bytes]

    judge = Judge(plan.schedule, plan.pieces, None if limit is None else room)
    return replace(even, counts=search(judge), before=even)
