"""Flags that exclude each other, or lack another flag, by the notes of their fields."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from megapipe.config import Config, ModelConfig
from megapipe.config.notes import Refused, flag, notes_of, typed


def _rows() -> Iterator[tuple[type, str, Refused]]:
    for section in Config().sections:
        owner = type(section)
        for name, notes in notes_of(owner, Refused).items():
            for note in notes:
                yield owner, name, note


_ROWS = tuple(_rows())


def refusals(config: Config, *, of_layer: bool = False) -> Iterator[str]:
    """Yield an error for each combination of flags that is refused.

    The combinations are written in annotations of the configuration's fields, as notes of the class
    `Refused`.

    Args:
        of_layer: whether `config.model` is a single layer of the model, such as a dense layer of a
            model with experts. Demands on the whole model are skipped then, such as --num-experts
            for --expert-model-parallel-size.
    """
    given = dict(pair for section in config.sections for pair in _given(section))
    for owner, name, note in _ROWS:
        # A dense layer has no experts, though the model that it is part of has them.
        if of_layer and owner is not ModelConfig and not note.others:
            continue
        if name not in given or not note.where(config):
            continue
        if not note.others:
            yield note.text.format(given[name])
        for other in note.others:
            if other in given:
                yield note.text.format(given[name], given[other])


def _given(section: Any) -> Iterator[tuple[str, str]]:
    """Yield each field that is not at its default, such as ("num_layers", "--num-layers 4").

    Args:
        section: a part of the configuration, such as `config.model`.
    """
    for field in fields(section):
        value = getattr(section, field.name)
        if value != field.default:
            yield field.name, typed(flag(field.name, type(section)), value)
