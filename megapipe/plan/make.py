"""Make a plan from nothing but the configuration.

All ranks make the same plan before any process group exists. In this order:

    pieces   the cost of each layer, of the embedding and of the head.

    chain    the order of passes, before pairs and depths. A search also chooses the stages.

    split    layers of each stage, and ranks of the depths of multi-token prediction.

    ends     depths and a shared vocabulary join the chain, under the costs of the split.

    table    the rest of the recipe: moved activations, shards, the passes of the step.

A split is judged by a table, so the chain comes first. Bytes of a stage follow from the split, so
everything that is chosen by bytes comes after it. A `PlanDraft` prices the stages of any table on
the way. Parts that not all plans have, such as families of passes, are in `PARTS`; none is named
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from itertools import count

from megapipe.config import Config, ModelConfig
from megapipe.errors import ConfigError, ScheduleError
from megapipe.partition.layout import AUTO
from megapipe.partition.spans import nearly_even
from megapipe.plan.auto import Judge, search
from megapipe.plan.draft import PlanDraft
from megapipe.plan.layers import Gathers
from megapipe.plan.part import NothingToDo
from megapipe.plan.parts import PARTS, own_parts
from megapipe.plan.pieces import ModelWork, pieces
from megapipe.plan.plan import Plan
from megapipe.plan.recipes import recipe_of, schedule_of, step_of
from megapipe.plan.seconds.device import capacity_of
from megapipe.plan.split import given_costs, kept_shares, ranks_of_depths
from megapipe.plan.state import GIB, bytes_of_parameter, refuse_too_much, whole_parameter
from megapipe.schedule import Costs, Placement, Schedule
from megapipe.schedule.ingredients import Refused
from megapipe.schedule.recipe import Recipe

_ROUNDS = 4  # plans that count just what the table before them keeps; most settle sooner


@lru_cache(maxsize=8)
def make_plan(config: Config) -> Plan:
    """Return the plan of a validated configuration with a padded vocabulary.

    Raises: ConfigError if the plan needs more than --memory-limit-gib; ConfigError or ScheduleError
        if no table has what the flags ask for.
    """
    return plan_of(config, pieces_of(config, config.model), recomputes=True)


def plan_of(config: Config, work: ModelWork, *, recomputes: bool = False) -> Plan:
    """Return the plan of a configuration, given the work of its model.

    Args:
        work: the work of embedding, layers and head.
        recomputes: let some microbatches recompute nothing, as
            --num-microbatches-with-partial-activation-checkpoints asks. False ignores that flag.
    Raises: ConfigError and ScheduleError like `make_plan`.
    """
    # A part with an open choice plans each way without it, and returns the best of them.
    for part in PARTS:
        best = part.best(config, lambda one: plan_of(one, work, recomputes=recomputes))
        if best is not None:
            return best
    recipe = recipe_of(config)
    draft = PlanDraft(config, _empty(config, work), work.depths)
    chain = _chain(config, recipe, draft)
    draft = _as_searched(draft, chain.placement)
    if recomputes:
        return _settled(draft, chain, partial(_best_split, recipe=recipe, chain=chain))
    return _best_split(draft, recipe, chain)


def pieces_of(config: Config, model: ModelConfig) -> ModelWork:
    """Return the FLOPs and bytes of a run's embedding, layers, head and multi-token prediction.

    Args:
        model: the model whose work is counted. This may differ from the configuration's model.
    """
    par = config.parallel
    gathers = Gathers()
    if config.gathers_fp8:
        gathers = Gathers(config.weight_replicas, config.expert_replicas, par.shards_weights)
    counted = pieces(
        model,
        config.batch.sequence,
        config.batch.micro_batch,
        tp=par.tensor_model_parallel_size,
        cp=par.context_parallel_size,
        ep=par.expert_model_parallel_size,
        etp=par.etp,
        element_bytes=config.precision.element_bytes,
        modules=par.offload_modules,
        gathers=gathers,
    )
    return counted.on(par.pipeline_model_parallel_size)


def _empty(config: Config, work: ModelWork) -> Plan:
    """Return a plan whose table has no passes, without multi-token prediction.

    Args:
        work: the work of embedding, layers and head.
    """
    model = config.model
    par = config.parallel
    ranks = par.pipeline_model_parallel_size
    shares = work.shares
    if par.vocab_parallel_pipeline:
        shares = ranks
    own = own_parts(config)
    state, stored = bytes_of_parameter(config, own.values())
    of_expert, _ = bytes_of_parameter(config, own.values(), experts=True)
    return Plan(
        schedule=_without_passes(Placement(tuple(range(ranks)), ranks)),
        counts=(),
        pieces=replace(work, depths=(), shares=shares),
        state=state,
        of_expert=of_expert,
        whole=whole_parameter(config),
        stored=stored,
        tied=model.tied,
        vocab_weights=(model.padded_vocab_size or 0) * model.hidden,
        tp=par.tensor_model_parallel_size,
        expert_ranks=par.expert_model_parallel_size * par.etp,
        own=own,
        given=given_costs(config),
    )


def _without_passes(place: Placement) -> Schedule:
    """Return a table without passes, which only says which rank has which stage."""
    return Schedule("", place, 1, ((),) * place.num_ranks)


def _chain(config: Config, recipe: Recipe, draft: PlanDraft) -> Schedule:
    """Return the table with the passes of the main model's layers only.

    Overlapped pairs of passes, multi-token prediction and a split vocabulary are added later. If a
    search finds no order within the memory limit, an order beyond the limit is returned.

    Args:
        recipe: says which order of passes to make.
        draft: says what the stages of a table cost.
    """
    try:
        return recipe.chain(draft)
    except ScheduleError:
        if recipe.search is None:
            raise
        # No order fits the memory: the plan of one that does not says by how much.
        return replace(recipe, table=schedule_of(config, recipe.microbatches)).chain(draft)


def _as_searched(draft: PlanDraft, place: Placement) -> PlanDraft:
    """Return the draft with the layers of each stage fixed as the draft splits them for `place`."""
    return replace(draft, counts=draft.plan(_without_passes(place)).counts)


def _settled(draft: PlanDraft, chain: Schedule, make: Callable[[PlanDraft], Plan]) -> Plan:
    """Return a plan whose costs count the microbatches that its own table recomputes.

    Which microbatches recompute depends on how many are in flight in the table. The table may
    depend on the costs of recomputation. So a first plan counts the microbatches in flight in
    `chain`, the next plan the ones in the first plan's table, until two plans agree. After four
    plans a stage's fraction of microbatches that recompute nothing may only rise. The costs then
    count at least the activations that the table keeps.

    Args:
        chain: the table as `_chain` returned it.
        make: takes a draft and returns its plan.
    """
    draft = _keeping(draft, chain)
    for number in count(1):
        plan = make(draft)
        again = _keeping(draft, plan.schedule, falls=number <= _ROUNDS)
        # The plan keeps the costs under which its table was made: under any other costs,
        # `schedules show` would draw another table.
        if again.base.pieces.kept == draft.base.pieces.kept:
            break
        draft = again
    return plan


def _keeping(draft: PlanDraft, table: Schedule, *, falls: bool = True) -> PlanDraft:
    """Return the draft with the fraction of each stage's microbatches that recompute nothing.

    The fraction follows from --num-microbatches-with-partial-activation-checkpoints. Without that
    flag the draft is returned unchanged.

    Args:
        table: says how many microbatches are in flight on each stage.
        falls: whether a stage's fraction may become smaller than the draft's.
    """
    config = draft.config
    some = config.model.num_microbatches_with_partial_activation_checkpoints
    if not some:
        return draft
    # Both kinds of microbatch are counted, and the plan mixes them by the table's window.
    counted = draft.base.pieces
    fractions = kept_shares(table, some)[: table.placement.main]
    if counted.kept:
        whole, before = counted.kept
        if not falls:
            fractions = tuple(map(max, before, fractions))
    else:
        without = replace(config.model, recompute_granularity=None, recompute_activations=False)
        whole = replace(pieces_of(config, without), shares=counted.shares)
    counted = replace(counted, kept=(whole, fractions))
    return replace(draft, base=replace(draft.base, pieces=counted))


def _best_split(draft: PlanDraft, recipe: Recipe, chain: Schedule) -> Plan:
    """Return the finished plan with the best choice of ranks for multi-token prediction.

    Other choices, such as the layers of each stage, are made for each choice of ranks.

    Args:
        recipe: says how the table is made.
        chain: the table as `_chain` returned it.
    """
    # Each choice of ranks has a split of its own; the best is finished.
    choices = ranks_of_depths(draft.config, chain.placement)
    ways = [_split(draft, replace(recipe, depths=ranks), chain) for ranks in choices]
    if len(ways) > 1:
        ways.sort(key=lambda way: _rank(way[2], draft.config))
    best, made, plan = ways[0]
    return _finished(best, made, plan.schedule)


def _split(draft: PlanDraft, recipe: Recipe, chain: Schedule) -> tuple[PlanDraft, Recipe, Plan]:
    """Add passes to a table, and choose the layers of each stage if the layout is `auto`.

    Overlapped pairs, multi-token prediction and a shared vocabulary are added as the recipe says.

    Args:
        recipe: says how the table is made.
        chain: the table as `_chain` returned it.
    Returns: (the draft with the layers of each stage, `recipe` as given, the plan).
    """
    plan = draft.plan(_with_ends(recipe, chain, draft))
    par = draft.config.parallel
    if par.pipeline_model_parallel_layout == AUTO:
        split = balanced_by_cost(plan, par.memory_limit_gib, recipe.linked)
        draft = replace(draft, counts=split.counts, base=replace(draft.base, before=split.before))
        # Pairs and depths again, now under the costs of this split.
        plan = draft.plan(_with_ends(recipe, chain, draft))
    return draft, recipe, plan


def balanced_by_cost(plan: Plan, limit_gib: float | None, price: Callable[[Costs], Costs]) -> Plan:
    """Return the plan after moving layers between stages so that the simulated step is shortest.

    Its field `before` is the plan with an even split.

    Args:
        limit_gib: memory limit of a rank in GiB; None for no limit.
        price: takes the costs of a split and returns the costs under which it is simulated.
    """
    even = replace(plan, counts=nearly_even(len(plan.pieces.layers), plan.schedule.placement.main))
    judge = Judge(plan.schedule, plan.pieces, price=price)
    if limit_gib is not None:
        limit = limit_gib * GIB

        # A layer takes its state along, so every split leaves other room for activations.
        def room(counts: tuple[int, ...]) -> list[float]:
            return [limit - least for least in replace(even, counts=counts).least_bytes]

        judge = replace(judge, limit=room)
    return replace(even, counts=search(judge), before=even)


def _rank(plan: Plan, config: Config) -> tuple[bool, float]:
    """Return a key to sort plans: (whether the memory limit is exceeded, makespan)."""
    limit = config.parallel.memory_limit_gib
    return limit is not None and max(plan.peak_bytes) > limit * GIB, plan.timeline.makespan


def _with_ends(recipe: Recipe, chain: Schedule, draft: PlanDraft) -> Schedule:
    """Return `chain` with overlapped pairs, multi-token prediction and split vocabulary.

    Args:
        recipe: says which of the three to add, and which ranks have multi-token prediction.
        chain: the table as `_chain` returned it.
        draft: says what the stages of a table cost.
    """
    with _flags_named(draft.config):
        paired = recipe.with_pairs(chain, draft)
    return recipe.with_ends(paired, draft)


def _finished(draft: PlanDraft, recipe: Recipe, table: Schedule) -> Plan:
    """Return the plan of a table, after adding offload and sharding as the recipe says.

    Args:
        draft: says what the stages of a table cost.
        recipe: says how the table is made.
        table: the table with overlapped pairs, multi-token prediction and split vocabulary.
    Raises: ConfigError if the plan does not fit the memory.
    """
    config = draft.config
    # Before the rest of the recipe, which may take seconds, and then of its result.
    for part in PARTS:
        part.check(config, table, draft)
    with _flags_named(config):
        built = recipe.finish(table, draft)
    for part in PARTS:
        part.check_made(config, built.table, recipe)
    plan = replace(
        draft.plan(built.table),
        recipe=replace(recipe, step=step_of(config, built.table), replicas=config.copies_state),
        own=own_parts(config, built.plain, built.table),
    )
    refuse_too_much(plan, config, capacity_of(config))
    return plan


@contextmanager
def _flags_named(config: Config) -> Iterator[None]:
    """Turn an error about a field of a `Recipe` of a table into one that names the user's flags."""
    try:
        yield
    except Refused as error:
        for part in PARTS:
            if part.name == error.part:
                raise part.refused(config, error) from None
        raise


def with_batch(plan: Plan, config: Config) -> Plan:
    """Return a plan for another batch size, with the same layers on the same ranks.

    If the number of microbatches stays the same, so does the plan.

    Args:
        config: the configuration with the other batch size.
    Raises: ScheduleError or ConfigError if the schedule has no table for that number of
        microbatches, or if the plan does not fit the memory.
    """
    if config.num_microbatches == plan.schedule.num_microbatches:
        return plan
    for part in PARTS:
        config = part.chosen(config, plan)
    place = plan.schedule.placement
    main = replace(place.own_chain, vocabulary=False)
    depths = place.rank_of[place.main :][: place.depths]
    recipe = replace(recipe_of(config), depths=depths, vocabulary=place.vocabulary)
    if recipe.search is not None:
        # Layers stay where they are, so the search has no choice of stages.
        recipe = replace(recipe, search=replace(recipe.search, placements=(main,)))
    # Back to what `plan_of` begins with, but with the layers where they are.
    base = replace(plan, pieces=replace(plan.pieces, depths=()), own=own_parts(config))
    draft = PlanDraft(config, base, plan.pieces.depths, plan.counts)
    chain = _chain(config, recipe, draft)
    # A user's function may return other stages for another number of microbatches.
    if chain.placement != main:
        raise ConfigError(
            f"--pipeline-schedule {chain.name} has other stages for {config.num_microbatches} "
            f"microbatches than for {plan.schedule.num_microbatches}, and layers stay where they "
            "are while a batch grows"
        )
    make = partial(_of_few, recipe=recipe, chain=chain)
    return _settled(draft, chain, make) if base.pieces.kept else make(draft)


def _of_few(draft: PlanDraft, recipe: Recipe, chain: Schedule) -> Plan:
    """Return the plan of a batch that may be too small for some settings of the recipe.

    If it is too small for a setting, such as offload, the plan is made without it.

    Args:
        draft: says what the stages of a table cost.
        recipe: says how the table is made.
        chain: the table as `_chain` returned it.
    """
    try:
        return _finished(draft, recipe, _with_ends(recipe, chain, draft))
    except NothingToDo as error:
        part = next(part for part in PARTS if part.name == error.part)
        config = part.without(draft.config)
        # The part's field of the recipe as flags without it would say; all else stays.
        fewer = {part.name: getattr(recipe_of(config), part.name)}
        return _of_few(replace(draft, config=config), replace(recipe, **fewer), chain)
