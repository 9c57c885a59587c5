"""Costs as a JSON file, in the same format for every tool: `--costs FILE.json`.

The file is an object with the fields of `Costs`. A value is a number, or a list with one for each
stage (of `comm`: for each link). `comm` may also be {"latency": L, "bytes": N, "bandwidth": R},
each a number or a list: a message then takes L + N / R. A schedule from `show --json` contains its
costs, so it is read as a costs file too.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import HEAD, MOST, SHARES, Costs

_MESSAGE = ("latency", "bytes", "bandwidth")
_SINGLE = ("fb", "overhead", "piece", "wide_k", *SHARES, *HEAD)
"""Costs that are the same on every stage."""


def load_costs(path: str | Path) -> Costs:
    """Read a costs file.

    Raises: ScheduleError with one line that names the file and the field.
    """
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ScheduleError(f"{path} is no costs file: {error}") from None
    # "ranks" is the table of a schedule's file, and no field of costs.
    if isinstance(given, dict) and "ranks" in given:
        if "costs" not in given:
            raise ScheduleError(
                f"{path} is a schedule without costs. Give costs, or what `show --json` writes."
            )
        given = given["costs"]
    return read_costs(given, path)


def read_costs(given: object, path: str | Path = "costs.json") -> Costs:
    """Return the costs that a costs file describes, given its parsed JSON.

    Args:
        given: the parsed JSON.
        path: the file, for errors.
    Raises: ScheduleError for a field that costs do not have, or for a wrong value. ScheduleError if
        f, b and w are all 0, or if a head takes longer than its stage.
    """
    if not isinstance(given, dict):
        raise ScheduleError(
            f'{path} is no costs file: an object is needed, such as {{"f": 10, "b": 11, "w": 8}}.'
        )
    known = [field.name for field in fields(Costs)]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ScheduleError(f"{path} names {', '.join(unknown)}; costs have {', '.join(known)}.")
    values: dict[str, Any] = {name: _value(path, name, value) for name, value in given.items()}
    # Costs knows the ranges of its fields, but not the file that named them.
    try:
        costs = Costs(**values)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    for name, part in zip(("f", "b", "w"), HEAD, strict=True):
        whole = getattr(costs, name)
        head = getattr(costs, part) or 0.0
        if isinstance(whole, tuple) and head > whole[-1]:
            raise ScheduleError(
                f"{path}: {part} is a part of the last stage's {name}, {whole[-1]:g}, got {head:g}."
            )
    if not any((*_numbers(costs.f), *_numbers(costs.b), *_numbers(costs.w))):
        raise ScheduleError(
            f"{path}: f, b and w are all 0, and no step can be predicted of that. Give one a time."
        )
    return costs


def dump_costs(costs: Costs) -> str:
    """Return the text of a costs file, from which `load_costs` reads equal costs."""
    return json.dumps(by_field(costs), indent=1) + "\n"


def by_field(costs: Costs) -> dict[str, Any]:
    """Return the JSON object of a costs file: {field: value} for all fields that are not None."""
    return {name: value for name, value in vars(costs).items() if value is not None}


def _numbers(value: float | tuple[float, ...]) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


def _value(path: str | Path, name: str, value: object) -> float | tuple[float, ...]:
    """Return a field's value from its JSON.

    The JSON of `comm` may be an object with latency, bytes and bandwidth of a message.

    Args:
        path: the file, for errors.
        name: the name of the field.
        value: the field's parsed JSON.
    Raises: ScheduleError that names file and field.
    """
    # Latency and bandwidth are what people know of a link; the clock needs the time of a message.
    if name == "comm" and isinstance(value, dict):
        missing = [part for part in _MESSAGE if part not in value]
        if missing:
            raise ScheduleError(
                f"{path}: comm lacks {', '.join(missing)}; it has {', '.join(_MESSAGE)}."
            )
        return _message(path, {part: _value(path, part, value[part]) for part in _MESSAGE})
    numbers: list[Any] = [value]
    lists = ""
    if name not in _SINGLE:
        lists = " or a list of numbers"
        if isinstance(value, list):
            numbers = value
    # JSON's true is a bool, which Python counts as the integer 1.
    numeric = all(isinstance(x, int | float) and not isinstance(x, bool) for x in numbers)
    # The limit comes before float(), which overflows for an integer of 400 digits.
    if not numbers or not numeric or any(abs(x) > MOST for x in numbers):
        raise ScheduleError(
            f"{path}: {name} must be a number{lists}, got {json.dumps(value)[:100]}."
        )
    if isinstance(value, list):
        return tuple(map(float, numbers))
    return float(numbers[0])


def _message(
    path: str | Path, parts: dict[str, float | tuple[float, ...]]
) -> float | tuple[float, ...]:
    """Return the time of a message: latency + bytes / bandwidth.

    The result is one number, or one for each link if a part is a list.

    Args:
        path: the file, for errors.
        parts: "latency", "bytes" and "bandwidth", each a number or one for each link.
    """
    links = max(len(_numbers(x)) for x in parts.values())
    # One number is the same for all links, such as the bytes of a message.
    rows = [x if isinstance(x, tuple) else (x,) * links for x in parts.values()]
    if len({len(row) for row in rows}) > 1 or min(rows[2]) <= 0:
        raise ScheduleError(f"{path}: comm needs lists of one length and a bandwidth above 0.")
    columns = zip(*rows, strict=True)
    times = tuple(latency + size / bandwidth for latency, size, bandwidth in columns)
    is_list = any(isinstance(x, tuple) for x in parts.values())
    return times if is_list else times[0]
