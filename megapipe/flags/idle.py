"""Combinations that Megatron-LM ignores: a flag that is given and, beside the others, has nothing to act on.

Each is accepted with one line at start. In which runs a flag is idle stands at its field, see config.notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from megapipe.config import Config
from megapipe.config.notes import Idle, notes_of
from megapipe.flags.flag import Flag, flags_of

IDLE: tuple[tuple[Flag, Callable[[Config], bool], str], ...] = tuple(
    (flag, note.where, note.text)
    for flag in flags_of(Config).values()
    for note in notes_of(flag.owner, Idle).get(flag.field, ())
)
"""A flag, in which run it has nothing to act on, and what happens instead."""


def idle(config: Config) -> list[tuple[str, str]]:
    """Flags that were given and change nothing beside the others, each with what happens instead."""
    found: dict[str, tuple[str, str]] = {}
    for flag, text in _given(config):
        value = getattr(getattr(config, flag.section), flag.field)
        said = " ".join(map(str, value)) if isinstance(value, tuple) else value
        found.setdefault(flag.name, (flag.name if value is True else f"{flag.name} {said}", text))
    return list(found.values())


def without_idle(config: Config) -> Config:
    """The run without the flags that have nothing to act on."""
    while given := list(_given(config)):
        for flag, _ in given:
            section = replace(getattr(config, flag.section), **{flag.field: flag.default})
            config = replace(config, **{flag.section: section})
    return config


def _given(config: Config) -> Iterator[tuple[Flag, str]]:
    for flag, where, text in IDLE:
        if getattr(getattr(config, flag.section), flag.field) != flag.default and where(config):
            yield flag, text
