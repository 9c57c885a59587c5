"""Read the words of `megapipe schedules`: counts, shares, costs, names of files.

A reader gets a word of the command line and returns its value. For a wrong word it raises a
ScheduleError, to which the command line adds the name of the flag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from megapipe.errors import ScheduleError
from megapipe.schedule import Costs, entry_of, is_file
from megapipe.schedule.core.cuts import CUTS
from megapipe.schedule.costs import MOST
from megapipe.schedule.costs_file import load_costs
from megapipe.schedule.families.step.asked import StepPasses


def count(text: str) -> int:
    """Return the integer in a flag's value; refuse a number below 1, and any other text."""
    # isdecimal() leaves out signs, blanks and underscores, which int() takes.
    if not text.isdecimal() or int(text) < 1:
        raise ScheduleError(f"a whole number of at least 1 is needed, got {text!r}")
    return int(text)


def path(text: str) -> Path:
    """Return the path in a flag's value; refuse an empty name."""
    if not text:
        raise ScheduleError("a name is needed, got an empty one")
    return Path(text)


def schedule(text: str) -> str:
    """Return the name of a schedule in a flag's value; refuse another text.

    `megapipe schedules list` shows the names, such as zb-v. A path of a schedule file is accepted
    too, and FILE.py:FUNCTION.
    """
    if not is_file(text):
        entry_of(text)
    return text


def positive(text: str, most: float = MOST) -> float:
    """Return the number in a flag's value; refuse a number that is not above 0.

    Args:
        most: the largest number that is accepted.
    """
    numbers = _numbers(text)
    if len(numbers) != 1 or not 0 < numbers[0] <= most:
        raise ScheduleError(f"a number above 0 and at most {most:g} is needed, got {text!r}")
    return numbers[0]


def share(text: str) -> float:
    """Return the number in a flag's value; refuse a number outside of 0 <= x < 1."""
    numbers = _numbers(text)
    if len(numbers) != 1 or numbers[0] >= 1:
        raise ScheduleError(f"a number from 0 to below 1 is needed, got {text!r}")
    return numbers[0]


def memory(text: str) -> float | tuple[float, ...]:
    """Return a memory limit above 0; a tuple with a limit for each rank if there are commas."""
    if "," not in text:
        return positive(text)
    return tuple(map(positive, text.split(",")))


def whole_numbers(text: str) -> tuple[int, ...]:
    """Return the integers from 0 to 99999 that a flag's value lists between commas."""
    words = text.split(",")
    # int() refuses a number of thousands of digits with an error of its own.
    if not all(word.isdecimal() and len(word) < 6 for word in words):
        raise ScheduleError(f"whole numbers are needed, such as 3,3, got {text!r}")
    return tuple(map(int, words))


def option(text: str) -> tuple[str, int]:
    """Return (name, value) of NAME=N, an argument for a schedule's function."""
    name, _, number = text.partition("=")
    if not name.isidentifier() or not number.isdecimal() or len(number) > 6:
        raise ScheduleError(f"NAME=N is needed, got {text!r}")
    return name, int(number)


def cuts(text: str) -> str | tuple[float, ...]:
    """Return how to cut a sequence in slices: "equal", "work", or the lengths of the slices."""
    if text in CUTS:
        return text
    lengths = _numbers(text)
    if not lengths or not all(lengths):
        raise ScheduleError(f"{', '.join(CUTS)} or lengths such as 3,2 are needed, got {text!r}")
    # Whole lengths are tokens, which a run counts as int.
    return tuple(int(x) if x.is_integer() else x for x in lengths)


def costs(text: str) -> Costs:
    """Return the costs that a text such as "10,11,8,0.5" gives, or a .json file.

    The numbers are F,B,W[,COMM[,OVERHEAD]]: the times of a forward, the backward of inputs, the
    backward of weights, and a message. OVERHEAD is added to the time of every pass.
    """
    if text.endswith(".json"):
        return load_costs(text)
    numbers = _numbers(text)
    # Without any work no pass takes time, and there is nothing to draw.
    if len(numbers) not in (3, 4, 5) or not sum(numbers[:3]):
        raise ScheduleError(
            "F,B,W, F,B,W,COMM or a .json file is needed, such as 10,11,8 or 1,1,1,0.1, "
            f"got {text!r}"
        )
    # The first three are required; COMM and OVERHEAD keep their defaults if they are left out.
    further = dict(zip(("comm", "overhead"), numbers[3:], strict=False))
    return Costs(*numbers[:3], **further)


def costs_of(names: Sequence[str], wanted: str) -> Callable[[str], dict[str, float]]:
    """Return a function that reads numbers between commas as fields of Costs.

    Args:
        names: the fields, in the order of the numbers. Two numbers must be given (or one, if there
            is one field); further numbers may be left out.
        wanted: the beginning of an error, such as "G,U is needed, such as 2,0.5".
    Returns: a function of a text such as "2,0.5"; it returns {field: number}.
    """

    def read(text: str) -> dict[str, float]:
        numbers = _numbers(text)
        if not min(2, len(names)) <= len(numbers) <= len(names):
            raise ScheduleError(f"{wanted}, got {text!r}")
        return dict(zip(names, numbers, strict=False))

    return read


def step_of(text: str) -> dict[str, float] | StepPasses:
    """Return the value of --step, which names passes or gives times of passes.

    Returns: the passes for a text such as "update,gather"; or {field of Costs: time} for numbers
        G,U[,A[,V]] such as "2,0.5".
    """
    names = text.split(",")
    known = [field.name for field in fields(StepPasses)]
    if set(names) <= set(known):
        return StepPasses(**dict.fromkeys(names, True))
    read = costs_of(
        "guav",
        "G,U or G,U,A or G,U,A,V is needed, such as 2,0.5 or 2,0.5,1, or names among "
        f"{', '.join(known)}",
    )
    return read(text)


def _numbers(text: str) -> list[float]:
    """Return the numbers from 0 to 1e100 that a text lists between commas.

    The list is empty if any part of the text is no such number.
    """
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        return []
    # NaN fails this comparison too.
    if not all(0 <= x <= MOST for x in numbers):
        return []
    return numbers
