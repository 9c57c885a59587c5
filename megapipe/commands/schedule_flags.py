"""The command line of `megapipe schedules`: every flag is a row of one table.

A row says which of the commands list, show, compare and site take the flag. given.py reads the
values.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from megapipe.commands import given
from megapipe.flags.stop import program
from megapipe.schedule import Costs, ScheduleError
from megapipe.schedule.views.figure import COLUMN, PAGE
from megapipe.schedule.views.page import MICROBATCHES, RANKS

STDOUT = Path("-")
"""The file of a flag that was given without one: print instead of writing."""
LIST = "list"
SHOW = "show"
COMPARE = "compare"
SITE = "site"
BOTH = "show compare"
COMMANDS = {
    "list": "every schedule in one line",
    "show": "draw one schedule, or write it to files",
    "compare": "all schedules side by side, and which to take",
    "site": "one HTML page of all, with sliders, for a browser",
}
"""The commands, with what --help says of each."""


class Row:
    """An argument of the command line: a flag such as --pp, or a positional such as NAME.

    Attributes:
        name: the flag with its dashes, or the name of the positional.
        read: a function that converts the text of a value; None for a flag without a value.
        shown: the placeholder of the value in --help, such as "N".
        help: the sentence of --help.
        of: the commands that take the argument, separated by blanks, such as "show compare".
        more: further arguments of argparse's `add_argument`.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[str], object] | None = None,
        shown: str | None = None,
        help: str | None = None,
        *,
        of: str = BOTH,
        **more: Any,
    ) -> None:
        self.name = name
        self.read = read
        self.shown = shown
        self.help = help
        self.of = of
        self.more = more

    def value(self, text: str) -> object:
        """Return the converted text of a value; argparse reports a wrong one with the flag."""
        assert self.read is not None
        try:
            return self.read(text)
        except ScheduleError as error:
            raise argparse.ArgumentTypeError(str(error)) from None


# Several sizes and costs make a study. argparse makes a list of such a flag, so that its default
# must be one too.
_study = partial(Row, of=COMPARE, nargs="+")
# A flag without its value asks for its passes, and takes the numbers from --costs.
_stated = partial(Row, nargs="?", const={})
# A flag without FILE prints to STDOUT; without the flag the value is None.
_printed = partial(Row, of=SHOW, nargs="?", const=STDOUT)
# A day is the longest search that is allowed; a longer one is a slip of the keyboard.
_effort = partial(given.positive, most=86400)

_YOURS = "and yours: .json, .csv, or FILE.py:NAME of a function"
_COSTS = "F,B,W[,COMM[,OVERHEAD]]|FILE"
_OF_COSTS = (
    "forward, input gradient, weight gradient of a microbatch in 1/P of the model; latency of a "
    "message; overhead of every pass; or a .json with them, also by stage and by link"
)
_MEMORY = (
    "most activation of a rank; 1F1B peaks at P (default: no limit; with --pairs: what the pairs "
    "need)"
)
_PAIRS = "run passes together so that the communication of one hides"
# `megapipe compare` calls them so.
_ALSO = {"--only": ("--schedules",)}
_WRITTEN = "write {} instead of drawing; without FILE it alone is printed"

TABLE = (
    Row("files", given.schedule, "FILE", _YOURS, of=f"{LIST} {COMPARE}", nargs="*"),
    Row(
        "name",
        given.schedule,
        "NAME|FILE",
        "a name from `list`, a .json or .csv file, or FILE.py:NAME",
        of=SHOW,
    ),
    # 1F1B is always compared, as the reference of the advice.
    _study("--only", given.schedule, "NAME", "these of the catalogue, and 1f1b (default: all)"),
    Row("--effort", _effort, "S", "S seconds for each of two searches (default: 4)", of=COMPARE),
    # Size and costs.
    Row("--pp", given.count, "P", "pipeline ranks", of=SHOW),
    Row("--microbatches", given.count, "M", of=SHOW),
    Row("--costs", given.costs, _COSTS, _OF_COSTS, of=SHOW, default=Costs()),
    _study(
        "--pp",
        given.count,
        "P",
        "pipeline ranks; several of these three make a study",
        required=True,
    ),
    _study("--microbatches", given.count, "M", required=True),
    _study("--costs", given.costs, _COSTS, _OF_COSTS, default=[Costs()]),
    Row(
        "--comm-share",
        given.share,
        "Q",
        "part of each pass that is communication; a pass that runs with it hides it (default: 0)",
    ),
    # `compare` shows one limit for all ranks.
    Row("--memory", given.memory, "X", _MEMORY, of=SHOW),
    Row("--memory", given.positive, "X", _MEMORY, of=COMPARE),
    # Without a value it is 0.0, which asks for pairs. None means that the flag was not given.
    Row(
        "--pairs",
        given.share,
        "Q",
        f"{_PAIRS}; Q: the part of F and B that counts as communication where costs name none",
        of=SHOW,
        nargs="?",
        const=0.0,
    ),
    Row("--pairs", help=f"{_PAIRS}, next to the tables without", of=COMPARE),
    Row("--png", given.path, "FILE", "write a figure, png"),
    Row("--pdf", given.path, "FILE", "write a figure, pdf"),
    Row(
        "--width",
        given.positive,
        "IN",
        f"inches of a figure; a column is {COLUMN:g} (default), a page {PAGE:g}",
        default=COLUMN,
    ),
    Row(
        "--chunks",
        given.count,
        "V",
        "stages per rank, where the schedule leaves a choice",
        of=SHOW,
    ),
    # Microbatches that are cut along the sequence.
    Row("--slices", given.count, "N", "cut each microbatch in N slices of its sequence"),
    Row(
        "--cuts",
        given.cuts,
        "WAY|LENGTHS",
        "with --slices: equal lengths, or equal work of forward and backward together, for which "
        "later slices are shorter (default)",
    ),
    Row(
        "--documents",
        given.count,
        "D",
        "with --slices: each sequence is D documents of one length, which need nothing of each "
        "other (default: 1)",
    ),
    Row(
        "--attention-share",
        given.share,
        "A",
        "with --slices: part of each pass that is causal attention, which grows towards the end of "
        "the sequence (default: 0)",
    ),
    # Two ways to ask for copies: K gives their time here, and --copies takes it from --costs.
    Row(
        "--copy-ratio",
        given.positive,
        "K",
        "copy activations to the host and back, wherever they are back in time; a copy takes K of "
        "a forward each way",
    ),
    Row(
        "--copies",
        str,
        help="the same with times from --costs. all: wherever a copy is in time; fits: hold, copy "
        "or compute again, whichever is fastest within --memory; needed: as fits, but only for a "
        "table that exceeds --memory",
        choices=["all", "fits", "needed"],
    ),
    Row("--copied-chunks", given.count, "N", "copy for the first N stages of a rank alone"),
    Row(
        "--switch",
        given.count,
        "N",
        "with copies: N neighbouring ranks share the way to the host",
    ),
    Row(
        "--solve",
        help="with --copy-ratio: hold, copy or compute again, whatever is fastest within --memory; "
        "zb-auto: of all tables",
    ),
    # Sharded weights, which are gathered for a few passes at a time.
    _stated(
        "--shard",
        given.costs_of(
            ("a", "g", "mem_a", "mem_g"),
            "A,G or A,G,WEIGHTS,GRADIENTS is needed, such as 0.5,1 or 0.5,1,1,2",
        ),
        "A,G[,WEIGHTS,GRADIENTS]",
        "gather weights before runs of a stage's passes, sum gradients after them: what a gather "
        "and a reduction take, and what gathered weights and gradients hold, of 1/P of the model; "
        "within --memory",
    ),
    Row("--shard-gradients", help="the same with gradients alone"),
    # Passes at the ends of the model and around the step.
    _stated(
        "--vocabulary",
        given.costs_of("ste", "S,T or S,T,E is needed, such as 0.5,0.25"),
        "S,T[,E]",
        "each rank has a share of the vocabulary: what S, T and E take of it",
    ),
    Row(
        "--depths",
        given.whole_numbers,
        "R,R",
        "depths of multi-token prediction on these ranks, such as 3,3",
    ),
    # Numbers say how long the passes take; names say which of them there are.
    _stated(
        "--step",
        given.step_of,
        "G,U[,A[,V]]|NAMES",
        "times of reduce, update, gather, validate in 1/P, or the names of the passes to add",
    ),
    _stated(
        "--replicas",
        given.costs_of("p", "one number is needed, such as 2"),
        "P",
        "copy each stage's state to a peer once a step, which takes P",
    ),
    Row("--post-validation", help="draw two steps; the second waits for no rank"),
    # The order itself.
    Row("--no-pairs", help="run the passes of a schedule's pairs one after the other", of=SHOW),
    Row("--split-backwards", help="with --pairs: split backwards without a partner", of=SHOW),
    Row("--as-published", help="leave W where the paper has it, whatever costs say", of=SHOW),
    # May be given several times, once for each option.
    Row("--option", given.option, "NAME=N", "an option of the generator", of=SHOW, action="append"),
    Row(
        "--placement",
        str,
        help="of zb-auto (default: the better)",
        of=SHOW,
        choices=["loop", "v"],
    ),
    Row(
        "--objective",
        str,
        help="of zb-auto (default: makespan)",
        of=SHOW,
        choices=["makespan", "period"],
    ),
    Row("--effort", _effort, "S", "of zb-auto, seconds (default: a minute at most)", of=SHOW),
    _printed("--json", given.path, "FILE", _WRITTEN.format("json")),
    _printed("--csv", given.path, "FILE", _WRITTEN.format("csv")),
    _printed("--svg", given.path, "FILE", _WRITTEN.format("svg")),
    _printed("--perfetto", given.path, "FILE", _WRITTEN.format("perfetto")),
    Row("--curves", help="the figure shows what each rank holds over time, no table", of=SHOW),
    Row("--svg", given.path, "FILE", "write svg of every point too", of=COMPARE),
    Row("--csv", given.path, "FILE", "write csv of every point too", of=COMPARE),
    # The page.
    Row("folder", given.path, of=SITE),
    Row(
        "--pp",
        given.count,
        "P",
        "numbers of ranks to choose from",
        of=SITE,
        nargs="+",
        default=RANKS,
    ),
    Row(
        "--microbatches",
        given.count,
        "M",
        "numbers of microbatches to choose from",
        of=SITE,
        nargs="+",
        default=MICROBATCHES,
    ),
)
"""All flags and words, in the order of each command's --help."""


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


class _OfShow(argparse.Action):
    """An action of `compare` that refuses a flag which only `show` has.

    argparse would take the flag's value for a FILE, and report that instead.
    """

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        flag = self.option_strings[0]
        parser.error(f"compare has no {flag}. Leave it out, or draw one schedule: show NAME {flag}")


def parser(about: str | None = None) -> Parser:
    """Return the parser of all commands.

    Args:
        about: the first sentence of --help; None for none.
    """
    top = Parser(prog=program(), description=about, allow_abbrev=False)
    commands = top.add_subparsers(required=True, metavar="|".join(COMMANDS))
    for name, what in COMMANDS.items():
        of_command = commands.add_parser(name, help=what, allow_abbrev=False)
        of_command.set_defaults(command=name)
        _fill(of_command, name)
    return top


def parsed(argv: Sequence[str], about: str | None) -> argparse.Namespace:
    """Return the flags in `argv`, with the command's name in the attribute `command`.

    Args:
        about: the first sentence of --help; None for none.
    """
    top = parser(about)
    for word in argv:
        # argparse makes an empty list of --flag=--, which no reader of a word expects.
        if word.startswith("--") and word.endswith("=--"):
            top.error(f"argument {word.removesuffix('=--')}: a value is needed, got '--'")
    return top.parse_args(argv)


def _fill(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the arguments that a command takes to its parser."""
    own = {one.name for one in TABLE if command in one.of}
    for one in TABLE:
        kind: dict[str, Any] = {"action": "store_true"}
        if one.read:
            kind = {"type": one.value, "metavar": one.shown}
        if command in one.of:
            names = (one.name, *_ALSO.get(one.name, ()))
            parser.add_argument(*names, help=one.help, **kind, **one.more)
        elif command == COMPARE and one.name.startswith("--") and one.name not in own:
            words = one.more.get("nargs") if one.read else 0
            parser.add_argument(one.name, nargs=words, action=_OfShow, help=argparse.SUPPRESS)
