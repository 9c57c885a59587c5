"""Arguments of a command from a shell: counts, shares, costs, names of files."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from megapipe.errors import ScheduleError
from megapipe.schedule import Costs, entry_of, is_file
from megapipe.schedule.costs import MOST
from megapipe.schedule.costs_file import load_costs
from megapipe.schedule.transforms.cuts import CUTS


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
    if not is_file(text) and ":" not in text:
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


def slices(one: argparse.ArgumentParser) -> None:
    """Flags of a table whose microbatches are cut along the sequence."""
    one.add_argument("--slices", type=count, metavar="N", help="cut each microbatch in N slices of its sequence")
    cuts = "equal lengths, or equal work of forward and backward together, for which later slices are shorter (default)"
    one.add_argument("--cuts", choices=CUTS, help=f"with --slices: {cuts}")
    part = "part of each pass that is causal attention, which grows towards the end of the sequence (default: 0)"
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


def costs_of(names: str, wanted: str) -> Callable[[str], dict[str, float]]:
    """A reader of costs for fields of these names, a letter each."""

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
