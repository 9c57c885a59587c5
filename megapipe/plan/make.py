"""A plan, made once from the configuration alone: every rank makes the same one before any process group exists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

from megapipe.config import Config, ModelConfig
from megapipe.errors import ConfigError, ScheduleError
from megapipe.partition.layout import AUTO
from megapipe.partition.spans import nearly_even
from megapipe.plan.auto import Judge, balanced, search
from megapipe.plan.graphs import why_not
from megapipe.plan.layers import Gathers
from megapipe.plan.plan import Plan
from megapipe.plan.slices import best_of_slices, chosen
from megapipe.plan.split import (
    counts_of,
    given_costs,
    is_searched,
    kept_shares,
    placements,
    ranks_of_depths,
    schedule_name,
    schedule_of,
)
from megapipe.plan.state import GIB, bytes_of_expert, bytes_of_state, too_much
from megapipe.plan.transforms.moved import LIMIT, Copies, NothingToCopy, fitted, within
from megapipe.plan.transforms.paired import linked, with_pairs
from megapipe.plan.transforms.sharded import Sharding
from megapipe.plan.work import Pieces, Work, pieces
from megapipe.schedule import Schedule
from megapipe.schedule.transforms.depths import behind, own_chain, with_depths
from megapipe.schedule.views.moved import MOVES


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
        modules=par.offload_modules,
        gathers=_gathers(config),
    )
    return counted.on(par.pipeline_model_parallel_size)


def _gathers(config: Config) -> Gathers:
    par = config.parallel
    same = config.world_size // (par.expert_model_parallel_size * par.etp * par.pipeline_model_parallel_size)
    return Gathers(config.weight_replicas, same, par.shards_weights) if config.gathers_fp8 else Gathers()


def plan_of(config: Config, work: Pieces, *, recomputes: bool = False, moves: bool = True) -> Plan:
    """The plan of a configuration whose pieces take what `work` says; errors as of `make_plan`.

    Args:
        recomputes: count what --num-microbatches-with-partial-activation-checkpoints does not compute again, in FLOPs.
        moves: move activations out of the way of --memory-limit-gib.
    """
    model, train, par = config.model, config.train, config.parallel
    if par.pipeline_slices == AUTO:
        return best_of_slices(config, lambda c: plan_of(c, work, recomputes=recomputes), _step_time)
    if par.vocab_parallel_pipeline and par.pipeline_model_parallel_layout == AUTO:
        return _shared_if_it_pays(config, work, recomputes)
    schedule, depths = schedule_of(config, config.num_microbatches), work.depths
    work = replace(work, depths=())
    if par.vocab_parallel_pipeline:
        work = replace(work, shares=par.pipeline_model_parallel_size)
    element = 2 if train.half else 4
    # ZeRO-1 splits all but the gradient.
    shards = config.weight_replicas if par.splits_optimizer else 1
    gradient, moments, master = bytes_of_state(train)
    sharding = Sharding.asked(config, gradient)
    replica = sum(sharding.kept()) if sharding else element + gradient
    state = replica + (moments + master) / shards
    counts, given = counts_of(config, schedule.placement), given_costs(config)
    words = (model.padded_vocab_size or 0) * model.hidden
    tp = par.tensor_model_parallel_size
    kept = (moments + (master or element)) / shards if par.enable_optimizer_post_validation else 0.0
    parts = model.tied, words, tp
    plan = Plan(
        schedule, counts, work, state, replica, *parts, given=given, kept=kept, gradient=gradient, sharding=sharding
    )
    plan = replace(plan, expert_ranks=par.expert_model_parallel_size * par.etp, of_expert=bytes_of_expert(config))
    limit = None if par.memory_limit_gib is None else par.memory_limit_gib * GIB
    if is_searched(schedule_name(config)):
        plan = _searched(config, plan, limit)
    plan = plan if depths else _paired(plan, config)
    if (some := model.num_microbatches_with_partial_activation_checkpoints) and recomputes:
        whole = pieces_of(config, replace(model, recompute_granularity=None, recompute_activations=False))
        whole = replace(whole, shares=work.shares)
        plan = replace(plan, pieces=replace(work, kept=(whole, kept_shares(plan.schedule, some))))
    ways = []
    for ranks in ranks_of_depths(config, plan.schedule.placement):
        further = with_further(config, plan, depths, ranks)
        if par.pipeline_model_parallel_layout == AUTO:
            split = balanced_by_cost(further, limit)
            further = replace(
                with_further(config, replace(plan, counts=split.counts), depths, ranks), before=split.before
            )
        ways.append(further)
    if len(ways) > 1:
        ways.sort(key=lambda way: (limit is not None and max(way.peak_bytes) > limit, way.timeline.makespan))
    return _checked(_paired(ways[0], config) if depths else ways[0], config, moves=moves)


def _step_time(plan: Plan) -> float:
    return plan.timeline.makespan


def with_further(config: Config, plan: Plan, depths: tuple[Work, ...], ranks: Sequence[int]) -> Plan:
    """The plan with depths of multi-token prediction on these ranks, and with the passes of a shared vocabulary."""
    plan = replace(plan, pieces=plan.pieces.further(depths))
    vocabulary = plan.pieces.shares > 1
    place = replace(behind(plan.schedule.placement, ranks), vocabulary=vocabulary)
    # Costs name each stage, depths too: they are those of the placement to come.
    costs = linked(config, replace(plan, schedule=replace(plan.schedule, placement=place)).costs)
    return replace(plan, schedule=with_depths(plan.schedule, ranks, costs, vocabulary=vocabulary))


def _paired(plan: Plan, config: Config) -> Plan:
    return replace(plan, schedule=with_pairs(config, plan.schedule, plan.costs, _room(plan, config)))


def _room(plan: Plan, config: Config) -> float | None:
    """Bytes of activation that every rank may hold."""
    rooms = _rooms(plan, config)
    return None if rooms is None else min(rooms)


def _rooms(plan: Plan, config: Config) -> tuple[float, ...] | None:
    """Bytes of activation that each rank may hold."""
    limit = config.parallel.memory_limit_gib
    return None if limit is None else tuple(limit * GIB - state for state in plan.state_bytes)


def _checked(plan: Plan, config: Config, *, moves: bool = True) -> Plan:
    """The plan, once it fits, with the shares that flags ask for, and with what flags, a file of its table or the limit
    move out of the way."""
    par, rooms, plain = config.parallel, _rooms(plan, config), plan.schedule
    gib = par.memory_limit_gib
    asked = Copies.asked(config)
    may_move = moves and rooms is not None and par.reschedule_after is None
    if plain.kinds & MOVES:
        plan = replace(plan, copies=asked or Copies.of(config, "--pipeline-schedule"))
    elif asked:
        plan = replace(plan, copies=asked)
    if sharding := plan.sharding:
        also = replace(plan, copies=Copies.of(config, LIMIT)) if may_move and not plan.copies else plan
        moved = partial(asked.table if asked else fitted, plain, also.costs) if may_move or asked else None
        start = plain if asked is None or rooms is not None else asked.table(plain, plan.costs, None)
        made = sharding.table(start, also.costs, rooms, moved)
        plan = replace(also if made.kinds & MOVES else plan, schedule=made)
    elif asked:
        plan = replace(plan, schedule=asked.table(plain, plan.costs, rooms))
    elif rooms and may_move and not plain.kinds & MOVES:
        plan = moved_within(plan, config)
    if par.cuda_graph_impl != "none" and not why_not(config, plan.schedule):
        tokens = config.train.sequence * config.train.micro_batch
        plan = replace(plan, graphs=float(tokens * config.model.hidden * (2 if config.train.half else 4)))
    if gib is not None and max(plan.peak_bytes) > gib * GIB:
        auto = plan.before is None
        bytes_of = plan.peak_bytes, plan.state_bytes, gib * GIB
        raise ConfigError(too_much(plan.schedule.name, *bytes_of, auto=auto, shards=plan.sharding is not None))
    return plan


def moved_within(plan: Plan, config: Config) -> Plan:
    """The plan with what has to leave for it to fit its limit; if its order is searched, also what makes it faster."""
    room, any_order = _rooms(plan, config), is_searched(schedule_name(config))
    if room is None:
        return plan
    tight = any(held > most for held, most in zip(plan.timeline.peak, room, strict=True))
    if min(room) <= 0 or not (any_order or tight):
        return plan
    moved = replace(plan, copies=Copies.of(config, LIMIT))
    if (found := within(plan.schedule, moved.costs, room, any_order=any_order)) is None:
        return plan
    moved = replace(moved, schedule=found) if found.kinds & MOVES else replace(plan, schedule=found)
    # FLOPs and bytes are estimates: a hundredth less is no reason for passes that move.
    return moved if tight or moved.timeline.makespan < 0.99 * plan.timeline.makespan else plan


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
    place, depths = plan.schedule.placement, plan.pieces.depths
    own = replace(plan, pieces=plan.pieces.without_depths)
    own = replace(own, schedule=replace(plan.schedule, placement=replace(own_chain(place), vocabulary=False)))
    made = _of_batch(own, config, paired=not depths)
    made = with_further(config, made, depths, place.rank_of[place.main :][: place.depths])
    made = _paired(made, config) if depths else made
    try:
        return _checked(made, config)
    except NothingToCopy:  # of so few microbatches none is under way for long: this size runs without copies
        without = replace(config.parallel, fine_grained_activation_offloading=False, cpu_offload=False)
        return _checked(made, replace(config, parallel=without))


def _of_batch(plan: Plan, config: Config, *, paired: bool) -> Plan:
    """The plan of the model's own chain, whose ends have the vocabulary, for another number of microbatches."""
    place, count = plan.schedule.placement, config.num_microbatches
    made = None
    if is_searched(schedule_name(config)):
        limit = config.parallel.memory_limit_gib
        of_count = Schedule(plan.schedule.name, place, count, ((),) * place.num_ranks, cuts=plan.schedule.cuts)
        empty = replace(plan, schedule=of_count)
        found = _searched(config, empty, None if limit is None else limit * GIB, fixed=True)
        # A search that finds nothing leaves the table empty. Then the run begins as the whole plan does.
        made = found if any(found.schedule.ranks) else None
    if made is None:
        schedule = schedule_of(config, count)
        if schedule.placement != place:
            raise ConfigError(
                f"--pipeline-schedule {schedule.name} has other stages for {count} microbatches than for "
                f"{plan.schedule.num_microbatches}, and layers stay where they are while a batch grows"
            )
        made = replace(plan, schedule=schedule)
    made = _paired(made, config) if paired else made
    if (some := config.model.num_microbatches_with_partial_activation_checkpoints) and made.pieces.kept:
        made = replace(made, pieces=replace(made.pieces, kept=(made.pieces.kept[0], kept_shares(made.schedule, some))))
    return made


def _searched(config: Config, plan: Plan, limit: float | None, *, fixed: bool = False) -> Plan:
    """The plan with the best schedule that a search finds under the costs of the stages, in every split it may make.

    Same configuration, same result: every rank searches by itself. The plan as it is where no split fits the limit.

    Args:
        limit: bytes that a rank may need; None: activations as 1F1B holds them.
        fixed: in the plan's own split alone.
    """
    from megapipe.schedule.search.auto import Candidate, limits, search_among  # only who searches pays for loading it
    from megapipe.schedule.search.sliced import fastest_slices

    drafts, candidates = {}, []
    for place in (plan.schedule.placement,) if fixed else placements(config):
        empty = replace(plan.schedule, placement=place, ranks=((),) * place.num_ranks)
        auto = config.parallel.pipeline_model_parallel_layout == AUTO
        counts = plan.counts if fixed else balanced(plan.pieces, place.chain) if auto else counts_of(config, place)
        draft = drafts[place] = replace(plan, schedule=empty, counts=counts)
        room = None if limit is None else tuple(limit - least for least in draft.least_bytes)
        candidates.append(Candidate(place, draft.costs, limits(place, draft.costs, room)))
    # seconds on one core: more for larger tables
    effort = min(4.0, plan.schedule.num_microbatches * plan.schedule.placement.num_ranks / 32)
    try:
        late = config.parallel.enable_optimizer_post_validation  # steps follow each other without a barrier
        objective = "period" if late else "makespan"
        m, cuts = plan.schedule.num_microbatches, plan.schedule.cuts
        if cuts:
            found = fastest_slices(candidates, m, cuts, effort=effort, portable=True)
        else:
            found = search_among(candidates, m, objective=objective, effort=effort, portable=True).schedule
    except ScheduleError:  # no split can hold one microbatch: `make_plan` says what is needed
        return plan
    return replace(drafts[found.placement], schedule=found)


def balanced_by_cost(plan: Plan, limit: float | None = None) -> Plan:
    """The plan with the split of least simulated time. limit: bytes that a rank may need."""
    even = replace(plan, counts=nearly_even(len(plan.pieces.layers), plan.schedule.placement.main))

    def room(counts: tuple[int, ...]) -> list[float]:
        assert limit is not None
        return [limit - least for least in replace(even, counts=counts).least_bytes]

    judge = Judge(plan.schedule, plan.pieces, None if limit is None else room)
    return replace(even, counts=search(judge), before=even)
