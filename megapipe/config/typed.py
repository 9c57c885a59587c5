"""Values of a file held against the types of a dataclass's fields, as those of flags are when they are parsed."""

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
    """One text for each value that its field cannot have. Names that are no field are left to the caller."""
    for name, value in values.items():
        if name in kinds and not fits(value, kinds[name]):
            yield f"{name} is {words(kinds[name])}, got {shown(value)}"


def fits(value: object, kind: Any) -> bool:
    """Is the value one of this type? An int is a number too; a bool is only ever a bool."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) in (tuple, list):
        return isinstance(value, tuple | list) and all(fits(item, get_args(kind)[0]) for item in value)
    if get_args(kind):  # a union
        return any(fits(value, one) for one in get_args(kind))
    if kind is float:
        return type(value) in (int, float) and abs(value) < float("inf")  # type: ignore[arg-type]
    return type(value) is kind


def shown(value: object) -> str:
    """A value as it stands in JSON, at most a line of it."""
    text = json.dumps(value, default=lambda it: type(it).__name__)
    return text if len(text) <= 60 else f"{text[:57]}..."


def words(kind: Any) -> str:
    """The name of a type in a sentence."""
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"a list, each {words(get_args(kind)[0])}"
    if get_args(kind):
        return " or ".join(words(one) for one in get_args(kind) if one is not NoneType)
    return _WORDS[kind]
