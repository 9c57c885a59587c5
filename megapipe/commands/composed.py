"""The table that `show` draws: its flags as a recipe, and the lines that describe what the recipe made."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import ceil, inf
from typing import Any

from megapipe.commands.progress import Progress
from megapipe.schedule import Costs, Schedule, ScheduleError, entry_of, is_file, load, simulate, verify
from megapipe.schedule.families.offload.asked import Offload
from megapipe.schedule.families.offload.solve import FEW_TRIES, searched, tables
from megapipe.schedule.families.sharding.asked import Sharding
from megapipe.schedule.families.sharding.runs import SHARDS
from megapipe.schedule.families.step.asked import NO_STEP, StepPasses
from megapipe.schedule.ingredients import Fixed, Search
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Placement
from megapipe.schedule.patterns import check_size
from megapipe.schedule.recipe import Built, Recipe
from megapipe.schedule.search.auto import describe_search, placements
from megapipe.schedule.search.paired import search_pairs
from megapipe.schedule.shapes.pairs.asked import Pairing
from megapipe.schedule.shapes.slices.cuts import Cutting
from megapipe.schedule.views.moved import describe_moves, describe_shards, price_copies
from megapipe.schedule.views.paired import describe_pairs
from megapipe.schedule.views.sliced import describe_keys, describe_slices, in_slices, references

FLAGS = {
    "cuts": "--slices",
    "pairs": "--pairs",
    "vocabulary": "--vocabulary",
    "sharding": "--shard",
    "step": "--step",
}
"""The parts of a recipe, by the flags of `show` that ask for them."""
_LONGEST = 50.0, 55.0
"""Effort and CPU seconds of a search: a minute with start and checks."""
_PASSES: dict[str, Collection[Kind]] = {
    "vocabulary": {kind for kind in Kind if kind.traits.at},
    "copy_ratio": {Kind.O, Kind.L},
    "shard": SHARDS,
    "step": {kind for kind in Kind if kind.traits.per_stage},
}
"""The flags that put passes into a table and state what they take, and the passes."""


def composed(args: argparse.Namespace) -> tuple[Recipe, Schedule, list[str]]:
    """Return the recipe that the flags ask for, its table, and lines that describe it.

    `args.costs` has what the flags state afterwards, and a flag whose passes the file has is cleared.
    Raises: ScheduleError that names the memory which is enough, where a limit is the problem.
    """
    paired = args.pairs is not None
    of_a_file = args.option and is_file(args.name)
    refuse_idle(
        args,
        {
            "--split-backwards is of --pairs. Add that, or leave it out.": args.split_backwards and not paired,
            "--no-pairs and --pairs contradict each other. Leave one of them out.": args.no_pairs and paired,
            "--option is of a name of the catalogue or a function, not of a file.": of_a_file,
        },
    )
    args.costs = stated(args.costs, args)
    said = _only_costs(args) if is_file(args.name) else []
    flags = FLAGS | ({"step": "--post-validation"} if args.post_validation and not args.step else {})
    if problems := list(recipe_of(args).problems(flags)):
        raise ScheduleError(" ".join(problems))
    try:
        recipe = _with_candidates(recipe_of(args), args)
        built = recipe.build(Fixed(args.costs, args.memory, len(recipe.depths)))
        # A table of the catalogue comes verified, and to verify a large one again takes seconds.
        changed = recipe.search is not None or recipe.cuts or recipe.pairs is not True
        if changed or args.memory is not None or built.table is not built.chain:
            _check_room(built.table, args)
        made = recipe.step.around(built.table, args.costs)
    except ScheduleError as error:
        raise ScheduleError(_remedied(error, args)) from None
    return recipe, made, said + _described(built, args)


def _check_room(table: Schedule, args: argparse.Namespace) -> None:
    """Verify the table within --memory, which is the largest of several from then on.

    Raises: ScheduleError for a table that cannot be run, or a rank that holds too much.
    """
    limits = args.memory
    if isinstance(limits, tuple):
        args.memory = max(limits)
        for rank, (held, most) in enumerate(zip(simulate(table, args.costs).peak, limits, strict=True)):
            if held > most * (1 + 1e-9):
                raise ScheduleError(f"{table.name}: rank {rank} holds {held:g}, over its --memory {most:g}.")
    verify(table, memory=args.memory, costs=args.costs)


def refuse_idle(args: argparse.Namespace, own: Mapping[str, object]) -> None:
    """Refuse flags that have nothing to act on, those of `show` and `compare` both.

    Args:
        own: sentences on further flags of the command, and whether each holds.
    Raises: ScheduleError that names each of them.
    """
    copies = args.copies or args.copy_ratio
    problems = {
        "--copied-chunks is of --copies. Add --copies all, or leave it out.": args.copied_chunks and not copies,
        "--copies and --solve both say when activations are copied. Leave one out.": args.copies and args.solve,
        "--copies fits and needed choose within a limit. Add --memory 4.": (
            args.copies in ("fits", "needed") and args.memory is None
        ),
        "--shard and --shard-gradients contradict each other. Leave one of them out.": (
            args.shard is not None and args.shard_gradients
        ),
    }
    if found := [text for text, holds in (problems | dict(own)).items() if holds]:
        raise ScheduleError(found)


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Return the recipe that the flags ask for.

    Raises: ScheduleError for flags that do not go with the schedule.
    """
    order = _sliced(args) if args.slices else _order(args)
    pairs: bool | Pairing = not args.no_pairs
    if args.pairs is not None:
        pairs = Pairing(args.split_backwards, args.pairs)
    return replace(with_parts(order, args), pairs=pairs)


def with_parts(order: Recipe, args: argparse.Namespace) -> Recipe:
    """Return the recipe with depths, vocabulary, copies, shards and the rest of the step that flags ask for."""
    offload = None
    if args.copies or args.copy_ratio:
        when = args.copies or ("fits" if args.solve else "all")
        tries = FEW_TRIES if args.copies else None
        any_order = order.search is not None
        offload = Offload(when, any_order, args.copied_chunks, args.switch, tries)
    sharding = None
    if args.shard is not None or args.shard_gradients:
        sharding = Sharding(weights=not args.shard_gradients)
    return replace(
        order,
        depths=args.depths or (),
        vocabulary=args.vocabulary is not None,
        offload=offload,
        sharding=sharding,
        step=_step(args),
    )


def _step(args: argparse.Namespace) -> StepPasses:
    if isinstance(args.step, StepPasses):
        return args.step
    if args.step is None and not args.post_validation:
        return NO_STEP
    return StepPasses.whole(args.costs, barrier=not args.post_validation)


def stated(costs: Costs, args: argparse.Namespace) -> Costs:
    """Return the costs with what flags of passes state of them."""
    of_step = {} if isinstance(args.step, StepPasses) else args.step or {}
    costs = replace(costs, **(args.vocabulary or {}) | (args.shard or {}) | of_step)
    return price_copies(costs, args.copy_ratio) if args.copy_ratio else costs


def _only_costs(args: argparse.Namespace) -> list[str]:
    """Clear each flag whose passes the file has, as its costs are stated, and return a line for each of them.

    So `show` reads what it has written with the flags that it was written with.
    """
    said: list[str] = []
    given = [flag for flag in _PASSES if getattr(args, flag) is not None]
    if not given or args.solve or args.switch or args.post_validation:
        return said  # the last three ask for passes of another kind or order
    kinds = load(args.name).kinds
    for flag in given:
        if there := sorted(kinds.intersection(_PASSES[flag])):
            setattr(args, flag, None)
            said.append(f"{args.name} has {', '.join(there)}: --{flag.replace('_', '-')} states what they take")
    return said


def _order(args: argparse.Namespace) -> Recipe:
    """Return the recipe of the order alone: a file, or an entry of the catalogue."""
    options = {name: x for name in ("placement", "objective", "effort") if (x := getattr(args, name)) is not None}
    if is_file(args.name):
        given = [f"--{key}" for key in ("pp", "microbatches", "chunks", *options) if getattr(args, key) is not None]
        if given:
            raise ScheduleError(f"{args.name} says these itself; leave out {', '.join(given)}")
        table = load(args.name)
        return Recipe(args.name, table.placement.num_ranks, table.num_microbatches, table=table)
    entry = entry_of(args.name)
    if options and not entry.searched:
        flags = " and ".join(f"--{key}" for key in options)
        raise ScheduleError(f"only zb-auto takes {flags}, {args.name.lower()} is fixed")
    if missing := [f"--{key}" for key in ("pp", "microbatches") if getattr(args, key) is None]:
        raise ScheduleError(f"show {args.name} needs {' and '.join(missing)}, such as --pp 4 --microbatches 8")
    fitted = None if args.as_published else args.costs
    own = tuple(args.option or ())
    recipe = Recipe(args.name, args.pp, args.microbatches, args.chunks, own, fitted)
    return replace(recipe, search=_search(args, recipe)) if entry.searched else recipe


def _search(args: argparse.Namespace, recipe: Recipe) -> Search:
    objective = args.objective or "makespan"
    size = recipe.ranks, recipe.microbatches, args.placement, args.chunks
    effort, seconds = (args.effort, inf) if args.effort else _LONGEST
    check_size(args.name, recipe.ranks, recipe.microbatches, args.chunks or 1)
    places = tuple(placements(*size, args.costs, objective))
    return Search(places, objective, effort, seconds, progress=Progress())


def _sliced(args: argparse.Namespace) -> Recipe:
    """Return the recipe of the order with its microbatches in slices."""
    if said := [f"--{name}" for name in ("placement", "objective", "effort") if getattr(args, name)]:
        raise ScheduleError(f"--slices cuts a table of F, B and W: leave out {', '.join(said)}")
    # What copies take away may be over the limit before.
    limit = None if args.copy_ratio or args.copies or isinstance(args.memory, tuple) else args.memory
    size = args.name, args.pp, args.microbatches, args.costs
    recipe = in_slices(*size, cutting=cutting(args), chunks=args.chunks, memory=limit)
    if isinstance(args.cuts, tuple):
        recipe = replace(recipe, cuts=args.cuts)
    options = (*recipe.options, *(args.option or ()))
    return replace(recipe, options=options, fitted=None if args.as_published else recipe.fitted)


def _with_candidates(recipe: Recipe, args: argparse.Namespace) -> Recipe:
    """Return the recipe with what other searches than that of one order find."""
    if recipe.search is None or recipe.cuts:
        return recipe
    choice: dict[str, Any] = {
        name: x for name in ("chunks", "placement", "objective", "effort") if (x := getattr(args, name)) is not None
    }
    size = recipe.ranks, recipe.microbatches
    if isinstance(recipe.pairs, Pairing):
        found = search_pairs(*size, costs=args.costs, memory=args.memory, progress=Progress(), **choice)
        return replace(recipe, table=found, pairs=True)
    if recipe.offload is None or not args.solve or recipe.sharding is not None:
        return recipe
    if choice:
        said = ", ".join(f"--{name}" for name in choice)
        raise ScheduleError(
            f"show {args.name} --solve looks among all stages per rank and placements for the least makespan: "
            f"leave out {said}, or solve a schedule by its name"
        )
    among = (*tables(*size, args.costs), *searched(*size, args.costs, args.memory))
    return replace(recipe, table=among[0], offload=replace(recipe.offload, other=among))


def _described(built: Built, args: argparse.Namespace) -> list[str]:
    """Return lines on what the recipe made of the order."""
    recipe, table, costs = built.recipe, built.table, args.costs
    lines = _idle_lines(recipe, args) + _idle_of_copies(table.placement, args)
    if args.slices:
        lines += describe_slices(cutting(args), recipe.cuts)
    if recipe.search is not None and recipe.table is None and not recipe.cuts:
        lines += describe_search(built.chain, costs, args.memory, recipe.search.objective)
    if args.pairs is not None and recipe.search is None:
        lines += describe_pairs(built.plain if recipe.depths else built.chain, costs, args.memory)
    if recipe.offload is not None and (recipe.sharding is None or recipe.offload.when == "all"):
        lines += describe_moves(table.without(SHARDS), costs)
    if table.cuts:
        choice = {"cutting": cutting(args), "chunks": args.chunks}
        others = references(args.name, args.pp, args.microbatches, costs, **choice) if args.slices else {}
        lines.append(describe_keys(table, others, costs))
    if recipe.sharding is not None:
        if recipe.offload is not None and recipe.offload.when != "all":
            lines += describe_moves(table, costs)
        lines += describe_shards(table, costs)
    return lines


def _idle_lines(recipe: Recipe, args: argparse.Namespace) -> list[str]:
    """Return lines on --no-pairs and --as-published, which change some orders and others not."""
    if recipe.search is not None:
        given = [flag for flag in ("no_pairs", "as_published") if getattr(args, flag)]
        return [f"--{flag.replace('_', '-')} has no effect on a search" for flag in given]
    terms = Fixed(args.costs, depths=len(recipe.depths))
    made = recipe.chain(terms)
    fitted = args.costs.of_positions(made.placement.chain)
    lines = []
    for flag, otherwise in (
        ("no_pairs", replace(recipe, pairs=True)),
        ("as_published", replace(recipe, fitted=fitted)),
    ):
        if getattr(args, flag):
            effect = "has no effect on this order" if made == otherwise.chain(terms) else "changes this order"
            lines.append(f"--{flag.replace('_', '-')} {effect}")
    return lines


def _idle_of_copies(place: Placement, args: argparse.Namespace) -> list[str]:
    """Return lines on flags of copies whose value changes nothing."""
    chunks = max(len(place.stages_on(rank)) for rank in range(place.num_ranks))
    lines = []
    if args.copied_chunks is not None and args.copied_chunks >= chunks:
        lines.append(f"--copied-chunks {args.copied_chunks} has no effect: a rank has {chunks} stage(s)")
    if args.switch == 1:
        lines.append("--switch 1 has no effect: each rank has its own way to the host")
    return lines


def cutting(args: argparse.Namespace) -> Cutting:
    """Return how --slices, --cuts and --documents cut the sequence.

    Raises: ScheduleError if --cuts gives another number of lengths than there are slices.
    """
    how = args.cuts or "work"
    if isinstance(how, tuple) and len(how) != args.slices:
        raise ScheduleError(
            f"--cuts gives {len(how)} length(s), and --slices {args.slices} needs {args.slices}: give one for each "
            "slice, or --cuts equal"
        )
    return Cutting(args.slices, how if isinstance(how, str) else "equal", args.documents or 1)


def _remedied(error: ScheduleError, args: argparse.Namespace) -> str:
    """The error's text, on one line if it has one problem, and the memory that is enough if that was the problem."""
    problems = str(error).split("\n  ")
    text = " ".join(problems) if len(problems) == 2 else str(error)
    if not (held := re.findall(r"over the memory limit of \S+; the rank holds up to (\S+)", text)):
        return text
    enough = ceil(max(map(float, held)))
    added = any(getattr(args, flag) is not None for flag in (*_PASSES, "pairs", "slices"))
    also = "" if added else "; `compare` with the same --memory shows what fits"
    joint = "; " if len(problems) == 2 else "\n"
    return f"{text}{joint}--memory {enough} is enough for it{also}"
