"""Turn the flags of `megapipe schedules` into a recipe, and build the table of `show`.

`show` has one recipe from all its flags (`composed`). `compare` adds the same parts to several
schedules (`with_parts`). described.py explains the table that was built.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

from megapipe.commands.progress import Progress
from megapipe.schedule import Costs, Schedule, ScheduleError, entry_of, is_file, load
from megapipe.schedule.core.cuts import Cutting
from megapipe.schedule.families.offload.asked import Offload
from megapipe.schedule.families.offload.solve import FEW_TRIES, tables
from megapipe.schedule.families.sharding.asked import Sharding
from megapipe.schedule.families.sharding.runs import SHARDS
from megapipe.schedule.families.step.asked import NO_STEP, StepPasses
from megapipe.schedule.ingredients import FixedCosts, Pairing, Search, placements
from megapipe.schedule.kinds import Kind
from megapipe.schedule.patterns import check_size
from megapipe.schedule.recipe import Built, Recipe
from megapipe.schedule.search.offloaded import searched
from megapipe.schedule.shapes.pairs.searched import search_pairs
from megapipe.schedule.simulate import simulate
from megapipe.schedule.verify import verify
from megapipe.schedule.views.features.moved import price_copies
from megapipe.schedule.views.features.sliced import in_slices

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
    "step": {kind for kind in Kind if kind.traits.per_stage} - {Kind.P},
    "replicas": {Kind.P},
}
"""The flags that add passes to a table and give their times, with the kinds of these passes."""
NO_LIMIT = "--copies fits and needed choose within a limit. Add --memory 4."
_OF_SEARCH = ("placement", "objective", "effort")
"""Flags that only zb-auto takes."""


@dataclass(frozen=True)
class Composed:
    """The schedule table that `megapipe schedules show` draws.

    Attributes:
        recipe: the settings from which the table was built: name, sizes and what flags add.
        built: the table without passes around the step, and the tables from which it was made.
        schedule: the finished table, with optimizer and gradient passes around the step.
        notes: for a table from a file, a line for each flag whose passes the file already has.
    """

    recipe: Recipe
    built: Built
    schedule: Schedule
    notes: list[str]


def composed(args: Namespace) -> Composed:
    """Build the schedule table that the flags `args` of `show` ask for.

    `args` is changed. `args.costs` gets the numbers of other flags, such as --vocabulary. If
    --memory has a limit for each rank, the largest limit is put in place of the list. A flag that
    adds passes, such as --shard, becomes None if the table's file already has these passes.
    Raises: ScheduleError for flags that contradict each other, and for a table that cannot be
        built. If memory is the problem, the error says how much is enough.
    """
    wants_pairs = args.pairs is not None
    refuse_idle(
        args,
        {
            "--split-backwards is of --pairs. Add that, or leave it out.": (
                args.split_backwards and not wants_pairs
            ),
            "--no-pairs and --pairs contradict each other. Leave one of them out.": (
                args.no_pairs and wants_pairs
            ),
            "--option is of a name of the catalogue or a function, not of a file.": (
                args.option and is_file(args.name)
            ),
        },
    )
    args.costs = stated(args.costs, args)
    notes: list[str] = []
    if is_file(args.name):
        notes = _only_costs(args)
    if args.copies == "needed" and args.memory is None:
        notes.append("--copies needed copies nothing without a limit: --memory gives one")
    # --post-validation adds passes around the step even without --step. An error must name the
    # flag that the user has given.
    flags = dict(FLAGS)
    if args.post_validation and not args.step:
        flags["step"] = "--post-validation"
    if problems := list(recipe_of(args).problems(flags)):
        raise ScheduleError(" ".join(problems))
    try:
        recipe = _with_searches(recipe_of(args), args)
        built = recipe.build(FixedCosts(args.costs, args.memory, len(recipe.depths)))
        # A table of the catalogue comes verified, and to verify a large one again takes seconds.
        changed = recipe.search is not None or recipe.cuts or recipe.pairs is not True
        if changed or args.memory is not None or built.table is not built.chain:
            _check_room(built.table, args)
        schedule = recipe.around(built.table, args.costs)
    except ScheduleError as error:
        raise ScheduleError(_remedied(error, args)) from None
    return Composed(recipe, built, schedule, notes)


def _check_room(table: Schedule, args: Namespace) -> None:
    """Raise ScheduleError if the table cannot be run or a rank holds more than --memory.

    A list of limits, one for each rank, is replaced in `args` by the largest limit.
    """
    limits = args.memory
    if isinstance(limits, tuple):
        # The verifier and the figures know one limit for all ranks.
        args.memory = max(limits)
        peaks = simulate(table, args.costs).peak
        for rank, (held, most) in enumerate(zip(peaks, limits, strict=True)):
            # Sums of floats differ by their order, so a peak may be a hair over its own sum.
            if held > most * (1 + 1e-9):
                raise ScheduleError(
                    f"{table.name}: rank {rank} holds {held:g}, over its --memory {most:g}."
                )
    verify(table, memory=args.memory, costs=args.costs)


def refuse_idle(args: Namespace, own: Mapping[str, object]) -> None:
    """Refuse flags that have no effect, or contradict each other.

    Args:
        args: the parsed flags of `show` or `compare`.
        own: {sentence of an error: whether it applies}, for flags that only one command has.
    Raises: ScheduleError with the sentence of every mistake.
    """
    copies = args.copies or args.copy_ratio
    problems = {
        "--copied-chunks is of --copies. Add --copies all, or leave it out.": (
            args.copied_chunks and not copies
        ),
        "--copies and --solve both say when activations are copied. Leave one out.": (
            args.copies and args.solve
        ),
        NO_LIMIT: args.copies == "fits" and args.memory is None,
        "--shard and --shard-gradients contradict each other. Leave one of them out.": (
            args.shard is not None and args.shard_gradients
        ),
        **own,
    }
    if found := [text for text, holds in problems.items() if holds]:
        raise ScheduleError(found)


def recipe_of(args: Namespace) -> Recipe:
    """Return the recipe, the settings of the table to build, that the flags of `show` ask for.

    Raises: ScheduleError for flags that do not go with the schedule.
    """
    order = _sliced(args) if args.slices else _order(args)
    pairs: bool | Pairing = not args.no_pairs
    if args.pairs is not None:
        pairs = Pairing(args.split_backwards, args.pairs)
    return replace(with_parts(order, args), pairs=pairs)


def with_parts(order: Recipe, args: Namespace) -> Recipe:
    """Return `order`, the settings of forwards and backwards, with the passes that flags add.

    Flags are --depths (multi-token prediction), --vocabulary (split over ranks), --copies (to the
    host), --shard (weights) and --step (optimizer).
    """
    offload = None
    if args.copies or args.copy_ratio:
        # --copy-ratio alone copies wherever a copy is in time. --solve chooses what fits.
        when = args.copies
        if when is None:
            when = "fits" if args.solve else "all"
        # --copies tries as few changes as a run does, --solve as many as take half a second.
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
        replicas=args.replicas is not None,
    )


def _step(args: Namespace) -> StepPasses:
    """Return the passes around a step, such as the optimizer's, by --step and --post-validation."""
    if isinstance(args.step, StepPasses):
        return args.step
    if args.step is None and not args.post_validation:
        return NO_STEP
    # With post-validation no rank waits for the others before its update.
    return StepPasses.whole(args.costs, barrier=not args.post_validation)


def stated(costs: Costs, args: Namespace) -> Costs:
    """Return the costs with the times that --vocabulary, --shard, --step and so on give."""
    numbers = {**(args.vocabulary or {}), **(args.shard or {}), **(args.replicas or {})}
    # --step may name passes, and then has no numbers.
    if not isinstance(args.step, StepPasses):
        numbers |= args.step or {}
    costs = replace(costs, **numbers)
    # Copies are priced last: their time is a multiple of the forward.
    if args.copy_ratio:
        return price_copies(costs, args.copy_ratio)
    return costs


def _only_costs(args: Namespace) -> list[str]:
    """Set flags to None if they ask for passes that the file already has; return a line for each.

    So a file that `show --shard` has written can be shown with --shard again. Call `stated`, which
    reads these flags, before. With --solve, --switch or --post-validation no flag is changed.
    """
    notes: list[str] = []
    given = [flag for flag in _PASSES if getattr(args, flag) is not None]
    # These three flags ask for passes of another kind or order, which the file does not have.
    if not given or args.solve or args.switch or args.post_validation:
        return notes
    kinds = load(args.name).kinds
    for flag in given:
        if there := sorted(kinds.intersection(_PASSES[flag])):
            setattr(args, flag, None)
            name = flag.replace("_", "-")
            notes.append(f"{args.name} has {', '.join(there)}: --{name} states what they take")
    return notes


def _given(args: Namespace, *names: str) -> dict[str, Any]:
    """Return {name: value} of the flags in `names` that were given."""
    values = {name: getattr(args, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _named(names: Iterable[str], between: str = ", ") -> str:
    """Return the flags of these names, separated by `between`."""
    return between.join(f"--{name}" for name in names)


def _order(args: Namespace) -> Recipe:
    """Return the settings of the table that NAME of `show` names: a schedule's, or a file's.

    Raises: ScheduleError for a flag that this schedule does not take, and for a missing flag.
    """
    if is_file(args.name):
        # The file has its own size, and its order is not searched.
        if given := _given(args, "pp", "microbatches", "chunks", *_OF_SEARCH):
            raise ScheduleError(f"{args.name} says these itself; leave out {_named(given)}")
        table = load(args.name)
        return Recipe(args.name, table.placement.num_ranks, table.num_microbatches, table=table)
    entry = entry_of(args.name)
    options = _given(args, *_OF_SEARCH)
    if options and not entry.searched:
        flags = _named(options, " and ")
        raise ScheduleError(f"only zb-auto takes {flags}, {args.name.lower()} is fixed")
    if missing := [name for name in ("pp", "microbatches") if getattr(args, name) is None]:
        flags = _named(missing, " and ")
        raise ScheduleError(f"show {args.name} needs {flags}, such as --pp 4 --microbatches 8")
    size = args.pp, args.microbatches, args.chunks
    recipe = Recipe(args.name, *size, options=tuple(args.option or ()))
    if entry.searched:
        return replace(recipe, search=_search(args, recipe))
    if args.as_published:
        return recipe
    costs = args.costs
    if args.depths and isinstance(costs.f, tuple):
        # The costs of depths are at the end, and the order is of the stages before them.
        costs = costs.of_positions(recipe.chain(FixedCosts()).placement.chain)
    return replace(recipe, fitted=costs)


def _search(args: Namespace, recipe: Recipe) -> Search:
    """Return the settings of zb-auto's search for a table of the recipe's size."""
    objective = args.objective or "makespan"
    # A given --effort has no limit of CPU seconds, so that equal efforts give equal tables.
    effort, seconds = _LONGEST
    if args.effort:
        effort = args.effort
        seconds = inf
    # The size is checked before the placements, whose search space grows with it.
    check_size(args.name, recipe.ranks, recipe.microbatches, args.chunks or 1)
    places = placements(
        recipe.ranks, recipe.microbatches, args.placement, args.chunks, args.costs, objective
    )
    return Search(tuple(places), objective, effort, seconds, progress=Progress())


def _sliced(args: Namespace) -> Recipe:
    """Return the recipe of the schedule, with microbatches that --slices cuts in slices.

    Raises: ScheduleError for flags that only zb-auto takes, and for a schedule that cannot be cut.
    """
    if given := _given(args, *_OF_SEARCH):
        raise ScheduleError(f"--slices cuts a table of F, B and W: leave out {_named(given)}")
    # Before activations are copied away, the order may hold more than the limit.
    limit = args.memory
    if args.copy_ratio or args.copies or isinstance(limit, tuple):
        limit = None
    recipe = in_slices(
        args.name,
        args.pp,
        args.microbatches,
        args.costs,
        cutting=cutting(args),
        chunks=args.chunks,
        memory=limit,
    )
    if isinstance(args.cuts, tuple):
        recipe = replace(recipe, cuts=args.cuts)
    if args.as_published:
        recipe = replace(recipe, fitted=None)
    return replace(recipe, options=(*recipe.options, *(args.option or ())))


def _with_searches(recipe: Recipe, args: Namespace) -> Recipe:
    """Return the recipe with the tables that zb-auto finds under --pairs or --solve.

    --pairs searches for an order in which F and B run together as pairs. --solve chooses what to
    copy to the host, and also tries the orders of other schedules.
    Raises: ScheduleError for flags that narrow the choice of --solve.
    """
    if recipe.search is None or recipe.cuts:
        return recipe
    choice = _given(args, "chunks", *_OF_SEARCH)
    size = (recipe.ranks, recipe.microbatches)
    if isinstance(recipe.pairs, Pairing):
        found = search_pairs(
            *size, costs=args.costs, memory=args.memory, progress=Progress(), **choice
        )
        return replace(recipe, table=found, pairs=True)
    if recipe.offload is None or not args.solve or recipe.sharding is not None:
        return recipe
    if choice:
        raise ScheduleError(
            f"show {args.name} --solve looks among all stages per rank and placements for the "
            f"least makespan: leave out {_named(choice)}, or solve a schedule by its name"
        )
    among = (*tables(*size, args.costs), *searched(*size, args.costs, args.memory))
    return replace(recipe, table=among[0], offload=replace(recipe.offload, other=among))


def cutting(args: Namespace) -> Cutting:
    """Return how --slices, --cuts and --documents cut each sequence into slices.

    Raises: ScheduleError if --cuts gives another number of lengths than there are slices.
    """
    how = args.cuts or "work"
    if isinstance(how, tuple):
        if len(how) != args.slices:
            raise ScheduleError(
                f"--cuts gives {len(how)} length(s), and --slices {args.slices} needs "
                f"{args.slices}: give one for each slice, or --cuts equal"
            )
        # The lengths themselves replace these equal cuts later; see `_sliced`.
        how = "equal"
    return Cutting(args.slices, how, args.documents or 1)


def _remedied(error: ScheduleError, args: Namespace) -> str:
    """Return the text of an error. If memory was the problem, a --memory that is enough follows."""
    text = str(error)
    problems = text.split("\n  ")
    single = len(problems) == 2
    if single:
        text = " ".join(problems)
    peaks = re.findall(r"over the memory limit of \S+; the rank holds up to (\S+)", text)
    if not peaks:
        return text
    joint = "; " if single else "\n"
    text += f"{joint}--memory {ceil(max(map(float, peaks)))} is enough for it"
    # `compare` has no table with these parts, so it would answer another question.
    if not _given(args, *_PASSES, "pairs", "slices"):
        text += "; `compare` with the same --memory shows what fits"
    return text
