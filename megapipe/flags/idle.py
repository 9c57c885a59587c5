"""Combinations that Megatron-LM ignores: a flag that is given and, beside the others, has nothing to act on.

Each is accepted with one line at start. In which runs a flag is idle stands at its field, see config.notes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from megapipe.config import Config
from megapipe.config.notes import Idle, notes_of, typed
from megapipe.flags.flag import Flag, flags_of

T = TypeVar("T")


def noted(kind: type[T]) -> list[tuple[Flag, T]]:
    """Return each note of a kind with its flag."""
    flags = flags_of(Config).values()
    return [(flag, note) for flag in flags for note in notes_of(flag.owner, kind).get(flag.field, ())]


IDLE = [(flag, note.where, note.text) for flag, note in noted(Idle)]
"""A flag, in which run it has nothing to act on, and what happens instead."""


def idle(config: Config) -> list[tuple[str, str]]:
    """Flags that were given and change nothing beside the others, each with what happens instead."""
    found: dict[str, tuple[str, str]] = {}
    for flag, text in _given(config):
        value = config.value(flag.field)
        found.setdefault(flag.name, (typed(flag.name, value), text))
    return list(found.values())


def without_idle(config: Config) -> Config:
    """The run without the flags that have nothing to act on."""
    while given := list(_given(config)):
        config = config.with_fields(**{flag.field: flag.default for flag, _ in given})
    return config


def _given(config: Config) -> Iterator[tuple[Flag, str]]:
    for flag, where, text in IDLE:
        if config.value(flag.field) != flag.default and where(config):
            yield flag, text
