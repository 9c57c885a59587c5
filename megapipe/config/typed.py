"""Check values read from a file against the types of a dataclass's fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin

_WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a finite number",
    str: "a text",
    dict: "an object",
    list: "a list",
}


def unfit(kinds: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each value that does not have its field's type.

    Args:
        kinds: {field: type}.
        values: {field: value}. Fields that are not in `kinds` are skipped.
    """
    for name, value in values.items():
        if name in kinds and not fits(value, kinds[name]):
            yield f"{name} is {words(kinds[name])}, got {shown(value)}"


def fits(value: object, kind: Any) -> bool:
    """Return whether a value has the type `kind`. An int is a float too; a bool only a bool."""
    inner = get_args(kind)
    if get_origin(kind) is Literal:
        return value in inner
    if get_origin(kind) in (tuple, list):
        return isinstance(value, tuple | list) and all(fits(item, inner[0]) for item in value)
    if inner:  # a union
        return any(fits(value, one) for one in inner)
    if kind is float:
        # JSON writes 1.0 as 1, and Python's reader takes NaN and Infinity, which fit no field.
        return type(value) in (int, float) and abs(value) < float("inf")  # type: ignore[arg-type]
    # Not isinstance: True is an instance of int.
    return type(value) is kind


def shown(value: object) -> str:
    """Return a value as JSON text, cut to 60 characters."""
    text = json.dumps(value, default=lambda it: type(it).__name__)
    return text if len(text) <= 60 else f"{text[:57]}..."


def words(kind: Any) -> str:
    """Return the name of a type, as it stands in a sentence.

    Args:
        kind: the type. `int | None` gives "an integer", a Literal its values.
    """
    inner = get_args(kind)
    if get_origin(kind) is Literal:
        return " or ".join(map(str, inner))
    if get_origin(kind) is tuple:
        return f"a list, each {words(inner[0])}"
    if inner:
        return " or ".join(words(one) for one in inner if one is not NoneType)
    return _WORDS[kind]
