"""Annotations of a field: all that its type and default do not say of its flag.

`lr: Annotated[float | None, Required("3e-4"), ABOVE_0, CURVE] = None`. Whoever has to know asks for the notes of
one kind: `checks` for ranges and what is refused, `checkpoint` for what may differ on --load, `flags` for what is idle.
A note such as SAVES, an Idle, names what the flag needs: it acts with --save alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


def notes_of(cls: type, kind: type[T]) -> dict[str, tuple[T, ...]]:
    """The notes of a kind, by field of a dataclass, of those that have any."""
    found = {name: tuple(note for note in notes if isinstance(note, kind)) for name, notes in _notes(cls).items()}
    return {name: notes for name, notes in found.items() if notes}


def note_of(cls: type, kind: type[T]) -> dict[str, T]:
    """The note of each field, of kinds of which a field has one."""
    return {name: note for name, (note,) in notes_of(cls, kind).items()}


@cache
def _notes(cls: type) -> dict[str, tuple[Any, ...]]:
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: getattr(hints[field.name], "__metadata__", ()) for field in dataclasses.fields(cls)}


@dataclass(frozen=True)
class Spelled:
    """Flag whose name is not the field's with dashes."""

    flag: str


@dataclass(frozen=True)
class _NoFlag:
    """Field that is set by us alone."""


NO_FLAG = _NoFlag()


@dataclass(frozen=True)
class Required:
    """Flag that no run does without. example: what it may be."""

    example: str


@dataclass(frozen=True)
class Range:
    """Numbers that a flag may have, in words and as a question. NaN and infinity are in none."""

    words: str
    holds: Callable[[Any], bool]

    def problem(self, value: float) -> str | None:
        """A problem with a value, if there is any."""
        if self.holds(value) and value != math.inf:
            return None
        return f"must be {self.words}" + " and finite" * self.holds(value)


def flag(field: str, cls: type | None = None) -> str:
    """Return the usual name of a field's flag, or the one that the class spells."""
    spelled = notes_of(cls, Spelled).get(field) if cls else None
    return f"--{spelled[0].flag if spelled else field.replace('_', '-')}"


def at_least(least: int) -> Range:
    return Range(f"at least {least}", lambda v: v >= least)


ABOVE_0 = Range("above 0", lambda v: v > 0)
UP_TO_1 = Range("above 0 and at most 1", lambda v: 0 < v <= 1)
BELOW_1 = Range("at least 0 and below 1", lambda v: 0 <= v < 1)
FINITE = Range("finite", lambda v: abs(v) < math.inf)
ANY = Range("a number", lambda v: True)
"""What no number breaks, or what another check has to judge."""
LISTED = Range("at least 1 and at most 100000", lambda v: 1 <= v <= 10**5)
"""The length of what is listed, rank by rank or layer by layer, before anything starts."""
CLOCK = Range("above 0 and at most 1e9", lambda v: 0 < v <= 1e9)
"""Seconds that a clock of the system can count."""


class Resume(StrEnum):
    """Fates of a setting that is not the checkpoint's."""

    MUST = "must match"
    """Refused: the weights mean something else."""
    CURVE = "curve"
    """Refused without --override-opt_param-scheduler or its like."""
    CONTENTS = "contents"
    """The contents of the files are compared, as NAMED."""
    NAMED = "when named"
    """Refused unless --override-on-load has the name."""
    MICROBATCH = "microbatch"
    """NAMED where a number hangs on what is computed together."""
    FREE = "free"
    """Decides no number, or its rounding alone."""


MUST, CURVE, CONTENTS, NAMED, MICROBATCH, FREE = Resume


@dataclass(frozen=True)
class Idle:
    """Run in which the flag, if given, has nothing to act on.

    Attributes:
        where: of a Config: is it such a run?
        text: what happens instead; it ends in what there is, or is not. Of several notes the first that fits is told.
    """

    where: Callable[[Any], bool]
    text: str


def of_no_layer(where: Callable[[Any], bool], text: str) -> Idle:
    """Return the note of a flag that is idle in such a model, unless --per-layer-overrides has other layers."""
    return Idle(lambda config: where(config.model) and config.model.per_layer_overrides is None, text)


def needs(fields: str, instead: str, *values: object, least: int | None = None) -> Idle:
    """Flag that acts only beside one of some others: if that is given, has one of the values, or is at least so many.

    fields: those of the others. instead: what happens without them.
    """

    def acts(config: Any) -> bool:
        given = [getattr(part, name, None) for part in vars(config).values() for name in fields.split()]
        return any(x in values if values else x if least is None else x >= least for x in given if x is not None)

    names = either(list(map(flag, fields.split())))
    of = f" of at least {least}" if least is not None else f" {either(values)}" if values else ""
    return Idle(lambda config: not acts(config), f"{instead}, without {names}{of}")


@dataclass(frozen=True)
class Refused:
    """Run in which the flag, if given, is refused.

    Attributes:
        text: the sentence and its remedy, with {} for the flag as typed, and then for the other flag.
        where: of a Config: is it such a run?
        others: fields of flags that it does not go with, each by itself. Without any, `where` alone decides.
    """

    text: str
    where: Callable[[Any], bool]
    others: tuple[str, ...] = ()


def excludes(
    others: str,
    why: str = "{} does not go with {}",
    remedy: str = "Leave one out.",
    where: Callable[[Any], bool] = lambda config: True,
) -> Refused:
    """Return the note of a flag that is refused next to each of the others, where a run is such."""
    return Refused(f"{why}. {remedy}", where, tuple(others.split()))


def demands(fields: str, *values: object, says: str = "", least: int | None = None) -> Refused:
    """Return the note of a flag that is refused where `needs` would let it do nothing."""
    lacking = needs(fields, "{} has no effect", *values, least=least)
    text = f"{lacking.text.replace(',', '', 1)}. Add it, or leave it out."
    return Refused(says or text, lacking.where)


def typed(name: str, value: object) -> str:
    """Return a flag with its value, as on a command line."""
    values = value if isinstance(value, tuple) else () if value is True else (value,)
    return " ".join((name, *(str(x).removesuffix(".0") for x in values)))


def either(choices: Sequence[object]) -> str:
    """Return the choices in words: a, b or c."""
    *most, last = map(str, choices)
    return f"{', '.join(most)} or {last}" if most else last


@dataclass(frozen=True)
class ReadBy(Idle):
    """Setting of some optimizers; one of the user's own may read any."""


def read_by(*optimizers: str, instead: str) -> ReadBy:
    return ReadBy(lambda c: c.optimizer.optimizer not in optimizers and ":" not in c.optimizer.optimizer, instead)
