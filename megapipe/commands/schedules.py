"""List pipeline schedules, draw or save one, or compare all, on the terminal or as figures."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from megapipe.commands.composed import (
    FLAGS,
    NO_LIMIT,
    composed,
    cutting,
    refuse_idle,
    stated,
    with_parts,
)
from megapipe.commands.described import described, divided
from megapipe.commands.progress import Progress
from megapipe.commands.schedule_flags import STDOUT, parsed
from megapipe.data.files import file_problems, folder_problems, write_complete
from megapipe.doors import as_called
from megapipe.schedule import SCHEDULES, Costs, Schedule, ScheduleError, build, entry_of, is_file
from megapipe.schedule.catalogue import own_entry
from megapipe.schedule.costs import ATTENTION, SHARES, UNIT
from megapipe.schedule.passes import repeated
from megapipe.schedule.patterns import SLICED
from megapipe.schedule.recipe import Recipe
from megapipe.schedule.recipe_line import parts_line, to_line
from megapipe.schedule.text import load, to_csv, to_json
from megapipe.schedule.views.compare import to_table
from megapipe.schedule.views.divided import OWN_COSTS, in_units, said_of
from megapipe.schedule.views.draw import to_svg
from megapipe.schedule.views.features.moved import refuse_unfinished
from megapipe.schedule.views.features.paired import paired_table
from megapipe.schedule.views.figure import Files
from megapipe.schedule.views.page import grid, to_page
from megapipe.schedule.views.perfetto import to_perfetto
from megapipe.schedule.views.study import Comparison, study
from megapipe.schedule.views.study import draw as draw_study
from megapipe.schedule.views.study import to_csv as study_to_csv
from megapipe.schedule.views.terminal import facts, to_terminal
from megapipe.schedule.views.timeline import draw_memory, draw_schedule

NONE = Recipe("")
"""A recipe without any part."""


def main(argv: Sequence[str]) -> int:
    """Run list, show, compare or site, whichever `argv` names. Return the exit status."""
    args = parsed(argv, __doc__)
    run = {"list": run_list, "show": run_show, "compare": run_compare, "site": run_site}
    try:
        return run[args.command](args)
    except ScheduleError as error:
        # The user has not typed `Costs`, but the flag that filled it.
        text = str(error)
        if not text.startswith("Costs."):
            raise
        remedy = ""
        if " stages, but the model is cut in " in text:
            remedy = f" Give one number for all stages, or write the costs of yours: {OWN_COSTS}"
        raise ScheduleError(f"--costs: {text.removeprefix('Costs.')}{remedy}") from None


def _priced(costs: Costs, share: float | None) -> Costs:
    """Return the costs in which a fraction of each pass is communication, by --comm-share.

    Args:
        share: the fraction, such as 0.3; None leaves the costs unchanged.
    """
    if share is None:
        return costs
    return replace(costs, **dict.fromkeys(SHARES, share))


def _attending(costs: Costs, args: Namespace, names: Sequence[str]) -> Costs:
    """Return the costs with the fraction of each pass that attention takes, by --attention-share.

    Args:
        names: the schedules to show or compare. If one is a file whose microbatches are cut in
            slices, --attention-share needs no --slices.
    Raises: ScheduleError for --cuts, --documents or --attention-share without slices.
    """
    sliced_files = False
    if args.attention_share:
        sliced_files = any(is_file(name) and load(name).cuts for name in names)
    whole = not args.slices or args.slices == 1
    without_slices = args.attention_share and not sliced_files
    if whole and (args.cuts or args.documents or without_slices):
        remedy = "give --slices 4 in place of 1"
        if not args.slices:
            remedy = "add --slices 4"
        raise ScheduleError(
            f"--cuts, --documents and --attention-share are of slices: {remedy}, or leave them out"
        )
    if not args.attention_share:
        return costs
    return replace(costs, **dict.fromkeys(ATTENTION, args.attention_share))


def run_list(args: Namespace) -> int:
    """Print a line for each built-in schedule and for each file. Return the exit status 0."""
    print(f"{'name':<17} {'stages':<14} {'split':<6} {'copies':<6} about")
    entries = {**SCHEDULES, **SLICED}
    for name in args.files:
        entries[name] = own_entry(name)
    for name, entry in entries.items():
        # v stands for a number of stages that the user chooses.
        stages = f"{entry.placement} x {entry.chunks or 'v'}"
        split = "B, W" if entry.split else "BW"
        print(f"{name:<17} {stages:<14} {split:<6} {entry.copies:<6} {entry.about}")
    return 0


def run_show(args: Namespace) -> int:
    """Draw one schedule, or write it to files. Return the exit status 0."""
    _refuse_outputs(args, "json", "csv", "svg", "perfetto", "png", "pdf")
    # --svg is a drawing of the table as text, or with --curves one of the figure's files.
    figure = Files(None, args.png, args.pdf, args.width)
    if args.curves and args.svg:
        figure = replace(figure, svg=str(args.svg))
    if args.curves and (not figure.named or args.svg == STDOUT):
        raise ScheduleError(
            "--curves is a figure and needs a file: --svg FILE, --png FILE or --pdf FILE"
        )
    figure.check()
    # The costs and the flags of copies are complete before any table is built.
    args.costs = _attending(_priced(args.costs, args.comm_share), args, [args.name])
    refuse_unfinished(args.copy_ratio, args.solve, args.switch, args.memory)
    args.costs, said = divided(args)
    made = composed(args)
    lines = made.notes + described(made.built, args)
    # Two steps show how --post-validation lets them overlap. Files of tables have one step.
    shown = repeated(made.schedule, 1 + args.post_validation)
    printed = _write_table(made.schedule, shown, to_line(made.recipe), args)
    _write_figure(shown, figure, args)
    # A printed file may go into another program, which no further line must disturb.
    if printed:
        return 0
    # Files replace the drawing on the terminal, but not the facts.
    width, _ = shutil.get_terminal_size((100, 24))
    kinds = ("json", "csv", "svg", "perfetto", "png", "pdf")
    files = [str(path) for kind in kinds if (path := getattr(args, kind))]
    if files:
        print(f"written, and not drawn here: {', '.join(files)}")
    else:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print(to_terminal(shown, args.costs, width=width, colour=colour))
    print("\n".join(facts(shown, args.costs, args.memory) + lines))
    for line in said:
        print(textwrap.fill(line, width, break_on_hyphens=False))
    return 0


def _write_table(table: Schedule, shown: Schedule, line: str, args: Namespace) -> bool:
    """Write the files of the table that flags of `show` name; a figure is written elsewhere.

    Args:
        table: the schedule of one training step, which goes into .json and .csv files, for runs.
        shown: the schedule to draw in other files, which may be of several steps.
        line: a note for the .json file: from what settings the table was made.
    Returns: whether a file was printed to stdout instead of a drawing.
    """
    files: list[tuple[Path | None, Callable[[], str]]] = [
        (args.json, lambda: to_json(table, args.costs, line)),
        (args.csv, lambda: to_csv(table)),
        (args.perfetto, lambda: to_perfetto(shown, args.costs)),
    ]
    # With --curves, --svg is a file of the figure.
    if not args.curves:
        files.insert(2, (args.svg, lambda: to_svg(shown, args.costs, args.memory)))
    for path, text in files:
        if path == STDOUT:
            print(text(), end="")
        elif path is not None:
            write_complete(path, text())
    return any(path == STDOUT for path, _ in files)


def _write_figure(shown: Schedule, figure: Files, args: Namespace) -> None:
    """Write the files of a figure, if flags name any.

    Args:
        shown: the schedule to draw; with --curves its memory is drawn.
        figure: the paths and the size.
    """
    if not figure.named:
        return
    if args.curves:
        pictures = draw_memory(shown, figure, args.costs, memory=args.memory)
    else:
        pictures = draw_schedule(shown, figure, args.costs)
    for path, picture in pictures.items():
        write_complete(path, picture)


def run_compare(args: Namespace) -> int:
    """Compare schedules at every size and costs that the flags list. Return the exit status 0."""
    _refuse_outputs(args, "csv", "svg", "png", "pdf")
    svg = args.svg and str(args.svg)
    figure = Files(svg, args.png, args.pdf, args.width)
    figure.check()
    says_costs = args.costs != [UNIT]
    # Each of several --costs gets the numbers of the other flags.
    complete = []
    for cost in args.costs:
        attending = _attending(_priced(cost, args.comm_share), args, args.files)
        complete.append(stated(attending, args))
    costs, args.memory, units = in_units(complete, args.memory)
    refuse_unfinished(args.copy_ratio, args.solve, args.switch, args.memory)
    refuse_idle(args, {NO_LIMIT: args.copies in ("fits", "needed") and args.memory is None})
    # The parts are the same for every point, so passes of the step get the first costs.
    args.costs = costs[0]
    parts = with_parts(NONE, args)
    if problems := list(parts.problems(FLAGS)):
        raise ScheduleError(" ".join(problems))
    if isinstance(args.cuts, tuple):
        raise ScheduleError(
            "compare cuts every schedule the same way: give --cuts equal or work, or see one by "
            "show"
        )
    slices = cutting(args) if args.slices else None
    names = [*(args.only or SCHEDULES), *args.files]
    if says_costs:
        print(units)
    # Tables with pairs have columns of their own, and no advice.
    if args.pairs:
        _refuse_with_pairs(args, parts, figure)
        for p, m, cost in product(args.pp, args.microbatches, costs):
            table = paired_table(p, m, cost, args.memory, names=names, progress=Progress())
            print(table)
        return 0
    added = None
    if parts != NONE:
        added = parts
        print(f"each schedule with {parts_line(added)}")
    points = study(
        args.pp,
        args.microbatches,
        costs,
        args.memory,
        names,
        args.effort or 4.0,
        Progress(),
        slices,
        added,
    )
    _print_points(points)
    _print_idle(args, names)
    # The files come last, so that a full disk does not cost the printed result.
    written: dict[Path, str | bytes] = {}
    if args.csv is not None:
        written[args.csv] = study_to_csv(points)
    if figure.named:
        written |= draw_study(points, figure, args.memory)
    for path, content in written.items():
        write_complete(path, content)
    return 0


def _refuse_with_pairs(args: Namespace, parts: Recipe, figure: Files) -> None:
    """Refuse the flags of `compare` that do not go with --pairs.

    Args:
        parts: the passes that other flags add, such as --vocabulary.
        figure: the files of a figure that flags name.
    Raises: ScheduleError for --slices, for a flag that adds passes, or for a figure or --csv.
    """
    if args.slices:
        raise ScheduleError(
            "--pairs are made in tables of whole microbatches: leave out --pairs or --slices"
        )
    if parts != NONE:
        raise ScheduleError(
            "compare --pairs prints tables of F, B and W: leave out other parts, or --pairs"
        )
    if figure.named or args.csv:
        raise ScheduleError(
            "compare --pairs prints tables: leave out --csv, --svg, --png and --pdf"
        )


def _print_points(points: Sequence[Comparison]) -> None:
    """Print the table and the advice for each combination of sizes and costs.

    Args:
        points: the comparison at each combination.
    """
    width, _ = shutil.get_terminal_size((100, 24))
    for n, point in enumerate(points):
        if len(points) > 1:
            if n > 0:
                print()
            print(point.text("ranks", "microbatches", "costs"))
        print(to_table(point.rows))
        print()
        stages = {row.divided for row in point.measured if row.divided}
        said = said_of(point.costs, stages)
        missing = len(point.rows) - len(point.measured)
        if missing >= len(point.measured) > 0:
            said.append(
                f"{missing} of {len(point.rows)} schedules are missing, for the reasons above: "
                "what follows is of the others alone."
            )
        for line in [*said, *point.advice]:
            print(textwrap.fill(line, width, break_on_hyphens=False))


def _print_idle(args: Namespace, names: Sequence[str]) -> None:
    """Print a line for each of --effort and --comm-share that changes nothing for these schedules.

    Args:
        names: the schedules of the command.
    """
    searched = any(not is_file(name) and entry_of(name).searched for name in names)
    if args.effort is not None and not searched:
        print(
            f"--effort {args.effort:g} is without effect: none of these schedules is searched for"
        )
    if args.comm_share is not None and not any(_may_pair(name) for name in names):
        print(
            f"--comm-share {args.comm_share:g} is without effect: none of these runs passes "
            "together. Add --pairs."
        )


def _may_pair(name: str) -> bool:
    """Return whether a schedule may overlap two passes of a rank; True for any file."""
    if is_file(name):
        return True
    if entry_of(name).searched:
        return False
    # A generator pairs passes at every size or at none, so a small table shows it.
    return any(len(step) > 1 for step in build(name, 4, 8).steps())


def run_site(args: Namespace) -> int:
    """Write the HTML page of all schedules and print its path. Return the exit status 0."""
    if found := list(folder_problems({"site": args.folder})):
        raise ScheduleError(found)
    path = args.folder / "index.html"
    # The page shows commands to paste, which in a clone are scripts.
    page = to_page(grid(args.pp, args.microbatches), Progress())
    write_complete(path, as_called(page))
    print(path)
    return 0


def _refuse_outputs(args: Namespace, *kinds: str) -> None:
    """Check, before the work, that the files of the flags in `kinds`, such as "svg", can be made.

    Raises: ScheduleError for each file that cannot.
    """
    if found := list(file_problems({f"--{kind}": getattr(args, kind) for kind in kinds})):
        raise ScheduleError(found)
