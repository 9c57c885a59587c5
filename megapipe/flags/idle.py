"""Combinations that Megatron-LM ignores: a flag that is given and, beside the others, has nothing to act on.

Each is accepted with one line at start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megapipe.config import Config
from megapipe.flags.idle_experts import EXPERT_ROWS
from megapipe.flags.idle_rows import ROWS
from megapipe.flags.parse import Flag, flags_of

_FLAGS = {flag.field: flag for flag in flags_of(Config).values()}
IDLE = tuple((_FLAGS[field], where, text) for fields, where, text in (*ROWS, *EXPERT_ROWS) for field in fields.split())
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
    """The same run without the flags that have nothing to act on."""
    while given := list(_given(config)):
        for flag, _ in given:
            section = replace(getattr(config, flag.section), **{flag.field: flag.default})
            config = replace(config, **{flag.section: section})
    return config


def _given(config: Config) -> Iterator[tuple[Flag, str]]:
    for flag, where, text in IDLE:
        if getattr(getattr(config, flag.section), flag.field) != flag.default and where(config):
            yield flag, text
