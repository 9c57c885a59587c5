"""Flags that were given and, with the other flags of the run, have no effect.

Megatron-LM ignores such combinations. Here each is accepted with a line at the start. The notes of
a field say in which runs its flag has no effect, see config.notes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from megapipe.config import Config
from megapipe.config.notes import Idle, notes_of, typed
from megapipe.flags.flag import Flag, flags_of

T = TypeVar("T")


def noted(kind: type[T]) -> list[tuple[Flag, T]]:
    """Return (flag, note) for each note of a class in the fields of Config.

    A field such as Annotated[int, Idle(...)] has a note of the class Idle.

    Args:
        kind: the class of the notes.
    """
    flags = flags_of(Config).values()
    notes = {owner: notes_of(owner, kind) for owner in {flag.owner for flag in flags}}
    return [(flag, note) for flag in flags for note in notes[flag.owner].get(flag.field, ())]


# At import: the fields do not change, and every start asks them.
IDLE = [(flag, note.where, note.text) for flag, note in noted(Idle)]
"""(flag, predicate of a Config in which it has no effect, what happens instead)."""


def idle(config: Config) -> list[tuple[str, str]]:
    """Return (flag as typed, what happens instead) for each flag without effect in a run."""
    found: dict[str, tuple[str, str]] = {}
    for flag, text in _given(config):
        value = config.value(flag.field)
        # The first note that applies speaks; a field may have several.
        found.setdefault(flag.name, (typed(flag.name, value), text))
    return list(found.values())


def without_idle(config: Config) -> Config:
    """Return the configuration without the flags that have no effect."""
    # Once a flag is out, another one may have lost what it acts on.
    while given := list(_given(config)):
        config = config.with_fields(**{flag.field: flag.default for flag, _ in given})
    return config


def _given(config: Config) -> Iterator[tuple[Flag, str]]:
    """Yield (flag, text) for each flag that is given and has no effect in the run.

    The text is the one of an `Idle` note of its field. A flag with several notes that apply is
    yielded with each of them.
    """
    for flag, where, text in IDLE:
        if config.value(flag.field) != flag.default and where(config):
            yield flag, text
