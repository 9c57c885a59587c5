"""Megatron's layout string: `Ett|(ttt|)*2,ttL`. E embedding, t layer, m depth of multi-token prediction, L loss, |
between stages, *n and (...)*n repeat.

The string lists the stages from one end of the model to the other. The placement deals them to ranks, so the same
string describes a loop (stage s on rank s mod p), a V (down and up again) and a mirror (both directions).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from megapipe.errors import ConfigError

FLAG = "--pipeline-model-parallel-layout"
AUTO = "auto"
_LONGEST = 100_000  # characters, so that a typo like t*99999999 ends in a sentence and not in swap
_GROUP = re.compile(r"\(([^()]*)\)\*(\d+)")
_ONE = re.compile(r"([EtmL|])\*(\d+)")


def parse_layout(text: str) -> tuple[int, ...]:
    """Layers of each stage that a layout string lists.

    Commas and spaces say nothing; a stage may be empty, or hold E, m or L alone.
    Raises: ConfigError with everything that is wrong.
    """
    return tuple(stage.count("t") for stage in _stages(text))


def depths_of(text: str) -> tuple[int, ...]:
    """The stage with which a layout string lists each depth of multi-token prediction, the first depth first."""
    return tuple(at for at, stage in enumerate(_stages(text)) for _ in range(stage.count("m")))


def _stages(text: str) -> list[str]:
    plain = _expand(text)
    problems = [
        f"{FLAG} {text}: {reason}" for reason in (_strangers(plain), _end(plain, "E"), _end(plain, "L")) if reason
    ]
    if problems:
        raise ConfigError(problems)
    return plain.split("|")


def layout_string(counts: Sequence[int], depths: Sequence[int] = ()) -> str:
    """The layout string of a split; parse_layout reads it back. counts: layers of each stage. depths: as depths_of."""
    stages = [("t" * n if n < 4 else f"t*{n}") + "m" * list(depths).count(at) for at, n in enumerate(counts)]
    if len(stages) == 1:
        return f"E{stages[0]}L"
    runs = [(stage, len(list(run))) for stage, run in groupby(stages[1:-1])]
    middle = "".join(f"({stage}|)*{n}" if n > 1 else f"{stage}|" for stage, n in runs)
    return f"E{stages[0]}|{middle}{stages[-1]}L"


def _expand(text: str) -> str:
    """The string without repetitions."""
    plain, before = re.sub(r"[,\s]", "", text), ""

    def repeat(found: re.Match[str]) -> str:
        digits = found[2].lstrip("0") or "0"
        # int() refuses more than 4300 digits.
        if len(digits) > len(str(_LONGEST)) or len(found[1]) * int(digits) > _LONGEST:
            raise ConfigError(f"{FLAG} {text}: {found[0]} is more than {_LONGEST} stages and layers.")
        return found[1] * int(digits)

    while plain != before:  # from the innermost parentheses out
        plain, before = _GROUP.sub(repeat, _ONE.sub(repeat, plain)), plain
    return plain


def _strangers(plain: str) -> str:
    others = sorted({*plain} - {*"EtmL|"})
    if not others:
        return ""
    known = "E (embedding), t (layer), m (multi-token prediction), L (loss), | between stages, *n and (...)*n"
    return f"{' '.join(others)} means nothing here. There are {known}."


def _end(plain: str, letter: str) -> str:
    """A problem with E, which must begin the string, or with L, which must end it; empty for none."""
    begins = letter == "E"
    what, where = ("embedding", "the first letter") if begins else ("loss", "the last letter")
    if (count := plain.count(letter)) != 1:
        quotes = "" if count or "|" in plain else " In a shell, | needs quotes around the text."
        return f"{letter}, the {what}, stands there {count} times; it must be {where}, once.{quotes}"
    if letter == (plain[0] if begins else plain[-1]):
        return ""
    return f"{letter}, the {what}, comes {'after' if begins else 'before'} other stages or layers; it must be {where}."
