"""Add the flags of `megapipe schedules show` and `compare` to their parsers.

Both take almost the same flags, in the groups below. given.py reads their values.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from megapipe.commands import given
from megapipe.schedule import Costs
from megapipe.schedule.views.figure import COLUMN, PAGE

STDOUT = Path("-")
"""The file of a flag that was given without one: print instead of writing."""


class _OfShow(argparse.Action):
    """An action of `compare` that refuses a flag which only `show` has.

    argparse would take the flag's value for a FILE, and report that instead.
    """

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        flag = self.option_strings[0]
        parser.error(f"compare has no {flag}. Leave it out, or draw one schedule: show NAME {flag}")


def add_flags(show: argparse.ArgumentParser, both: argparse.ArgumentParser) -> None:
    """Add the flags of `show` and of `compare`, in the order of their --help.

    Args:
        show: the parser of `show`.
        both: the parser of `compare`. It refuses each flag that only `show` has.
    """
    # A day is the longest search that is allowed; a longer one is a slip of the keyboard.
    effort = partial(given.positive, most=86400)
    # 1F1B is always compared, as the reference of the advice.
    both.add_argument(
        "--only",
        type=given.schedule,
        metavar="NAME",
        nargs="+",
        help="these of the catalogue, and 1f1b (default: all)",
    )
    both.add_argument(
        "--effort",
        type=effort,
        metavar="S",
        help="S seconds for each of two searches (default: 4)",
    )
    _shared(show, several=False)
    _shared(both, several=True)
    show.add_argument(
        "--chunks",
        type=given.count,
        metavar="V",
        help="stages per rank, where the schedule leaves a choice",
    )
    # These change the table, and `compare` changes all its tables in the same way.
    for one in (show, both):
        _slices(one)
        _copies(one)
        _shares(one)
        _parts(one)
    _details(show)
    show.add_argument("--placement", choices=["loop", "v"], help="of zb-auto (default: the better)")
    show.add_argument(
        "--objective", choices=["makespan", "period"], help="of zb-auto (default: makespan)"
    )
    show.add_argument(
        "--effort",
        type=effort,
        metavar="S",
        help="of zb-auto, seconds (default: a minute at most)",
    )
    for kind in ("json", "csv", "svg", "perfetto"):
        # A flag without FILE prints to STDOUT; without the flag the value is None.
        show.add_argument(
            f"--{kind}",
            nargs="?",
            const=STDOUT,
            type=given.path,
            metavar="FILE",
            help=f"write {kind} instead of drawing; without FILE it alone is printed",
        )
    show.add_argument(
        "--curves",
        action="store_true",
        help="the figure is of what each rank holds over time, alone",
    )
    for kind in ("svg", "csv"):
        both.add_argument(
            f"--{kind}", type=given.path, metavar="FILE", help=f"write {kind} of every point too"
        )
    # These stand last, when both parsers have all their flags.
    for action in show._actions:
        names = action.option_strings
        if names and names[0] not in both._option_string_actions:
            both.add_argument(*names, nargs=action.nargs, action=_OfShow, help=argparse.SUPPRESS)


def _shared(one: argparse.ArgumentParser, *, several: bool) -> None:
    """Add the flags that `show` and `compare` share: size, costs, memory, pairs and figures.

    Args:
        one: the parser that gets them.
        several: the parser is `compare`'s, whose sizes and costs take several values.
    """
    many: dict[str, Any] = {}
    also = ""
    unit: Any = Costs()
    # argparse makes a list of a flag with several values, so the default must be one too.
    if several:
        many = {"nargs": "+"}
        also = "; several of these three make a study"
        unit = [unit]
    one.add_argument(
        "--pp",
        type=given.count,
        required=several,
        metavar="P",
        help=f"pipeline ranks{also}",
        **many,
    )
    one.add_argument("--microbatches", type=given.count, required=several, metavar="M", **many)
    one.add_argument(
        "--costs",
        type=given.costs,
        default=unit,
        metavar="F,B,W[,COMM[,OVERHEAD]]|FILE",
        help="forward, input gradient, weight gradient of a microbatch in 1/P of the model; "
        "latency of a message; overhead of every pass; or a .json with them, also by stage and by "
        "link",
        **many,
    )
    one.add_argument(
        "--comm-share",
        type=given.share,
        metavar="Q",
        help="part of each pass that is communication, which a pass run with it hides (default: 0)",
    )
    one.add_argument(
        "--memory",
        # `compare` shows one limit for all ranks.
        type=given.positive if several else given.memory,
        metavar="X",
        help="most activation of a rank; 1F1B peaks at P (default: no limit; with --pairs: what "
        "these ask for)",
    )
    together = "run passes together so that the communication of one hides"
    if several:
        one.add_argument(
            "--pairs", action="store_true", help=f"{together}, next to the tables without"
        )
    else:
        # Without a value it is 0.0, which asks for pairs. None means that the flag was not given.
        one.add_argument(
            "--pairs",
            type=given.share,
            nargs="?",
            const=0.0,
            metavar="Q",
            help=f"{together}; Q: the part of F and B that counts as communication where costs "
            "name none",
        )
    for kind in ("png", "pdf"):
        one.add_argument(
            f"--{kind}", type=given.path, metavar="FILE", help=f"write a figure, {kind}"
        )
    one.add_argument(
        "--width",
        type=given.positive,
        default=COLUMN,
        metavar="IN",
        help=f"inches of a figure; a column is {COLUMN:g} (default), a page {PAGE:g}",
    )


def _slices(one: argparse.ArgumentParser) -> None:
    """Add the flags of microbatches that are cut along the sequence."""
    one.add_argument(
        "--slices",
        type=given.count,
        metavar="N",
        help="cut each microbatch in N slices of its sequence",
    )
    one.add_argument(
        "--cuts",
        type=given.cuts,
        metavar="WAY|LENGTHS",
        help="with --slices: equal lengths, or equal work of forward and backward together, for "
        "which later slices are shorter (default)",
    )
    one.add_argument(
        "--documents",
        type=given.count,
        metavar="D",
        help="with --slices: each sequence is D documents of one length, which need nothing of "
        "each other (default: 1)",
    )
    one.add_argument(
        "--attention-share",
        type=given.share,
        metavar="A",
        help="with --slices: part of each pass that is causal attention, which grows towards the "
        "end of the sequence (default: 0)",
    )


def _copies(one: argparse.ArgumentParser) -> None:
    """Add the flags of activations that are copied to the host or recomputed."""
    # Two ways to ask for copies: K gives their time here, and --copies takes it from --costs.
    one.add_argument(
        "--copy-ratio",
        type=given.positive,
        metavar="K",
        help="copy activations to the host and back, wherever a copy, which takes K of a forward "
        "each way, is in time",
    )
    one.add_argument(
        "--copies",
        choices=["all", "fits", "needed"],
        help="the same with the costs of --costs: all that is back in time, what fits --memory "
        "fastest, or only if needed",
    )
    one.add_argument(
        "--copied-chunks",
        type=given.count,
        metavar="N",
        help="copy for the first N stages of a rank alone",
    )
    one.add_argument(
        "--switch",
        type=given.count,
        metavar="N",
        help="with copies: N neighbouring ranks share the way to the host",
    )
    one.add_argument(
        "--solve",
        action="store_true",
        help="with --copy-ratio: hold, copy or compute again, whatever is fastest within --memory; "
        "zb-auto: of all tables",
    )


def _shares(one: argparse.ArgumentParser) -> None:
    """Add the flags of sharded weights, which are gathered for a few passes at a time."""
    # Without a value it is `{}`: shards are asked for, and --costs has their numbers.
    one.add_argument(
        "--shard",
        type=given.costs_of(
            ("a", "g", "mem_a", "mem_g"),
            "A,G or A,G,WEIGHTS,GRADIENTS is needed, such as 0.5,1 or 0.5,1,1,2",
        ),
        nargs="?",
        const={},
        metavar="A,G[,WEIGHTS,GRADIENTS]",
        help="gather weights before runs of a stage's passes, sum gradients after them: what a "
        "gather and a reduction take, and what gathered weights and gradients hold, of 1/P of the "
        "model; within --memory",
    )
    one.add_argument("--shard-gradients", action="store_true", help="the same with gradients alone")


def _parts(one: argparse.ArgumentParser) -> None:
    """Add the flags of passes at the ends of the model and around the step.

    A flag without numbers takes them from --costs.
    """
    # As for --shard, `{}` asks for the passes without giving their times.
    one.add_argument(
        "--vocabulary",
        type=given.costs_of("ste", "S,T or S,T,E is needed, such as 0.5,0.25"),
        nargs="?",
        const={},
        metavar="S,T[,E]",
        help="each rank has a share of the vocabulary: what S, T and E take of it",
    )
    one.add_argument(
        "--depths",
        type=given.whole_numbers,
        metavar="R,R",
        help="depths of multi-token prediction on these ranks, such as 3,3",
    )
    # Numbers say how long the passes take; names say which of them there are.
    one.add_argument(
        "--step",
        type=given.step_of,
        nargs="?",
        const={},
        metavar="G,U[,A[,V]]|NAMES",
        help="times of reduce, update, gather, validate in 1/P, or the names of the passes to add",
    )
    one.add_argument(
        "--replicas",
        type=given.costs_of("p", "one number is needed, such as 2"),
        nargs="?",
        const={},
        metavar="P",
        help="copy each stage's state to a peer once a step, which takes P",
    )
    one.add_argument(
        "--post-validation",
        action="store_true",
        help="draw two steps; the second waits for no rank",
    )


def _details(one: argparse.ArgumentParser) -> None:
    """Add the flags of `show` that change the order itself."""
    one.add_argument(
        "--no-pairs",
        action="store_true",
        help="run the passes of a schedule's pairs one after the other",
    )
    one.add_argument(
        "--split-backwards",
        action="store_true",
        help="with --pairs: split backwards without a partner",
    )
    one.add_argument(
        "--as-published",
        action="store_true",
        help="leave W where the paper has it, whatever costs say",
    )
    # May be given several times, once for each option.
    one.add_argument(
        "--option",
        type=given.option,
        action="append",
        metavar="NAME=N",
        help="an option of the generator",
    )
