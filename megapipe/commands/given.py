"""Arguments of a command from a shell: counts, shares, costs, names of files."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megapipe.errors import ScheduleError
from megapipe.schedule import Costs, entry_of, is_file
from megapipe.schedule.costs import MOST
from megapipe.schedule.costs_file import load_costs
from megapipe.schedule.transforms.cuts import CUTS
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
    one.add_argument(
        "--switch", type=count, metavar="N", help="with --copy-ratio: so many neighbours share the way there"
    )
    solved = "hold, copy or compute again, whatever is fastest within --memory; zb-auto: of all tables"
    one.add_argument("--solve", action="store_true", help=f"with --copy-ratio: {solved}")


def shares(one: argparse.ArgumentParser) -> None:
    """The flag of weights that are whole for runs of passes alone."""
    wanted = "A,G or A,G,WEIGHTS,GRADIENTS is needed, such as 0.5,1 or 0.5,1,1,2"
    what = "a gather and a reduction take, and what whole weights and gradients hold, of 1/P of the model"
    text = f"gather weights before runs of a stage's passes, sum gradients behind: what {what}; within --memory"
    names = costs_of(("a", "g", "mem_a", "mem_g"), wanted)
    one.add_argument("--shard", type=names, metavar="A,G[,WEIGHTS,GRADIENTS]", help=text)


def slices(one: argparse.ArgumentParser) -> None:
    """Flags of a table whose microbatches are cut along the sequence."""
    one.add_argument("--slices", type=count, metavar="N", help="cut each microbatch in N slices of its sequence")
    cuts = "equal lengths, or equal work of forward and backward together, for which later slices are shorter (default)"
    one.add_argument("--cuts", choices=CUTS, help=f"with --slices: {cuts}")
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
        "what every pass costs beside; or a .json of them, also by stage and by link",
        **many,
    )
    hidden = "part of each pass that is communication, which hides behind a pass run with it (default: 0)"
    one.add_argument("--comm-share", type=share, metavar="Q", help=hidden)
    most = "most activation of a rank; 1F1B peaks at P (default: no limit; with --pairs: what these ask for)"
    one.add_argument("--memory", type=positive, metavar="X", help=most)
    together = "run passes together so that the communication of one hides; compare: beside the tables without"
    one.add_argument("--pairs", action="store_true", help=together)
    for kind in ("png", "pdf"):
        one.add_argument(f"--{kind}", type=path, metavar="FILE", help=f"write a figure, {kind}")
    wide = f"inches of a figure; a column is {COLUMN:g} (default), a page {PAGE:g}"
    one.add_argument("--width", type=positive, default=COLUMN, metavar="IN", help=wide)
