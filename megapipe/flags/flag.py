"""One flag: the field of a frozen dataclass that it sets, and what may stand behind it."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from megapipe.config.notes import NO_FLAG, either
from megapipe.config.notes import flag as named_flag


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag and the field it sets."""

    name: str
    owner: type
    section: str
    field: str
    kind: Any
    default: Any

    @property
    def count(self) -> Literal["none", "one", "many"]:
        """The number of values that the flag takes: a switch takes none."""
        if self.kind is bool:
            return "none"
        return "many" if get_origin(self.kind) is tuple else "one"

    @property
    def value_type(self) -> Any:
        """Type of each value."""
        return get_args(self.kind)[0] if self.count == "many" else self.kind

    @property
    def allowed(self) -> str:
        """The values that it may have, in words."""
        kind = self.value_type
        if get_origin(kind) is Literal:
            choices = get_args(kind)
            return either(choices) if len(choices) > 1 else f"only {choices[0]}"
        words = {int: "an integer", float: "a number", str: "a text"}
        return words[kind]

    def spell(self, values: Sequence[str]) -> list[str]:
        """Tokens of a command line; `=` where a value would look like a flag."""
        if self.count == "one" and values[0].startswith("-"):
            return [f"{self.name}={values[0]}"]
        return [self.name, *values]

    def count_problem(self, values: Sequence[str]) -> str | None:
        """A problem with how many values there are; None for none."""
        text = " ".join(values)
        if self.count == "none":
            return f"{self.name} is a switch and takes no value, got {text}" if values else None
        if not values:
            dashes = f"; one that begins with a dash is written {self.name}=-..." if self.kind is str else ""
            return f"{self.name} needs a value: {self.allowed}{dashes}"
        if self.count == "one" and len(values) > 1:
            return f'{self.name} takes one value, got {len(values)}: {text} (quote it: {self.name} "{text}")'
        return None

    def value_problem(self, values: Sequence[str]) -> str | None:
        """A problem with the values themselves, if there are as many as there should be; None for none."""
        if self.count_problem(values):
            return None
        try:
            read = self.read(values)
        except (KeyError, ValueError):
            return f"{self.name} {' '.join(values)}: expected {self.allowed}"
        if self.default is None and read == "":
            return f"{self.name} '' is empty. Leave it out, or set the variable that it was to be."
        return None

    def read(self, values: Sequence[str]) -> Any:
        """The value of the field. Raises: KeyError or ValueError."""
        if self.count == "none":
            return not self.default
        kind = self.value_type
        read = {str(choice): choice for choice in get_args(kind)}.__getitem__ if get_origin(kind) is Literal else kind
        found = tuple(map(read, values))
        return found if self.count == "many" else found[0]


def flags_of(cls: type) -> dict[str, Flag]:
    """Every flag of a configuration class, by name."""
    return {flag.name: flag for flag in _flags(cls, "")}


@functools.cache
def _flags(cls: type, section: str) -> tuple[Flag, ...]:
    found: list[Flag] = []
    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        kind, *notes = get_args(hint) if get_origin(hint) is Annotated else [hint]
        if NO_FLAG in notes:
            continue
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            assert not section, "two levels: a configuration and its sections"
            found += _flags(kind, field.name)
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        assert default is not dataclasses.MISSING, f"{cls.__name__}.{field.name}: a flag has a default"
        if get_origin(kind) in (Union, types.UnionType):
            kind = next(k for k in get_args(kind) if k is not types.NoneType)
        found.append(Flag(named_flag(field.name, cls), cls, section, field.name, kind, default))
    return tuple(found)
