"""Arguments of a command from a shell: counts, shares, costs, names of files."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from megapipe.errors import ScheduleError
from megapipe.schedule import Costs, entry_of, is_file
from megapipe.schedule.costs import MOST
from megapipe.schedule.costs_file import load_costs
from megapipe.schedule.families.step.asked import StepPasses
from megapipe.schedule.shapes.slices.cuts import CUTS
from megapipe.schedule.views.figure import COLUMN, PAGE


def count(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is needed, got {text!r}")
    return int(text)


def path(text: str) -> Path:
    """A name of a file or folder."""
    if not text:
        raise argparse.ArgumentTypeError("a name is needed, got an empty one")
    return Path(text)


def schedule(text: str) -> str:
    """A name of the catalogue, a file, or a function of one's own."""
    if not is_file(text):
        try:
            entry_of(text)
        except ScheduleError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text


def positive(text: str, most: float = MOST) -> float:
    """A number above 0."""
    if len(numbers := _numbers(text)) != 1 or not 0 < numbers[0] <= most:
        raise argparse.ArgumentTypeError(f"a number above 0 and at most {most:g} is needed, got {text!r}")
    return numbers[0]


def share(text: str) -> float:
    """A number from 0 to below 1."""
    if len(numbers := _numbers(text)) != 1 or numbers[0] >= 1:
        raise argparse.ArgumentTypeError(f"a number from 0 to below 1 is needed, got {text!r}")
    return numbers[0]


def copies(one: argparse.ArgumentParser) -> None:
    """Flags of activations that leave the device."""
    ratio = "copy activations to the host and back, wherever a copy, which takes K of a forward each way, is in time"
    one.add_argument("--copy-ratio", type=positive, metavar="K", help=ratio)
    when = "the same with the costs of --costs: all that is back in time, what fits --memory fastest, or only if needed"
    one.add_argument("--copies", choices=["all", "fits", "needed"], help=when)
    one.add_argument("--copied-chunks", type=count, metavar="N", help="copy for the first N stages of a rank alone")
    one.add_argument(
        "--switch", type=count, metavar="N", help="with copies: N neighbouring ranks share the way to the host"
    )
    solved = "hold, copy or compute again, whatever is fastest within --memory; zb-auto: of all tables"
    one.add_argument("--solve", action="store_true", help=f"with --copy-ratio: {solved}")


def shares(one: argparse.ArgumentParser) -> None:
    """Flags of weights that are gathered for runs of passes alone."""
    wanted = "A,G or A,G,WEIGHTS,GRADIENTS is needed, such as 0.5,1 or 0.5,1,1,2"
    what = "a gather and a reduction take, and what gathered weights and gradients hold, of 1/P of the model"
    text = f"gather weights before runs of a stage's passes, sum gradients after them: what {what}; within --memory"
    names = costs_of(("a", "g", "mem_a", "mem_g"), wanted)
    one.add_argument("--shard", type=names, nargs="?", const={}, metavar="A,G[,WEIGHTS,GRADIENTS]", help=text)
    one.add_argument("--shard-gradients", action="store_true", help="the same with gradients alone")


def parts(one: argparse.ArgumentParser) -> None:
    """Flags of what stands at the ends of the model and around the step. Without numbers --costs has them."""
    vocabulary = "each rank has a share of the vocabulary: what S, T and E take of it"
    names = costs_of("ste", "S,T or S,T,E is needed, such as 0.5,0.25")
    one.add_argument("--vocabulary", type=names, nargs="?", const={}, metavar="S,T[,E]", help=vocabulary)
    depths = "depths of multi-token prediction on these ranks, such as 3,3"
    one.add_argument("--depths", type=whole_numbers, metavar="R,R", help=depths)
    step = "times of reduce, update, gather, validate in 1/P, or the names of the passes to add"
    one.add_argument("--step", type=step_of, nargs="?", const={}, metavar="G,U[,A[,V]]|NAMES", help=step)
    one.add_argument("--post-validation", action="store_true", help="draw two steps; the second waits for no rank")


def details(one: argparse.ArgumentParser) -> None:
    """Flags by which a recipe's line says how the order itself is made."""
    one.add_argument("--no-pairs", action="store_true", help="run the passes of a schedule's pairs one after the other")
    one.add_argument("--split-backwards", action="store_true", help="with --pairs: split backwards without a partner")
    one.add_argument("--as-published", action="store_true", help="leave W where the paper has it, whatever costs say")
    one.add_argument("--option", type=option, action="append", metavar="NAME=N", help="an option of the generator")


def whole_numbers(text: str) -> tuple[int, ...]:
    """Whole numbers from 0 between commas."""
    names = text.split(",")
    if not all(name.isdecimal() and len(name) < 6 for name in names):
        raise argparse.ArgumentTypeError(f"whole numbers are needed, such as 3,3, got {text!r}")
    return tuple(map(int, names))


def step_of(text: str) -> dict[str, float] | StepPasses:
    """The passes of a whole step: by name, or what each takes."""
    names = text.split(",")
    known = [field.name for field in fields(StepPasses)]
    if set(names) <= {*known}:
        return StepPasses(**dict.fromkeys(names, True))
    wanted = "G,U or G,U,A or G,U,A,V is needed, such as 2,0.5 or 2,0.5,1"
    return costs_of("guav", f"{wanted}, or names among {', '.join(known)}")(text)


def option(text: str) -> tuple[str, int]:
    """A name and a whole number."""
    name, _, number = text.partition("=")
    if not name.isidentifier() or not number.isdecimal() or len(number) > 6:
        raise argparse.ArgumentTypeError(f"NAME=N is needed, got {text!r}")
    return name, int(number)


def cuts(text: str) -> str | tuple[float, ...]:
    """A way to cut, or the lengths of the slices."""
    if text in CUTS:
        return text
    if not (lengths := _numbers(text)) or not all(lengths):
        raise argparse.ArgumentTypeError(f"{', '.join(CUTS)} or lengths such as 3,2 are needed, got {text!r}")
    return tuple(int(x) if x.is_integer() else x for x in lengths)  # tokens, as a run counts them


def memory(text: str) -> float | tuple[float, ...]:
    """A number above 0, or one for each rank."""
    if "," not in text:
        return positive(text)
    return tuple(map(positive, text.split(",")))


def slices(one: argparse.ArgumentParser) -> None:
    """Flags of a table whose microbatches are cut along the sequence."""
    one.add_argument("--slices", type=count, metavar="N", help="cut each microbatch in N slices of its sequence")
    how = "equal lengths, or equal work of forward and backward together, for which later slices are shorter (default)"
    one.add_argument("--cuts", type=cuts, metavar="WAY|LENGTHS", help=f"with --slices: {how}")
    part = "part of each pass that is causal attention, which grows towards the end of the sequence (default: 0)"
    packed = "each sequence is D documents of one length, which need nothing of each other (default: 1)"
    one.add_argument("--documents", type=count, metavar="D", help=f"with --slices: {packed}")
    one.add_argument("--attention-share", type=share, metavar="A", help=f"with --slices: {part}")


def costs(text: str) -> Costs:
    """`F,B,W[,COMM[,OVERHEAD]]`, or a file of them."""
    if text.endswith(".json"):
        try:
            return load_costs(text)
        except ScheduleError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    numbers = _numbers(text)
    if len(numbers) not in (3, 4, 5) or not sum(numbers[:3]):
        wanted = "F,B,W, F,B,W,COMM or a .json file is needed, such as 10,11,8 or 1,1,1,0.1, got"
        raise argparse.ArgumentTypeError(f"{wanted} {text!r}")
    return Costs(*numbers[:3], **dict(zip(("comm", "overhead"), numbers[3:], strict=False)))


def costs_of(names: Sequence[str], wanted: str) -> Callable[[str], dict[str, float]]:
    """A reader of costs for fields of these names."""

    def read(text: str) -> dict[str, float]:
        if not 2 <= len(numbers := _numbers(text)) <= len(names):
            raise argparse.ArgumentTypeError(f"{wanted}, got {text!r}")
        return dict(zip(names, numbers, strict=False))

    return read


def _numbers(text: str) -> list[float]:
    """The numbers from 0 to 1e100 between commas; none if there is anything else."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        return []
    return numbers if all(0 <= x <= MOST for x in numbers) else []


def shared(one: argparse.ArgumentParser, *, several: bool) -> None:
    """Flags that show takes once, and compare at several points."""
    many: dict[str, Any] = {"nargs": "+"} if several else {}
    also = "; several of these three make a study" * several
    one.add_argument("--pp", type=count, required=several, metavar="P", help=f"pipeline ranks{also}", **many)
    one.add_argument("--microbatches", type=count, required=several, metavar="M", **many)
    one.add_argument(
        "--costs",
        type=costs,
        default=[Costs()] if several else Costs(),
        metavar="F,B,W[,COMM[,OVERHEAD]]|FILE",
        help="forward, input gradient, weight gradient of a microbatch in 1/P of the model; latency of a message; "
        "overhead of every pass; or a .json with them, also by stage and by link",
        **many,
    )
    hidden = "part of each pass that is communication, which a pass run with it hides (default: 0)"
    one.add_argument("--comm-share", type=share, metavar="Q", help=hidden)
    most = "most activation of a rank; 1F1B peaks at P (default: no limit; with --pairs: what these ask for)"
    one.add_argument("--memory", type=positive if several else memory, metavar="X", help=most)
    together = "run passes together so that the communication of one hides"
    shown = "; Q: the part of F and B that counts as communication where costs name none"
    if several:
        one.add_argument("--pairs", action="store_true", help=f"{together}, next to the tables without")
    else:
        one.add_argument("--pairs", type=share, nargs="?", const=0.0, metavar="Q", help=together + shown)
    for kind in ("png", "pdf"):
        one.add_argument(f"--{kind}", type=path, metavar="FILE", help=f"write a figure, {kind}")
    wide = f"inches of a figure; a column is {COLUMN:g} (default), a page {PAGE:g}"
    one.add_argument("--width", type=positive, default=COLUMN, metavar="IN", help=wide)
