"""Annotations of a field: everything about its flag that its type and default do not say.

`lr: Annotated[float | None, Required("3e-4"), ABOVE_0, CURVE] = None`. Readers ask for the notes of
one kind: `checks` for ranges and refusals, `checkpoint` for what may differ on --load, `flags` for
runs in which a flag has no effect. Such a note, an Idle, is named after what the flag needs:
a field with SAVES has an effect only if --save is given.
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
    """Return {field: its notes of class `kind`}, without fields that have no such note.

    A note is an object in the annotation of a field, such as a Range.

    Args:
        cls: the dataclass.
        kind: the class of the notes.
    """
    wanted: type = kind
    return dict(_of_kind(cls, wanted))


@cache
def _of_kind(cls: type, kind: type) -> dict[str, tuple[Any, ...]]:
    # A search of plans checks hundreds of configurations, and each check asks for many flags.
    found = {}
    for name, notes in _notes(cls).items():
        wanted = tuple(note for note in notes if isinstance(note, kind))
        if wanted:
            found[name] = wanted
    return found


def note_of(cls: type, kind: type[T]) -> dict[str, T]:
    """Return {field: note} for a kind of note that a field has at most once.

    A note is an object in the annotation of a field, such as a Range.
    """
    # Two notes of such a kind would be a mistake in a field, and fail here.
    return {name: note for name, (note,) in notes_of(cls, kind).items()}


@cache
def _notes(cls: type) -> dict[str, tuple[Any, ...]]:
    # Every annotation is evaluated here, about 300 of them: once a class, as each command asks.
    hints = get_type_hints(cls, include_extras=True)
    fields = dataclasses.fields(cls)
    return {field.name: getattr(hints[field.name], "__metadata__", ()) for field in fields}


@dataclass(frozen=True)
class Spelled:
    """The annotation of a field whose flag is not the field's name with dashes."""

    flag: str


@dataclass(frozen=True)
class _NoFlag:
    """The annotation of a field without a flag, which megapipe sets itself."""


NO_FLAG = _NoFlag()


@dataclass(frozen=True)
class Required:
    """The annotation of a field whose flag every run needs.

    Attributes:
        example: a value that the error proposes.
    """

    example: str


@dataclass(frozen=True)
class Range:
    """An annotation that says which numbers a flag accepts; infinity is never one of them.

    `problem` returns the rule if a number breaks it.

    Attributes:
        words: the rule, for errors.
        holds: returns whether a number follows the rule.
    """

    words: str
    holds: Callable[[Any], bool]

    def problem(self, value: float) -> str | None:
        """Return `words` if a value breaks the rule; None if it follows the rule."""
        # NaN fails every comparison. Infinity passes some, and so is asked for separately.
        if not self.holds(value):
            return f"must be {self.words}"
        return f"must be {self.words} and finite" if value == math.inf else None


def flag(field: str, cls: type | None = None) -> str:
    """Return the flag of a field, such as --num-layers.

    Args:
        cls: the dataclass of the field, whose note may spell the flag in another way.
    """
    spelled = notes_of(cls, Spelled).get(field) if cls else None
    name = spelled[0].flag if spelled else field.replace("_", "-")
    return f"--{name}"


def at_least(least: int) -> Range:
    """Return the annotation that accepts numbers from `least` on."""
    return Range(f"at least {least}", lambda v: v >= least)


FROM_0 = at_least(0)
FROM_1 = at_least(1)
ABOVE_0 = Range("above 0", lambda v: v > 0)
UP_TO_1 = Range("above 0 and at most 1", lambda v: 0 < v <= 1)
BELOW_1 = Range("at least 0 and below 1", lambda v: 0 <= v < 1)
FINITE = Range("finite", lambda v: abs(v) < math.inf)
ANY = Range("a number", lambda v: True)
"""For a number that every value suits, or that another check judges."""
LISTED = Range("at least 1 and at most 100000", lambda v: 1 <= v <= 10**5)
"""For lengths of lists, by rank or by layer, that are built before anything starts."""
CLOCK = Range("above 0 and at most 1e9", lambda v: 0 < v <= 1e9)
"""For seconds that a clock of the system can count."""


class Resume(StrEnum):
    """An annotation for --load: how to treat a value that differs from the checkpoint's."""

    MUST = "must match"
    """Refuse it: the weights would have another meaning."""
    CURVE = "curve"
    """Refuse it without --override-opt_param-scheduler or --use-checkpoint-opt_param-scheduler."""
    CONTENTS = "contents"
    """Compare the contents of the files, and treat a difference as NAMED."""
    NAMED = "when named"
    """Refuse it unless --override-on-load names the flag."""
    MICROBATCH = "microbatch"
    """Treat it as NAMED where a result depends on which sequences are computed together."""
    FREE = "free"
    """Accept it: results stay equal, or differ only in rounding."""


MUST, CURVE, CONTENTS, NAMED, MICROBATCH, FREE = Resume


@dataclass(frozen=True)
class Idle:
    """The annotation of a flag that has no effect in some runs.

    Attributes:
        where: takes a Config, and returns whether the flag has no effect in it.
        text: what happens instead, and when, such as "nothing is dropped, without --num-experts".
            If several notes of a field apply, only the first one's text is printed.
    """

    where: Callable[[Any], bool]
    text: str


def of_no_layer(where: Callable[[Any], bool], text: str) -> Idle:
    """Return the annotation of a flag that has no effect in some models.

    --per-layer-overrides can give single layers other settings, so with it the flag counts as used.

    Args:
        where: takes a ModelConfig, and returns whether the flag has no effect in it.
        text: what happens instead.
    """
    return Idle(
        lambda config: where(config.model) and config.model.per_layer_overrides is None,
        text,
    )


def needs(fields: str, instead: str, *values: object, least: int | None = None) -> Idle:
    """Return the annotation of a flag that has no effect without another flag.

    Args:
        fields: the other flags' fields, separated by spaces. One of them is enough.
        instead: what happens without these flags.
        values: the other flag must have one of these values. Without `values` and `least`, any
            value that Python counts as true is enough.
        least: the other flag must have at least this number; None for no such demand.
    """

    def enough(value: Any) -> bool:
        if values:
            return value in values
        return bool(value) if least is None else value >= least

    def acts(config: Any) -> bool:
        # A note names a field and not its section, so all sections are asked. The two fields of
        # Config itself have no such names.
        for section in vars(config).values():
            for name in fields.split():
                value = getattr(section, name, None)
                if value is not None and enough(value):
                    return True
        return False

    condition = ""
    if least is not None:
        condition = f" of at least {least}"
    elif values:
        condition = f" {either(values)}"
    names = either(list(map(flag, fields.split())))
    return Idle(lambda config: not acts(config), f"{instead}, without {names}{condition}")


@dataclass(frozen=True)
class Refused:
    """The annotation of a flag that is refused in some runs, if it is given.

    Attributes:
        text: the sentence with its remedy. The first {} is the flag as typed, the second the given
            flag of `others`.
        where: takes a Config, and returns whether the flag is refused in it.
        others: fields of other flags. If there are any, the flag is refused only if it is given
            together with one of them, and `where` holds.
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
    """Return the annotation of a flag that is refused together with any of the others.

    Args:
        others: the fields of the other flags, separated by spaces.
        why: the reason; its {} are the two flags as typed.
        remedy: a sentence after the reason.
        where: takes a Config. The flags are refused only if it returns True. Default: always.
    """
    return Refused(f"{why}. {remedy}", where, tuple(others.split()))


def demands(fields: str, *values: object, says: str = "", least: int | None = None) -> Refused:
    """Return the annotation of a flag that is refused without another flag.

    Args:
        fields: the other flags' fields, separated by spaces. One of them is enough.
        values: the other flag must have one of these values. Without `values` and `least`, any
            value that Python counts as true is enough.
        says: the whole sentence; empty makes one from the flags' names.
        least: the other flag must have at least this number; None for no such demand.
    """
    lacking = needs(fields, "{} has no effect", *values, least=least)
    # "{} has no effect, without X" is a line about a flag; in a sentence the comma goes.
    text = f"{lacking.text.replace(',', '', 1)}. Add it, or leave it out."
    return Refused(says or text, lacking.where)


def typed(name: str, value: object) -> str:
    """Return a flag with its value, such as --lr 0.1; for True, the flag alone."""
    if value is True:
        return name
    # A field of type float has 1 as 1.0, which nobody has typed.
    values = value if isinstance(value, tuple) else (value,)
    return " ".join((name, *(str(x).removesuffix(".0") for x in values)))


def either(choices: Sequence[object]) -> str:
    """Return the choices in words: a, b or c."""
    *most, last = map(str, choices)
    return f"{', '.join(most)} or {last}" if most else last


@dataclass(frozen=True)
class ReadBy(Idle):
    """The annotation of a field that only some optimizers read.

    An optimizer of the user's own may read any field.
    """


def read_by(*optimizers: str, instead: str) -> ReadBy:
    """Return the annotation of a field that only these optimizers read.

    Args:
        optimizers: names of --optimizer.
        instead: what happens with another optimizer.
    """

    def unread(config: Any) -> bool:
        chosen = config.optimizer.optimizer
        return chosen not in optimizers and ":" not in chosen  # FILE.py:NAME is the user's own

    return ReadBy(unread, instead)


PREDICTED = needs("check memory_limit_gib", "only megapipe plan and check use it")
NEEDED = needs("check", "a launch needs all its files and folders")
LAUNCHED = needs("check", "the launch says it")
"""The flags of --check, in a launch."""
