"""Flags that do not go together, or lack what they need: notes of their fields say which, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from megapipe.config import Config, ModelConfig
from megapipe.config.notes import Refused, flag, notes_of, typed

_ROWS = tuple(
    (type(section), name, note)
    for section in Config().sections
    for name, notes in notes_of(type(section), Refused).items()
    for note in notes
)


def refusals(config: Config, *, of_layer: bool = False) -> Iterator[str]:
    """Yield the sentence of each note that refuses these flags, in the order of the fields.

    Args:
        of_layer: the model is that of one layer, such as a dense one among layers with experts. What a flag of the
            run demands of a model, such as experts for --expert-model-parallel-size, is asked of the whole model.
    """
    given = dict(pair for section in config.sections for pair in _given(section))
    for owner, name, note in _ROWS:
        if of_layer and owner is not ModelConfig and not note.others:
            continue
        if name in given and note.where(config):
            others = [given[other] for other in note.others if other in given]
            yield from (note.text.format(given[name], other) for other in others)
            if not note.others:
                yield note.text.format(given[name])


def _given(section: Any) -> Iterator[tuple[str, str]]:
    """Yield the fields that have not their defaults, each with its flag as typed."""
    for field in fields(section):
        value = getattr(section, field.name)
        if value != field.default:
            yield field.name, typed(flag(field.name, type(section)), value)
