"""Checks of single values, as a flag's field has them; and arithmetic for the sentences of other checks."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

from megapipe.config import Config
from megapipe.config.notes import Range, Required, flag, note_of, typed


def check_numbers(config: Config) -> tuple[Config, list[str]]:
    """Problems of single values, and the configuration with those values at their defaults for the other checks."""
    problems = []
    for section in (section.name for section in fields(config) if is_dataclass(getattr(config, section.name))):
        part = getattr(config, section)
        ranges, required = note_of(type(part), Range), note_of(type(part), Required)
        reset = {}
        for field in fields(part):
            name, value = field.name, getattr(part, field.name)
            if value is None and name in required:
                problems.append(f"{flag(name)} is missing, for example {flag(name)} {required[name].example}")
            elif value is not None and name in ranges and (problem := ranges[name].problem(value)):
                problems.append(f"{typed(flag(name), value)} {problem}")
                reset[name] = field.default
        if reset:
            config = replace(config, **{section: replace(part, **reset)})
    return config, problems


def division(value: int, by: int) -> str:
    """The arithmetic of a division with a rest."""
    return f"{value} = {by} x {value // by} + {value % by}"


def divisors(value: int) -> list[int]:
    """Return what divides a number, ascending."""
    return [d for d in range(1, value + 1) if value % d == 0]


def near(value: int, multiple_of: int) -> str:
    """The multiples on both sides, those above 0."""
    low = value // multiple_of * multiple_of
    return f"{low} or {low + multiple_of}" if low else str(multiple_of)
