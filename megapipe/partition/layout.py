"""Read and write Megatron's layout string, such as `Ett|(ttt|)*2,ttL`.

E is the embedding, t a layer, m a depth of multi-token prediction, L the loss. | separates stages,
*n and (...)*n repeat. The string lists the stages from one end of the model to the other, and the
placement maps them to ranks. One string thus serves a loop (stage s on rank s mod p), a V (down the
ranks and up again) and a mirror.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from megapipe.errors import ConfigError

FLAG = "--pipeline-model-parallel-layout"
AUTO = "auto"
# Most stages and layers: a typo such as t*99999999 shall end in a message, not in swap space.
_LONGEST = 100_000
_GROUP = re.compile(r"\(([^()]*)\)\*(\d+)")
_ONE = re.compile(r"([EtmL|])\*(\d+)")


def parse_layout(text: str) -> tuple[int, ...]:
    """Return the number of layers of each stage in a layout string.

    E is the embedding, t a layer, m a module of multi-token prediction, L the loss, and | ends a
    stage. Commas and spaces are ignored. A stage may be empty, or hold E, m or L alone.
    `Ett|(ttt|)*2,ttL` gives (2, 3, 3, 2).

    Raises: ConfigError with everything that is wrong. A repetition that is too long is reported
        alone.
    """
    return tuple(stage.count("t") for stage in _stages(text))


def depths_of(text: str) -> tuple[int, ...]:
    """Return the stage of each module of multi-token prediction in a layout string, in order.

    `Et|tm|tmL` gives (1, 2). Raises: ConfigError, as `parse_layout`.
    """
    found: list[int] = []
    for number, stage in enumerate(_stages(text)):
        found += [number] * stage.count("m")
    return tuple(found)


def _stages(text: str) -> list[str]:
    """Return the letters of each stage in a layout string, repetitions written out.

    Raises: ConfigError with everything that is wrong.
    """
    plain = _expand(text)
    # All problems at once, so that one start shows all of them.
    reasons = (_strangers(plain), _end(plain, "E"), _end(plain, "L"))
    problems = [f"{FLAG} {text}: {reason}" for reason in reasons if reason]
    if problems:
        raise ConfigError(problems)
    return plain.split("|")


def layout_string(counts: Sequence[int], depths: Sequence[int] = ()) -> str:
    """Return a short layout string, which parse_layout and depths_of read back.

    Args:
        counts: layers of each stage.
        depths: the stage of each module of multi-token prediction.
    """
    stages = []
    for number, count in enumerate(counts):
        # ttt is as short as t*3.
        layers = "t" * count if count < 4 else f"t*{count}"
        stages.append(layers + "m" * list(depths).count(number))
    if len(stages) == 1:
        return f"E{stages[0]}L"
    # Equal stages in a row are written as a repetition.
    middle = ""
    for stage, run in groupby(stages[1:-1]):
        n = len(list(run))
        middle += f"({stage}|)*{n}" if n > 1 else f"{stage}|"
    return f"E{stages[0]}|{middle}{stages[-1]}L"


def _expand(text: str) -> str:
    """Write out the repetitions of a layout string: `t*3` becomes `ttt`. Drop commas and spaces.

    Raises: ConfigError for a repetition of more than _LONGEST letters.
    """

    def repeat(found: re.Match[str]) -> str:
        digits = found[2].lstrip("0") or "0"
        # The number of digits comes first, because int() refuses more than 4300.
        is_long = len(digits) > len(str(_LONGEST)) or len(found[1]) * int(digits) > _LONGEST
        if is_long:
            raise ConfigError(
                f"{FLAG} {text}: {found[0]} is more than {_LONGEST} stages and layers."
            )
        return found[1] * int(digits)

    plain = re.sub(r"[,\s]", "", text)
    before = ""
    # Groups may be nested; each round expands the innermost ones.
    while plain != before:
        before = plain
        plain = _GROUP.sub(repeat, _ONE.sub(repeat, plain))
    return plain


def _strangers(plain: str) -> str:
    """Return an error text for letters that have no meaning in a layout string; "" if all have one.

    plain: the string as `_expand` returns it.
    """
    others = sorted({*plain} - {*"EtmL|"})
    if not others:
        return ""
    known = (
        "E (embedding), t (layer), m (multi-token prediction), L (loss), | between stages, *n and "
        "(...)*n"
    )
    text = f"{' '.join(others)} means nothing here. There are {known}."
    if {*others} & {*"'\""}:
        text += " Quotes are for a shell: a file of flags has none."
    return text


def _end(plain: str, letter: str) -> str:
    """Return an error text if E does not come first or L does not come last; "" if it does.

    letter: "E" or "L". plain: the layout string, with repetitions such as t*3 written out.
    """
    begins = letter == "E"
    if begins:
        name = "embedding"
        place = "the first letter"
        order = "after"
    else:
        name = "loss"
        place = "the last letter"
        order = "before"
    count = plain.count(letter)
    if count != 1:
        quotes = ""
        # Without quotes, a shell takes | for a pipe and passes on the text before it.
        if not count and "|" not in plain:
            quotes = " In a shell, | needs quotes around the text."
        return (
            f"{letter}, the {name}, stands there {count} times; it must be {place}, once.{quotes}"
        )
    if letter == (plain[0] if begins else plain[-1]):
        return ""
    return f"{letter}, the {name}, comes {order} other stages or layers; it must be {place}."
