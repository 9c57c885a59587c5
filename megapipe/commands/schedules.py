"""Pipeline schedules on the command line: list them, draw or save one, compare all, here or as figures."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import NoReturn

from megapipe.commands import given
from megapipe.commands.composed import FLAGS, composed, cutting, refuse_idle, stated, with_parts
from megapipe.commands.progress import Progress
from megapipe.data.files import file_problems, folder_problems, write_complete
from megapipe.doors import as_called
from megapipe.flags.stop import program
from megapipe.schedule import SCHEDULES, Costs, ScheduleError, build, entry_of, is_file
from megapipe.schedule.catalogue import own_entry
from megapipe.schedule.costs import ATTENTION, SHARES
from megapipe.schedule.passes import repeated
from megapipe.schedule.patterns import SLICED
from megapipe.schedule.recipe import Recipe
from megapipe.schedule.recipe_line import parts_line, to_line
from megapipe.schedule.text import load, to_csv, to_json
from megapipe.schedule.views.compare import to_table
from megapipe.schedule.views.draw import to_svg
from megapipe.schedule.views.figure import Files
from megapipe.schedule.views.moved import refuse_unfinished
from megapipe.schedule.views.page import MICROBATCHES, RANKS, grid, to_page
from megapipe.schedule.views.paired import paired_table
from megapipe.schedule.views.perfetto import to_perfetto
from megapipe.schedule.views.study import draw as draw_study
from megapipe.schedule.views.study import study
from megapipe.schedule.views.study import to_csv as study_to_csv
from megapipe.schedule.views.terminal import facts, to_terminal
from megapipe.schedule.views.timeline import draw_memory, draw_schedule

STDOUT = Path("-")
NONE = Recipe("")
"""A recipe without any part."""


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line; --help has the rest."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


class _OfShow(argparse.Action):
    """Refuse a flag that `show` alone has: its value would be read as a FILE."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        flag = self.option_strings[0]
        parser.error(f"compare has no {flag}. Leave it out, or draw one schedule: show NAME {flag}")


def main(argv: Sequence[str]) -> int:
    """Run one of its four commands. Returns: the exit status."""
    top = parser()
    for word in argv:
        if word.startswith("--") and word.endswith("=--"):  # argparse makes an empty list of it
            top.error(f"argument {word.removesuffix('=--')}: a value is needed, got '--'")
    args = top.parse_args(argv)
    try:
        return int(args.run(args))
    except ScheduleError as error:
        if not str(error).startswith("Costs."):
            raise
        raise ScheduleError(f"--costs: {error}") from None


def parser() -> Parser:
    top = Parser(prog=program(), description=__doc__, allow_abbrev=False)
    commands = top.add_subparsers(required=True, metavar="list|show|compare|site")
    yours = "and yours: .json, .csv, or FILE.py:NAME of a function"
    every = commands.add_parser("list", help="every schedule in one line", allow_abbrev=False)
    every.add_argument("files", type=given.schedule, metavar="FILE", nargs="*", help=yours)
    every.set_defaults(run=run_list)
    show = commands.add_parser("show", help="draw one schedule, or write it to files", allow_abbrev=False)
    named = "a name from `list`, a .json or .csv file, or FILE.py:NAME"
    show.add_argument("name", type=given.schedule, metavar="NAME|FILE", help=named)
    effort = partial(given.positive, most=86400)
    both = commands.add_parser("compare", help="all schedules side by side, and which to take", allow_abbrev=False)
    both.add_argument("files", type=given.schedule, metavar="FILE", nargs="*", help=yours)
    both.add_argument(
        "--only", type=given.schedule, metavar="NAME", nargs="+", help="these of the catalogue, and 1f1b (default: all)"
    )
    searches = "S seconds for each of two searches (default: 4)"
    both.add_argument("--effort", type=effort, metavar="S", help=searches)
    given.shared(show, several=False)
    given.shared(both, several=True)
    show.add_argument(
        "--chunks", type=given.count, metavar="V", help="stages per rank, where the schedule leaves a choice"
    )
    for one in (show, both):
        given.slices(one)
        given.copies(one)
        given.shares(one)
        given.parts(one)
    given.details(show)
    show.add_argument("--placement", choices=["loop", "v"], help="of zb-auto (default: the better)")
    show.add_argument("--objective", choices=["makespan", "period"], help="of zb-auto (default: makespan)")
    show.add_argument("--effort", type=effort, metavar="S", help="of zb-auto, seconds (default: a minute at most)")
    for kind in ("json", "csv", "svg", "perfetto"):
        written = f"write {kind} instead of drawing; without FILE it alone is printed"
        show.add_argument(f"--{kind}", nargs="?", const=STDOUT, type=given.path, metavar="FILE", help=written)
    show.add_argument("--curves", action="store_true", help="the figure is of what each rank holds over time, alone")
    for kind in ("svg", "csv"):
        both.add_argument(f"--{kind}", type=given.path, metavar="FILE", help=f"write {kind} of every point too")
    for action in show._actions:
        if action.option_strings and action.option_strings[0] not in both._option_string_actions:
            both.add_argument(*action.option_strings, nargs=action.nargs, action=_OfShow, help=argparse.SUPPRESS)
    show.set_defaults(run=run_show)
    both.set_defaults(run=run_compare)
    site = commands.add_parser("site", help="one HTML page of all, with sliders, for a browser", allow_abbrev=False)
    site.add_argument("folder", type=given.path)
    site.add_argument(
        "--pp", type=given.count, nargs="+", default=RANKS, metavar="P", help="numbers of ranks to choose from"
    )
    site.add_argument(
        "--microbatches", type=given.count, nargs="+", default=MICROBATCHES, metavar="M", help="and of these"
    )
    site.set_defaults(run=run_site)
    return top


def _priced(costs: Costs, share: float | None) -> Costs:
    """The costs with --comm-share, where it is given."""
    return costs if share is None else replace(costs, **dict.fromkeys(SHARES, share))


def _attending(costs: Costs, args: argparse.Namespace, names: Sequence[str]) -> Costs:
    """The costs with --attention-share, which a file that is cut in slices takes too.

    Raises: ScheduleError for a flag of slices without slices.
    """
    unsliced = args.attention_share and not any(is_file(name) and load(name).cuts for name in names)
    whole = not args.slices or args.slices == 1
    if whole and (args.cuts or args.documents or unsliced):
        flags = "--cuts, --documents and --attention-share"
        remedy = "add --slices 4" if not args.slices else "give --slices 4 in place of 1"
        raise ScheduleError(f"{flags} are of slices: {remedy}, or leave them out")
    return replace(costs, **dict.fromkeys(ATTENTION, args.attention_share)) if args.attention_share else costs


def run_list(args: argparse.Namespace) -> int:
    print(f"{'name':<17} {'stages':<14} {'split':<6} {'copies':<6} about")
    for name, entry in {**SCHEDULES, **SLICED, **{name: own_entry(name) for name in args.files}}.items():
        stages = f"{entry.placement} x {entry.chunks or 'v'}"
        print(f"{name:<17} {stages:<14} {'B, W' if entry.split else 'BW':<6} {entry.copies:<6} {entry.about}")
    return 0


def run_show(args: argparse.Namespace) -> int:
    _refuse_outputs(args, "json", "csv", "svg", "perfetto", "png", "pdf")
    figure = Files(args.svg and str(args.svg) if args.curves else None, args.png, args.pdf, args.width)
    if args.curves and (not figure.named or args.svg == STDOUT):
        raise ScheduleError("--curves is a figure and needs a file: --svg FILE, --png FILE or --pdf FILE")
    figure.check()
    args.costs = _attending(_priced(args.costs, args.comm_share), args, [args.name])
    refuse_unfinished(args.copy_ratio, args.solve, args.switch, args.memory)
    recipe, schedule, found = composed(args)
    if args.csv and len({round(cut, 9) for cut in schedule.cuts}) > 1:
        unequal = "--csv: the slices have several lengths, which CSV cannot say"
        raise ScheduleError(f"{unequal}. Write --json, or cut them with --cuts equal.")
    table, schedule = schedule, repeated(schedule, 1 + args.post_validation)
    files: list[tuple[Path | None, Callable[[], str]]] = [
        (args.json, lambda: to_json(table, args.costs, to_line(recipe))),
        (args.csv, lambda: to_csv(table)),
        (None if args.curves else args.svg, lambda: to_svg(schedule, args.costs, args.memory)),
        (args.perfetto, lambda: to_perfetto(schedule, args.costs)),
    ]
    for path, text in files:
        if path == STDOUT:
            print(text(), end="")
        elif path is not None:
            write_complete(path, text())
    if figure.named:
        held = partial(draw_memory, memory=args.memory)
        for path, picture in (held if args.curves else draw_schedule)(schedule, figure, args.costs).items():
            write_complete(path, picture)
    if any(path == STDOUT for path, _ in files):
        return 0
    if not figure.named and not any(path for path, _ in files):
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print(to_terminal(schedule, args.costs, width=shutil.get_terminal_size((100, 24)).columns, colour=colour))
    print("\n".join(facts(schedule, args.costs, args.memory) + found))
    return 0


def run_compare(args: argparse.Namespace) -> int:
    _refuse_outputs(args, "csv", "svg", "png", "pdf")
    names, svg = [*(args.only or SCHEDULES), *args.files], args.svg and str(args.svg)
    figure = Files(svg, args.png, args.pdf, args.width)
    figure.check()
    costs = [stated(_attending(_priced(cost, args.comm_share), args, args.files), args) for cost in args.costs]
    refuse_unfinished(args.copy_ratio, args.solve, args.switch, args.memory)
    refuse_idle(args, {})
    args.costs = costs[0]
    parts = with_parts(NONE, args)
    if problems := list(parts.problems(FLAGS)):
        raise ScheduleError(" ".join(problems))
    if isinstance(args.cuts, tuple):
        raise ScheduleError("compare cuts every schedule the same way: give --cuts equal or work, or see one by show")
    slices = cutting(args) if args.slices else None
    if args.pairs and slices:
        raise ScheduleError("--pairs are made in tables of whole microbatches: leave out --pairs or --slices")
    if args.pairs:
        if parts != NONE:
            raise ScheduleError("compare --pairs prints tables of F, B and W: leave out other parts, or --pairs")
        if figure.named or args.csv:
            raise ScheduleError("compare --pairs prints tables: leave out --csv, --svg, --png and --pdf")
        for p, m, cost in product(args.pp, args.microbatches, costs):
            print(paired_table(p, m, cost, args.memory, names=names, progress=Progress()))
        return 0
    searched = any(not is_file(name) and entry_of(name).searched for name in names)
    effort = 4.0 if args.effort is None else args.effort
    added = None if parts == NONE else parts
    if added is not None:
        print(f"each schedule with {parts_line(added)}")
    points = study(
        args.pp,
        args.microbatches,
        costs,
        args.memory,
        names,
        effort,
        Progress(),
        slices,
        added,
    )
    for n, point in enumerate(points):
        if len(points) > 1:
            print("\n" * (n > 0) + point.text("ranks", "microbatches", "costs"))
        print(to_table(point.rows))
        print()
        for line in point.advice:
            print(textwrap.fill(line, shutil.get_terminal_size((100, 24)).columns))
    if args.effort is not None and not searched:
        print(f"--effort {args.effort:g} is without effect: none of these schedules is searched for")
    if args.comm_share is not None and not any(_may_pair(name) for name in names):
        print(f"--comm-share {args.comm_share:g} is without effect: none of these runs passes together. Add --pairs.")
    written: dict[Path, str | bytes] = {} if args.csv is None else {args.csv: study_to_csv(points)}
    written |= draw_study(points, figure, args.memory) if figure.named else {}
    for path, content in written.items():
        write_complete(path, content)
    return 0


def _may_pair(name: str) -> bool:
    """Can a schedule run passes together? Of the catalogue's, a small table tells it."""
    if is_file(name):
        return True
    return not entry_of(name).searched and any(len(step) > 1 for row in build(name, 4, 8).ranks for step in row)


def run_site(args: argparse.Namespace) -> int:
    if found := list(folder_problems({"site": args.folder})):
        raise ScheduleError(found)
    path = args.folder / "index.html"
    page = to_page(grid(args.pp, args.microbatches), Progress())
    write_complete(path, as_called(page))
    print(path)
    return 0


def _refuse_outputs(args: argparse.Namespace, *kinds: str) -> None:
    """Refuse before the work. Raises: ScheduleError for each that is to be written where no file can be."""
    if found := list(file_problems({f"--{kind}": getattr(args, kind) for kind in kinds})):
        raise ScheduleError(found)
