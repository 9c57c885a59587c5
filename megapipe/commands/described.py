"""Describe the table of `show` in lines: what its flags changed, and what its parts cost.

Before it is built, `divided` says how costs of other stages are divided for it.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

from megapipe.commands.composed import cutting, recipe_of
from megapipe.schedule import Costs
from megapipe.schedule.families.sharding.runs import SHARDS
from megapipe.schedule.ingredients import FixedCosts
from megapipe.schedule.passes import Placement
from megapipe.schedule.recipe import Built, Recipe
from megapipe.schedule.search.auto import describe_search
from megapipe.schedule.views.divided import over_stages, said_of
from megapipe.schedule.views.features.moved import describe_moves, describe_shards
from megapipe.schedule.views.features.paired import describe_pairs
from megapipe.schedule.views.features.sliced import describe_keys, describe_slices, references


def divided(args: Namespace) -> tuple[Costs, list[str]]:
    """Return the costs for the stages of the table that `show` names, and lines that say so.

    Costs that name other stages are divided as in `compare`, if they can be. They are returned
    unchanged for a search, which makes as many stages as they name, and with --depths, which costs
    name after the stages.

    Args:
        args: the parsed flags of `show`.
    """
    costs: Costs = args.costs
    if args.depths or not isinstance(costs.f, tuple):
        return costs, []
    # Only a table says how many stages it has, and costs of other stages could not make it.
    order = recipe_of(Namespace(**{**vars(args), "costs": Costs(), "memory": None}))
    if order.search is not None:
        return costs, []
    stages = order.chain(FixedCosts()).placement.chain
    fitted = over_stages(costs, stages)
    if fitted == costs:
        return costs, []
    return fitted, said_of(costs, {stages})


def described(built: Built, args: Namespace) -> list[str]:
    """Return the lines that describe a schedule table of `megapipe schedules show`.

    First come flags without effect. Then come slices of microbatches, zb-auto's search, overlapped
    pairs of passes, copies to the host, and shards of weights, if the table has any.

    Args:
        built: the table, and the tables from which it was made.
        args: the parsed flags of `show`, after `composed`, which clears some of them.
    """
    recipe = built.recipe
    table = built.table
    costs = args.costs
    lines = _idle_lines(recipe, args) + _idle_of_copies(table.placement, args)
    if args.slices:
        cuts = cutting(args)
        if isinstance(args.cuts, tuple):
            cuts = replace(cuts, how="as given")
        lines += describe_slices(cuts, recipe.cuts)
    # The search of pairs and --solve set the table, and zb-auto's own search is then not run.
    if recipe.search is not None and recipe.table is None and not recipe.cuts:
        lines += describe_search(built.chain, costs, args.memory, recipe.search.objective)
    if args.pairs is not None and recipe.search is None:
        # With depths, pairs are formed last of all: `chain` has none yet.
        paired = built.plain if recipe.depths else built.chain
        lines += describe_pairs(paired, costs, args.memory)
    # Copies within a limit are chosen together with shards, so they are described with them.
    offload = recipe.offload
    shards = recipe.sharding is not None
    with_shards = shards and offload is not None and offload.when != "all"
    if offload is not None and not with_shards:
        lines += describe_moves(table.without(SHARDS), costs)
    if table.cuts:
        others = {}
        if args.slices:
            choice = {"cutting": cutting(args), "chunks": args.chunks}
            others = references(args.name, args.pp, args.microbatches, costs, **choice)
        lines.append(describe_keys(table, others, costs))
    if with_shards:
        lines += describe_moves(table, costs)
    if shards:
        lines += describe_shards(table, costs)
    return lines


def _idle_lines(recipe: Recipe, args: Namespace) -> list[str]:
    """Return lines on --no-pairs and --as-published: whether they change the order of passes.

    There is no line for a flag that was not given.
    """
    if recipe.search is not None:
        given = [flag for flag in ("no_pairs", "as_published") if getattr(args, flag)]
        return [f"--{flag.replace('_', '-')} has no effect on a search" for flag in given]
    terms = FixedCosts(args.costs, depths=len(recipe.depths))
    made = recipe.chain(terms)
    fitted = args.costs.of_positions(made.placement.chain)
    # The recipe without the flag. The flag has an effect if that makes another order.
    without = {
        "no_pairs": replace(recipe, pairs=True),
        "as_published": replace(recipe, fitted=fitted),
    }
    lines = []
    for flag, otherwise in without.items():
        if getattr(args, flag):
            effect = "changes this order"
            if made == otherwise.chain(terms):
                effect = "has no effect on this order"
            lines.append(f"--{flag.replace('_', '-')} {effect}")
    return lines


def _idle_of_copies(place: Placement, args: Namespace) -> list[str]:
    """Return a line if --copied-chunks has no effect, and one if --switch has none.

    Args:
        place: on which rank each stage is.
    """
    stages = max(len(place.stages_on(rank)) for rank in range(place.num_ranks))
    lines = []
    if args.copied_chunks is not None and args.copied_chunks >= stages:
        lines.append(
            f"--copied-chunks {args.copied_chunks} has no effect: a rank has {stages} stage(s)"
        )
    if args.switch == 1:
        lines.append("--switch 1 has no effect: each rank has its own way to the host")
    return lines
