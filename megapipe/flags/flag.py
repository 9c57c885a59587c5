"""A flag: the field of a frozen dataclass that it sets, and the values that it takes."""

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
    """A flag and the field that it sets.

    `count_problem` and `value_problem` check values as typed, and `read` converts them.

    `count` and `value_type` describe the flag's values, `allowed` does so in words, and `spell`
    writes values for a command line.

    Attributes:
        name: the flag, such as --num-layers.
        owner: the dataclass that has the field.
        section: the field of Config that holds the owner; "" for a class that is parsed by itself.
        field: the field's name.
        kind: the field's type without None and notes: int for Annotated[int | None, Idle(...)].
        default: the field's default.
    """

    name: str
    owner: type
    section: str
    field: str
    kind: Any
    default: Any

    @property
    def count(self) -> Literal["none", "one", "many"]:
        """The number of values that the flag takes; a switch takes none."""
        if self.kind is bool:
            return "none"
        return "many" if get_origin(self.kind) is tuple else "one"

    @property
    def value_type(self) -> Any:
        """The type of each value."""
        return get_args(self.kind)[0] if self.count == "many" else self.kind

    @property
    def allowed(self) -> str:
        """The values that the flag accepts, in words."""
        kind = self.value_type
        if get_origin(kind) is Literal:
            choices = get_args(kind)
            return either(choices) if len(choices) > 1 else f"only {choices[0]}"
        words = {int: "an integer", float: "a number", str: "a text"}
        return words[kind]

    def spell(self, values: Sequence[str]) -> list[str]:
        """Return the flag and its values as words of a command line.

        The form is --flag=VALUE if the flag takes one value, and that begins with a dash.
        """
        # A value such as -1 or -inf would be taken for the next flag.
        if self.count == "one" and values[0].startswith("-"):
            return [f"{self.name}={values[0]}"]
        return [self.name, *values]

    def count_problem(self, values: Sequence[str]) -> str | None:
        """Return the error for a wrong number of values; None if the number is right.

        Args:
            values: as typed.
        """
        text = " ".join(values)
        if self.count == "none":
            return f"{self.name} is a switch and takes no value, got {text}" if values else None
        if not values:
            dashes = ""
            if self.kind is str:
                dashes = f"; one that begins with a dash is written {self.name}=-..."
            return f"{self.name} needs a value: {self.allowed}{dashes}"
        # Mostly a text with spaces whose quotes a shell script has lost.
        if self.count == "one" and len(values) > 1:
            got = f"got {len(values)}: {text}"
            return f'{self.name} takes one value, {got} (quote it: {self.name} "{text}")'
        return None

    def value_problem(self, values: Sequence[str]) -> str | None:
        """Return the error for values that cannot be read; None if all values can be read.

        An empty text is an error for a flag whose default is None. A wrong number of values is left
        to `count_problem`.

        Args:
            values: as typed.
        """
        # One line for one mistake: values of a wrong number are not read.
        if self.count_problem(values):
            return None
        try:
            read = self.read(values)
        # KeyError: the value is none of a choice's words. ValueError: int() or float() cannot read
        # it.
        except (KeyError, ValueError):
            return f"{self.name} {' '.join(values)}: expected {self.allowed}"
        if self.default is None and read == "":
            # A variable of a shell script that was never set.
            return f"{self.name} '' is empty. Leave it out, or set the variable that it was to be."
        return None

    def read(self, values: Sequence[str]) -> Any:
        """Return the value of the field.

        Args:
            values: as typed, and found right by `count_problem` and `value_problem`.
        Raises: KeyError or ValueError for values that cannot be read.
        """
        if self.count == "none":
            # A switch says the opposite of its default, as store_true and store_false do in
            # argparse.
            return not self.default
        read = self.value_type
        if get_origin(read) is Literal:
            # A choice may be a number, as in --timing-log-level 2, and a command line has only
            # words.
            read = {str(choice): choice for choice in get_args(read)}.__getitem__
        found = tuple(map(read, values))
        return found if self.count == "many" else found[0]


def flags_of(cls: type) -> dict[str, Flag]:
    """Return {name: flag} of a configuration class, in the order of the fields."""
    return {flag.name: flag for flag in _flags(cls, "")}


# Types are evaluated once: a start asks for the flags in several places.
@functools.cache
def _flags(cls: type, section: str) -> tuple[Flag, ...]:
    found: list[Flag] = []
    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        kind, *notes = get_args(hint) if get_origin(hint) is Annotated else [hint]
        if NO_FLAG in notes:
            continue
        # A section of Config: its flags are on the command line without the section's name.
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            assert not section, "two levels: a configuration and its sections"
            found += _flags(kind, field.name)
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        assert default is not dataclasses.MISSING, f"{cls.__name__}.{field.name} has no default"
        if get_origin(kind) in (Union, types.UnionType):
            # Of "int | None", the type of a value that is given.
            kind = next(k for k in get_args(kind) if k is not types.NoneType)
        name = named_flag(field.name, cls)
        found.append(Flag(name, cls, section, field.name, kind, default))
    return tuple(found)
