"""A plan, made once from the configuration alone: every rank makes the same one before any process group exists."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

from megapipe.config import Config, ModelConfig
from megapipe.errors import ConfigError, ScheduleError
from megapipe.partition.layout import AUTO
from megapipe.partition.spans import nearly_even
from megapipe.plan.auto import Judge, search
from megapipe.plan.draft import Draft
from megapipe.plan.families.offload import Copies
from megapipe.plan.families.sharding import Sharding
from megapipe.plan.graphs import why_not
from megapipe.plan.layers import Gathers
from megapipe.plan.plan import Plan
from megapipe.plan.recipes import recipe_of, schedule_of, step_of
from megapipe.plan.slices import best_of_slices, chosen
from megapipe.plan.split import given_costs, kept_shares, ranks_of_depths, schedule_name
from megapipe.plan.state import GIB, bytes_of_expert, bytes_of_state, too_much
from megapipe.plan.work import Pieces, pieces
from megapipe.schedule import Placement, Schedule
from megapipe.schedule.families.offload.rules import MOVES
from megapipe.schedule.ingredients import Refused
from megapipe.schedule.recipe import Recipe


class NothingToCopy(ConfigError):
    """A table in which no activation stays long enough to be copied to the host and back."""


class NothingToPair(ConfigError):
    """A table that no two passes run together make shorter."""


@lru_cache(maxsize=8)
def make_plan(config: Config) -> Plan:
    """The plan of a validated configuration with a padded vocabulary.

    Raises: ConfigError if it needs more than --memory-limit-gib, or flags do not fit; ScheduleError.
    """
    return plan_of(config, pieces_of(config, config.model), recomputes=True)


def pieces_of(config: Config, model: ModelConfig) -> Pieces:
    """The work of a run's model, counted."""
    par = config.parallel
    counted = pieces(
        model,
        config.batch.seq_length or 0,
        config.batch.micro_batch_size or 1,
        tp=par.tensor_model_parallel_size,
        cp=par.context_parallel_size,
        ep=par.expert_model_parallel_size,
        etp=par.etp,
        element_bytes=config.precision.element_bytes,
        modules=par.offload_modules,
        gathers=_gathers(config),
    )
    return counted.on(par.pipeline_model_parallel_size)


def _gathers(config: Config) -> Gathers:
    par = config.parallel
    same = config.world_size // (par.expert_model_parallel_size * par.etp * par.pipeline_model_parallel_size)
    return Gathers(config.weight_replicas, same, par.shards_weights) if config.gathers_fp8 else Gathers()


def plan_of(config: Config, work: Pieces, *, recomputes: bool = False, moves: bool = True) -> Plan:
    """Return the plan of a configuration whose pieces take what `work` says; errors as of `make_plan`.

    Args:
        recomputes: count what --num-microbatches-with-partial-activation-checkpoints does not compute again, in FLOPs.
        moves: move activations out of the way of --memory-limit-gib.
    """
    par = config.parallel
    if par.pipeline_slices == AUTO:
        return best_of_slices(config, lambda c: plan_of(c, work, recomputes=recomputes), _step_time)
    if par.vocab_parallel_pipeline and par.pipeline_model_parallel_layout == AUTO:
        return _shared_if_it_pays(config, work, recomputes)
    recipe = recipe_of(config, moves=moves)
    draft = Draft(config, _empty(config, work), work.depths)
    chain = _chain(config, recipe, draft)
    draft = _as_searched(draft, chain.placement)
    if (some := config.model.num_microbatches_with_partial_activation_checkpoints) and recomputes:
        whole = pieces_of(config, replace(config.model, recompute_granularity=None, recompute_activations=False))
        draft = _keeping(draft, replace(whole, shares=draft.base.pieces.shares), chain, some)
    ways = [
        _balanced(draft, replace(recipe, depths=ranks), chain) for ranks in ranks_of_depths(config, chain.placement)
    ]
    draft, recipe, plan = min(ways, key=lambda way: _rank(way[2], config)) if len(ways) > 1 else ways[0]
    return _finished(draft, recipe, plan.schedule)


def _step_time(plan: Plan) -> float:
    return plan.timeline.makespan


def _rank(plan: Plan, config: Config) -> tuple[bool, float]:
    """Order plans: those within the limit first, then by time."""
    limit = config.parallel.memory_limit_gib
    return limit is not None and max(plan.peak_bytes) > limit * GIB, plan.timeline.makespan


def _empty(config: Config, work: Pieces) -> Plan:
    """Return the plan of these pieces with no table yet, and with no depths."""
    model, par = config.model, config.parallel
    pp = par.pipeline_model_parallel_size
    work = replace(work, depths=(), shares=pp if par.vocab_parallel_pipeline else work.shares)
    element = config.precision.element_bytes
    # ZeRO-1 splits all but the gradient.
    shards = config.weight_replicas if par.splits_optimizer else 1
    gradient, moments, master = bytes_of_state(config.optimizer, config.precision.half)
    sharding = Sharding.asked(config, gradient)
    replica = sum(sharding.kept()) if sharding else element + gradient
    return Plan(
        schedule=Schedule("", Placement(tuple(range(pp)), pp), 1, ((),) * pp),
        counts=(),
        pieces=work,
        state=replica + (moments + master) / shards,
        replica=replica,
        tied=model.tied,
        vocab_weights=(model.padded_vocab_size or 0) * model.hidden,
        tp=par.tensor_model_parallel_size,
        given=given_costs(config),
        kept=(moments + (master or element)) / shards if par.enable_optimizer_post_validation else 0.0,
        gradient=gradient,
        sharding=sharding,
        expert_ranks=par.expert_model_parallel_size * par.etp,
        of_expert=bytes_of_expert(config),
    )


def _chain(config: Config, recipe: Recipe, draft: Draft) -> Schedule:
    """Return the table of the model's own chain, without pairs."""
    try:
        return recipe.chain(draft)
    except ScheduleError:
        if recipe.search is None:
            raise
        # No order fits the memory: the plan of one that does not says by how much.
        return replace(recipe, table=schedule_of(config, recipe.microbatches)).chain(draft)


def _as_searched(draft: Draft, place: Placement) -> Draft:
    """Return the draft with the split by which the search chose this placement."""
    return replace(draft, counts=draft.plan(Schedule("", place, 1, ((),) * place.num_ranks)).counts)


def _keeping(draft: Draft, whole: Pieces, chain: Schedule, some: int) -> Draft:
    """Return the draft in which `some` microbatches keep what the others compute again."""
    counted = replace(draft.base.pieces, kept=(whole, kept_shares(chain, some)))
    return replace(draft, base=replace(draft.base, pieces=counted))


def _balanced(draft: Draft, recipe: Recipe, chain: Schedule) -> tuple[Draft, Recipe, Plan]:
    """Return a plan with depths and vocabulary; where flags leave it to `auto`, in the split of least time."""
    config = draft.config
    plan = draft.plan(_with_ends(config, recipe, chain, draft))
    if config.parallel.pipeline_model_parallel_layout == AUTO:
        limit = config.parallel.memory_limit_gib
        split = balanced_by_cost(plan, None if limit is None else limit * GIB)
        draft = replace(draft, counts=split.counts, base=replace(draft.base, before=split.before))
        plan = draft.plan(_with_ends(config, recipe, chain, draft))
    return draft, recipe, plan


def _with_ends(config: Config, recipe: Recipe, chain: Schedule, draft: Draft) -> Schedule:
    """Return the chain with its pairs, depths and vocabulary, under the costs of the draft's split."""
    with _flags_named(config):
        paired = recipe.with_pairs(chain, draft)
    return recipe.with_ends(paired, draft)


def _finished(draft: Draft, recipe: Recipe, table: Schedule) -> Plan:
    """Return the plan of a table with depths and vocabulary, with all else that its recipe says, once it fits."""
    config = draft.config
    if (asked := Copies.asked(config)) is not None:
        asked.check(table, draft.costs(table))
    with _flags_named(config):
        built = recipe.finish(table, draft)
    if asked and recipe.offload and recipe.offload.when == "all" and not built.table.kinds & MOVES:
        raise NothingToCopy(
            f"{asked.flag}: under {table.name} no activation stays long enough to be copied to the host and back "
            "before its backward. Leave the flag out, say with --offload-time 0.1 that copies are fast, or take a "
            "schedule of more microbatches in flight."
        )
    recipe = replace(recipe, step=step_of(config, built.table))
    plan = replace(draft.plan(built.table), recipe=recipe)
    if asked or built.table.kinds & MOVES:
        plan = replace(plan, copies=draft.copies(built.plain))
    if config.parallel.cuda_graph_impl != "none" and not why_not(config, plan.schedule):
        tokens = config.batch.sequence * config.batch.micro_batch
        plan = replace(plan, graphs=float(tokens * config.model.hidden * config.precision.element_bytes))
    gib = config.parallel.memory_limit_gib
    if gib is not None and max(plan.peak_bytes) > gib * GIB:
        auto = plan.before is None
        bytes_of = plan.peak_bytes, plan.state_bytes, gib * GIB
        raise ConfigError(too_much(plan.schedule.name, *bytes_of, auto=auto, shards=plan.sharding is not None))
    return plan


@contextmanager
def _flags_named(config: Config) -> Iterator[None]:
    """Say what a part of the recipe refused by the flag that asks for the part."""
    try:
        yield
    except Refused as error:
        par = config.parallel
        if error.part == "pairs":
            within = " within --memory-limit-gib, which may be raised" if par.memory_limit_gib is not None else ""
            raise NothingToPair(
                f"--overlap-moe-expert-parallel-comm: no two passes run together make {schedule_name(config)} with "
                f"{config.num_microbatches} microbatches shorter{within}. Leave the flag out, or give a step more "
                "microbatches: a larger --global-batch-size or a smaller --micro-batch-size."
            ) from None
        if error.part == "sharding":
            raise ConfigError(f"--data-parallel-sharding-strategy: {error}") from None
        raise


def moved_within(plan: Plan, config: Config) -> Plan:
    """Return the plan with what has to leave for it to fit its limit; if its order is searched, also what makes it
    faster."""
    recipe = recipe_of(config)
    if recipe.offload is None or recipe.sharding is not None:
        return plan
    base = replace(plan, pieces=plan.pieces.without_depths)
    draft = Draft(config, base, plan.pieces.depths, plan.counts)
    moved = replace(recipe, pairs=True).finish(plan.schedule, draft).table
    plan = replace(plan, schedule=moved)
    return replace(plan, copies=draft.copies(plan.schedule)) if moved.kinds & MOVES else plan


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
    """Return a plan of the same layers on the same ranks, under the table of another batch size.

    Raises: ScheduleError, ConfigError if the schedule cannot mean its number of microbatches, or they do not fit.
    """
    if config.num_microbatches == plan.schedule.num_microbatches:
        return plan
    config = chosen(config, len(plan.schedule.cuts) or 1)
    place, depths = plan.schedule.placement, plan.pieces.depths
    main = replace(place.own_chain, vocabulary=False)
    recipe = replace(
        recipe_of(config),
        depths=place.rank_of[place.main :][: place.depths],
        vocabulary=place.vocabulary,
    )
    if recipe.search is not None:
        recipe = replace(recipe, search=replace(recipe.search, placements=(main,)))
    base = replace(plan, pieces=plan.pieces.without_depths, copies=None, graphs=0.0)
    draft = Draft(config, base, depths, plan.counts)
    chain = _chain(config, recipe, draft)
    if chain.placement != main:
        raise ConfigError(
            f"--pipeline-schedule {chain.name} has other stages for {config.num_microbatches} microbatches than for "
            f"{plan.schedule.num_microbatches}, and layers stay where they are while a batch grows"
        )
    if (some := config.model.num_microbatches_with_partial_activation_checkpoints) and base.pieces.kept:
        draft = _keeping(draft, base.pieces.kept[0], chain, some)
    return _of_few(draft, recipe, chain)


def _of_few(draft: Draft, recipe: Recipe, chain: Schedule) -> Plan:
    """Return the plan of a batch that may be too small for pairs or copies, which this size then does without."""
    config = draft.config
    try:
        return _finished(draft, recipe, _with_ends(config, recipe, chain, draft))
    except NothingToPair:
        return _of_few(draft, replace(recipe, pairs=True), chain)
    except NothingToCopy:
        without = replace(config.parallel, fine_grained_activation_offloading=False, cpu_offload=False)
        config = replace(config, parallel=without)
        recipe = replace(recipe, offload=recipe_of(config).offload)
        return _of_few(replace(draft, config=config), recipe, chain)


def balanced_by_cost(plan: Plan, limit: float | None = None) -> Plan:
    """The plan with the split of least simulated time. limit: bytes that a rank may need."""
    even = replace(plan, counts=nearly_even(len(plan.pieces.layers), plan.schedule.placement.main))

    def room(counts: tuple[int, ...]) -> list[float]:
        assert limit is not None
        return [limit - least for least in replace(even, counts=counts).least_bytes]

    judge = Judge(plan.schedule, plan.pieces, None if limit is None else room)
    return replace(even, counts=search(judge), before=even)
