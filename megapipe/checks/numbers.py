"""Checks of single values by the notes of their fields, and arithmetic for error messages."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

from megapipe.config import Config
from megapipe.config.notes import Range, Required, flag, note_of, typed


def check_numbers(config: Config) -> tuple[Config, list[str]]:
    """Check each flag's value by itself, without regard to the others.

    Returns: (the configuration with each wrong value replaced by the default, the problems). A
        required value that is missing is a problem, and stays None. The other checks use that
        configuration.
    """
    problems = []
    sections = [name for name, part in vars(config).items() if is_dataclass(part)]
    for section in sections:
        part = getattr(config, section)
        ranges = note_of(type(part), Range)
        required = note_of(type(part), Required)
        reset = {}
        for field in fields(part):
            name = field.name
            value = getattr(part, name)
            if value is None and name in required:
                given = flag(name)
                problems.append(f"{given} is missing, for example {given} {required[name].example}")
            elif value is not None and name in ranges and (problem := ranges[name].problem(value)):
                problems.append(f"{typed(flag(name), value)} {problem}")
                # Defaults are sound, so every later check can compute with this configuration.
                reset[name] = field.default
        if reset:
            config = replace(config, **{section: replace(part, **reset)})
    return config, problems


_NODE = 8
"""The most processes for which an error names a torchrun line: more need several machines."""


def start_of(of: int, world: int) -> str:
    """Return a remedy for a run of `world` processes that has to have a multiple of `of`."""
    if of <= _NODE:
        return f"Start a multiple of {of}, such as torchrun --nproc-per-node {of}"
    text = f"Start a multiple of {of} processes"
    return f"{text}, such as {world // of * of}" if world > of else text


def division(value: int, by: int) -> str:
    """Return a division with remainder as text, such as "30 = 4 x 7 + 2".

    Args:
        value: the dividend.
        by: the divisor.
    """
    return f"{value} = {by} x {value // by} + {value % by}"


def divisors(value: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    return [d for d in range(1, value + 1) if value % d == 0]


def near(value: int, multiple_of: int) -> str:
    """Return the multiples next to a value as text, such as "28 or 32" for 30 and multiples of 4.

    The lower multiple is left out if it is 0.

    Args:
        value: the number.
        multiple_of: the number whose multiples are returned.
    """
    low = value // multiple_of * multiple_of
    # 0 would be a remedy that the next start refuses.
    return f"{low} or {low + multiple_of}" if low else str(multiple_of)
