"""The recipe of a run's table, from its flags."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megapipe.config import Config
from megapipe.errors import ConfigError, ScheduleError
from megapipe.plan.families.offload import Copies
from megapipe.plan.shapes.slices import cuts_of, own_slices
from megapipe.plan.split import (
    chunks_of,
    given_costs,
    of_chain,
    other_stages,
    placements,
    schedule_name,
)
from megapipe.schedule import Costs, Schedule, entry_of, is_file
from megapipe.schedule.costs import UNIT
from megapipe.schedule.families.offload.asked import Offload
from megapipe.schedule.families.sharding.asked import Sharding
from megapipe.schedule.families.sharding.runs import GATHERS, SHARDS
from megapipe.schedule.families.step.asked import StepPasses
from megapipe.schedule.ingredients import FixedCosts, Pairing, Search
from megapipe.schedule.kinds import Kind
from megapipe.schedule.patterns import GROUP_SIZE
from megapipe.schedule.recipe import Recipe

EFFORT = 1.0
"""Effort of a search for a run."""
SECONDS = 3.0
"""CPU seconds after which it takes the best order so far."""
SHARE = 0.2
"""The fraction of a forward and of an input gradient that counts as communication.

--pipeline-costs may give another.
"""


def recipe_of(config: Config) -> Recipe:
    """Return the recipe of the table that the flags ask for.

    A recipe is the settings from which a table of passes is made. The field `depths`, the ranks of
    multi-token prediction, stays empty: `split.ranks_of_depths` lists choices for it.

    Raises: ConfigError, ScheduleError for flags that no table can satisfy.
    """
    par = config.parallel
    order = order_of(config, config.num_microbatches)
    # Without the flag an order keeps its own pairs, such as DualPipe's, if they hide anything.
    pairs = order.pairs
    if par.hides and par.overlap_moe_expert_parallel_comm:
        pairs = Pairing(par.delay_wgrad_compute, SHARE)
    sharding = None
    if par.shards_grads and config.weight_replicas > 1:
        sharding = Sharding(weights=par.shards_weights)
    return replace(
        order,
        pairs=pairs,
        vocabulary=par.vocab_parallel_pipeline,
        offload=_offload(config, any_order=order.search is not None),
        sharding=sharding,
        lenient=True,  # a plan that does not fit says by how much
    )


def order_of(config: Config, microbatches: int) -> Recipe:
    """Return the recipe of the order of passes, with its stages and slices.

    Unlike `recipe_of`, this adds no offload, sharding or shared vocabulary, and no overlapped pairs
    besides the order's own.

    Args:
        microbatches: the number of microbatches of a step.
    Raises: ConfigError if --pipeline-schedule has another number of stages than the flags or
        --pipeline-costs.
    """
    par = config.parallel
    name = schedule_name(config)
    ranks = par.pipeline_model_parallel_size
    recipe = Recipe(name, ranks, microbatches, cuts=cuts_of(config), pairs=par.hides)
    if not is_file(name):
        entry = entry_of(name)
        # A search knows its stages only when it ends, so that nothing can be compared here.
        if entry.searched:
            return replace(recipe, search=_search(config, microbatches))
        options: list[tuple[str, Any]] = [*own_slices(config)]
        if entry.grouped:
            options.append((GROUP_SIZE, par.microbatch_group_size_per_virtual_pipeline_stage))
        recipe = replace(recipe, options=tuple(options))
        # Other orders have a number of their own, and `other_stages` compares.
        if entry.chunks is None:
            recipe = replace(recipe, chunks=chunks_of(config))
    # Made under no costs, only to see its stages.
    made = recipe.chain(FixedCosts())
    given = given_costs(config)
    if given is not None:
        recipe = replace(recipe, fitted=of_chain(config, given, made.placement))
    if problem := other_stages(config, made):
        raise ConfigError(problem)
    return recipe


def _search(config: Config, microbatches: int) -> Search:
    par = config.parallel
    objective = "makespan"
    if par.enable_optimizer_post_validation:
        # Steps follow each other without a barrier: a rank may begin one while others end theirs.
        objective = "period"
    # A small table is searched as well in less time.
    effort = min(EFFORT, microbatches * par.pipeline_model_parallel_size / 64)
    return Search(placements(config), objective, effort, seconds=SECONDS)


def _offload(config: Config, *, any_order: bool) -> Offload | None:
    """Return the settings for offload and recomputation in the table; None for neither.

    With --memory-limit-gib, activations that do not fit are moved even if no flag asks for that.

    Args:
        any_order: --pipeline-schedule names a search, so that another order may be taken if it fits
            better.
    """
    limit = config.parallel.memory_limit_gib is not None
    asked = Copies.asked(config)
    if asked is None:
        # --reschedule-after searches tables in which nothing moves.
        if limit and config.parallel.reschedule_after is None:
            return Offload("needed", any_order=any_order)
        return None
    when = "all"
    if limit and asked.chunks is None:
        when = "fits"
    return Offload(when, chunks=asked.chunks)


def schedule_of(config: Config, microbatches: int) -> Schedule:
    """Return the table of the stages that the flags ask for, without multi-token prediction.

    If the order comes from a search, the search here is very short, because only a plan knows what
    the stages cost.

    Args:
        microbatches: the number of microbatches of a step.
    Raises: ScheduleError if no table has these numbers. ConfigError if --pipeline-schedule has
        another number of stages than the flags or --pipeline-costs.
    """
    recipe = order_of(config, microbatches)
    # Hardly any effort, on the last placement: the one with the most stages.
    if recipe.search is not None:
        chunks = recipe.search.placements[-1].num_stages // recipe.ranks
        recipe = replace(recipe, search=None, chunks=chunks, options=(("effort", 0.01),))
    return recipe.chain(FixedCosts())


def step_of(config: Config, table: Schedule) -> StepPasses:
    """Return the once-per-step passes that the flags ask for, such as reductions of gradients.

    With --enable-optimizer-post-validation the update is one of these passes. Without it the update
    runs after the table, when the gradient norm is known.

    Args:
        table: the table of passes, perhaps from a user's file.
    Raises: ScheduleError for a table with validation (V) or sharding without the flags for these.
    """
    par = config.parallel
    late = par.enable_optimizer_post_validation
    if Kind.V in table.kinds and not late:
        raise ScheduleError(
            f"{table.name} has V, the validation of an update that did not wait for all ranks. Add "
            "--enable-optimizer-post-validation, or leave V out of the table."
        )
    several = config.weight_replicas > 1
    sharded = several and par.shards_grads
    there = sorted(table.kinds & SHARDS)
    gathers = bool(GATHERS & table.kinds)
    if there and (not sharded or gathers != par.shards_weights):
        strategy = "optim_grads_params" if gathers else "optim_grads"
        raise ScheduleError(
            f"{table.name} has {', '.join(there)}, for tensors that are shards between runs of "
            f"passes. Add --use-megatron-fsdp --data-parallel-sharding-strategy {strategy} on "
            "several data-parallel ranks, or leave them out of the table."
        )
    # Each run of passes reduces its gradients, and the next one gathers the updated weights.
    if sharded and par.shards_weights:
        return StepPasses()
    return StepPasses(
        reduce=not sharded and (late or (several and par.overlap_grad_reduce)),
        gather=several and config.gathers_later,
        validate=late,
    )


def whole_step(table: Schedule, config: Config, costs: Costs = UNIT) -> Schedule:
    """Return the table with the passes that run once per step, as flags ask for them.

    Updates and validations that the table has already are placed anew.

    Args:
        costs: the times of passes. They decide where the added passes stand.
    """
    recipe = Recipe(table.name, step=step_of(config, table), replicas=config.copies_state)
    # A file's U and V stand where its author put them; a run puts them where its costs say.
    return recipe.around(table.without({Kind.U, Kind.V}), costs)
