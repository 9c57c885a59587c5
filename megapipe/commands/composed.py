"""The table that `show` draws: a schedule with all that flags put into it, in the order of a run."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from math import ceil

from megapipe.commands.progress import Progress
from megapipe.schedule import SCHEDULES, Costs, Schedule, ScheduleError, build, entry_of, is_file, load, verify
from megapipe.schedule.kinds import Kind
from megapipe.schedule.memory.solve import searched, solve, tables
from megapipe.schedule.search.auto import search, told
from megapipe.schedule.search.paired import search_pairs
from megapipe.schedule.transforms.cuts import Cutting
from megapipe.schedule.transforms.vocabulary import with_vocabulary
from megapipe.schedule.views.moved import told_choices, told_copies, told_shares, with_copies
from megapipe.schedule.views.paired import told_pairs
from megapipe.schedule.views.sliced import references, told_keys, told_slices
from megapipe.schedule.weights.runs import GATHERS, REDUCES


def composed(args: argparse.Namespace) -> tuple[Schedule, list[str]]:
    """Return the table of a schedule or file with all that flags put into it, and lines on that.

    `args.costs` has what the flags state afterwards, and a flag whose passes the file has is cleared.
    Raises: ScheduleError that names the memory which is enough, where a limit is the problem.
    """
    if args.pairs and args.vocabulary:
        raise ScheduleError("--pairs are made in a table of F, B and W, not with --vocabulary. Leave one of them out.")
    if args.shard and (args.step or args.post_validation):
        raise ScheduleError(
            "--shard sums gradients after runs of passes, --step and --post-validation once a step. "
            "Leave one of them out."
        )
    args.costs = _stated(args)
    has = _only_costs(args) if is_file(args.name) else []
    try:
        schedule, found = _composed(args)
    except ScheduleError as error:
        raise ScheduleError(_remedied(error, args)) from None
    return schedule, has + found


def _stated(args: argparse.Namespace) -> Costs:
    """The costs with what flags of passes state of them."""
    costs = replace(args.costs, **(args.vocabulary or {}) | (args.shard or {}) | (args.step or {}))
    return with_copies(costs, args.copy_ratio) if args.copy_ratio else costs


_PASSES: dict[str, Collection[Kind]] = {
    "vocabulary": {kind for kind in Kind if kind.traits.at},
    "copy_ratio": {Kind.O, Kind.L},
    "shard": GATHERS | REDUCES,
    "step": {kind for kind in Kind if kind.traits.per_stage},
}
"""The flags that put passes into a table and state what they take, and the passes."""


def _only_costs(args: argparse.Namespace) -> list[str]:
    """Clear each flag whose passes the file has, as its costs are stated, and return a line for each of them.

    So `show` reads what it has written with the flags that it was written with.
    """
    said: list[str] = []
    given = [flag for flag in _PASSES if getattr(args, flag)]
    if not given or args.solve or args.switch or args.post_validation:
        return said  # the last three ask for passes of another kind or order
    kinds = load(args.name).kinds
    for flag in given:
        if there := sorted(kinds.intersection(_PASSES[flag])):
            setattr(args, flag, None)
            said.append(f"{args.name} has {', '.join(there)}: --{flag.replace('_', '-')} states what they take")
    return said


def _composed(args: argparse.Namespace) -> tuple[Schedule, list[str]]:
    """Compose the table in the order of a run: a shared vocabulary or pairs, then copies, then shards of weights."""
    plain, found = _candidates(args)
    schedule, *_ = plain
    solved = partial(_solved, plain, args.costs) if args.solve else None
    if args.copy_ratio and not (solved and args.shard):  # else the solver is asked for what whole weights leave
        if solved:
            schedule, moves = told_choices(plain, args.costs, args.memory)
        else:
            schedule, moves = told_copies(schedule, args.costs, args.memory, args.switch)
        found = found + moves
    if schedule.cuts:
        choice = {"cutting": cutting(args), "chunks": args.chunks}
        others = references(args.name, args.pp, args.microbatches, args.costs, **choice) if args.slices else {}
        found = [*found, told_keys(schedule, others, args.costs)]
    if args.shard:
        schedule, shares = told_shares(schedule, args.costs, args.memory, solved)
        found = found + shares
    return schedule, found


def _remedied(error: ScheduleError, args: argparse.Namespace) -> str:
    """The error's text, on one line if it has one problem, and the memory that is enough if that was the problem."""
    problems = str(error).split("\n  ")
    text = " ".join(problems) if len(problems) == 2 else str(error)
    if not (held := re.findall(r"over the memory limit of \S+; the rank holds up to (\S+)", text)):
        return text
    enough = ceil(max(map(float, held)))
    added = any(getattr(args, flag) for flag in (*_PASSES, "pairs", "slices"))
    also = "" if added else "; `compare` with the same --memory shows what fits"
    joint = "; " if len(problems) == 2 else "\n"
    return f"{text}{joint}--memory {enough} is enough for it{also}"


def _solved(plain: Sequence[Schedule], costs: Costs, memory: float) -> Schedule:
    return solve(plain, costs, memory).schedule


def _candidates(args: argparse.Namespace) -> tuple[list[Schedule], list[str]]:
    """Return the tables without copies and shards. With --solve a search offers several, else there is one."""
    any_order = args.name.lower() in SCHEDULES and entry_of(args.name).searched
    if args.solve and any_order and not (args.slices or args.pairs or args.shard) and args.pp and args.microbatches:
        choices = ("chunks", "placement", "objective", "effort")
        if said := [f"--{name}" for name in choices if getattr(args, name) is not None]:
            raise ScheduleError(
                f"show {args.name} --solve looks among all stages per rank and placements for the least makespan: "
                f"leave out {', '.join(said)}, or solve a schedule by its name"
            )
        size = args.pp, args.microbatches, args.costs
        found = [*tables(*size), *searched(*size, args.memory)]
        return [with_vocabulary(x, args.costs) if args.vocabulary else x for x in found], []
    # What copies take away may be over the limit before.
    limit = None if args.copy_ratio and not args.pairs else args.memory
    unlimited = argparse.Namespace(**vars(args) | {"memory": limit})
    schedule, said = _sliced(unlimited) if args.slices else _schedule(unlimited)
    if args.pairs:
        schedule, said = told_pairs(schedule, args.costs, args.memory)
    if args.vocabulary:
        schedule = with_vocabulary(schedule, args.costs)
        verify(schedule, memory=limit, costs=args.costs)  # ranks may hold a microbatch more
    return [schedule], said


def _sliced(args: argparse.Namespace) -> tuple[Schedule, list[str]]:
    """The schedule that the arguments name, in slices; attention's share is in the costs then."""
    others = ("pairs", "vocabulary", "step", "post_validation", "placement", "objective", "effort")
    if said := [f"--{name.replace('_', '-')}" for name in others if getattr(args, name)]:
        raise ScheduleError(f"--slices cuts a table of F, B and W: leave out {', '.join(said)}")
    choice = {"cutting": cutting(args), "chunks": args.chunks, "memory": args.memory}
    return told_slices(args.name, args.pp, args.microbatches, args.costs, **choice)


def cutting(args: argparse.Namespace) -> Cutting:
    """How --slices, --cuts and --documents cut the sequence."""
    return Cutting(args.slices, args.cuts or "work", args.documents or 1)


def _schedule(args: argparse.Namespace) -> tuple[Schedule, list[str]]:
    """The schedule that the arguments name, a file or an entry of the catalogue, and how well a search did."""
    name = args.name.lower()
    options = {k: x for k in ("placement", "objective", "effort") if (x := getattr(args, k)) is not None}
    if is_file(name):
        said = [f"--{key}" for key in ("pp", "microbatches", "chunks", *options) if getattr(args, key) is not None]
        if said:
            raise ScheduleError(f"{args.name} says these itself; leave out {', '.join(said)}")
        verify(schedule := load(args.name), memory=None if args.pairs else args.memory, costs=args.costs)
        return schedule, []
    searched = name in SCHEDULES and SCHEDULES[name].searched
    if options and not searched:
        raise ScheduleError(f"only zb-auto takes {' and '.join(f'--{key}' for key in options)}, {name} is fixed")
    missing = [f"--{key}" for key in ("pp", "microbatches") if getattr(args, key) is None]
    if missing and entry_of(args.name):
        raise ScheduleError(f"show {args.name} needs {' and '.join(missing)}, such as --pp 4 --microbatches 8")
    ranks, microbatches = args.pp or 1, args.microbatches or 1
    choice = {"chunks": args.chunks, "costs": args.costs, "memory": args.memory}
    if searched and args.pairs:
        return search_pairs(ranks, microbatches, progress=Progress(), **choice, **options), []
    if searched:
        choice |= {} if args.effort else {"effort": 50.0, "seconds": 55.0}  # a minute with start and checks
        report = search(ranks, microbatches, progress=Progress(), **choice, **options)
        return report.schedule, told(report)
    return build(args.name, ranks, microbatches, **choice | ({"memory": None} if args.pairs else {})), []
