"""The flags of a command, read from its own table, with values for each: usual ones, those at a
border, and wrong ones.

A flag that is added to a command is drawn without a word here: dataclasses and argparse parsers are
both read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, get_args, get_origin

from megapipe.commands import schedule_flags
from megapipe.commands.main import command
from megapipe.config import Config
from megapipe.config.notes import FREE, Range, Resume, note_of
from megapipe.flags.flag import Flag, flags_of
from megapipe.flags.rules import KNOWN

INTEGERS = ("0", "1", "1", "2", "2", "3", "4", "4", "6", "8", "16", "32")
NUMBERS = ("0", "0.1", "0.25", "0.5", "0.5", "0.9", "1", "1.5", "2", "3", "8")
TEXTS = (*NUMBERS, "1,1,1", "10,11,8", "1,1,1,0.1", "2,0.5", "0.5,0.2", "0.5,0.2,0.1", "2,0.5,1")
_BORDER = """
-1 0 1 65536 100000 100001 2147483647 2147483648 9223372036854775807 9223372036854775808
99999999999999999999 -99999999999999999999 0.5 0.999999 1.000001 -0.0 -0.5 1e-300 1e100 1e308
inf -inf nan 1e999
"""
BORDER = tuple(_BORDER.split())
_WRONG = """
x None none auto true 1e3 1_0 +3 0x10 1,2 1,,1 ,1 , 0,0,0 1:2 : 0:4 a:b a=b = - -x --x -- 1-0 0-99
. /dev/null no/such/x.json x.py:f x.py os:path json:loads nowhere:f {} [] * %s $HOME ' "
\u00b2 \u0661 \u0663 \u00e9.json \U0001f600
"""
WRONG = (
    *_WRONG.split(),
    *("", " ", " 4", "a b", "0 4 8", "\n", '{"0": {"a": 1}}', "\u2028", "\udcff"),
    *("9" * 5000, "x" * 300, "[" * 3000),
)
"""Values that hardly a flag takes; none of them names a place outside of the command's folder."""
ABSURD = 1e9

Count = Literal["none", "maybe", "one", "many"]


@dataclass(frozen=True)
class Option:
    """A flag.

    Attributes:
        count: the number of values that it takes.
        usual: values of its type; of these `legal` ones are in its range, as far as one value says.
        numeric: is a number expected?
        decides: False if the flag's own note says that it decides no number of a run.
    """

    name: str
    count: Count
    usual: tuple[str, ...]
    numeric: bool = False
    legal: Callable[[str], bool] = bool
    decides: bool = True

    def values(
        self, draw: Random, given: Sequence[str] = (), most: float | None = None
    ) -> list[str]:
        """Return values to put after the flag.

        Args:
            given: texts that mean something in the scene, such as names of its files.
            most: no number above this one is drawn, as the command's work grows with it, but for
                absurd ones, which it has to refuse at once.
        """
        kind = draw.random()
        if self.count == "none":
            return [] if kind < 0.9 else [draw.choice(WRONG)]
        if kind < 0.04 or (self.count == "maybe" and kind < 0.5):
            return []
        how_many = 1 if self.count != "many" and kind < 0.97 else draw.choice((1, 1, 2, 3))
        return [self.value(draw, given, most) for _ in range(how_many)]

    def value(self, draw: Random, given: Sequence[str] = (), most: float | None = None) -> str:
        """One value: mostly a usual one, else one at a border or of the wrong type."""
        kind = draw.random()
        if kind < 0.75:
            pool = self.legal_values(given)
        elif kind < 0.9 and self.numeric:
            pool = list(BORDER)
        else:
            pool = [*WRONG, *BORDER, *self.usual, *given]
        pool = [text for text in pool if most is None or not _above(text, most)]
        return draw.choice(pool or list(WRONG))

    def legal_values(self, given: Sequence[str] = ()) -> list[str]:
        """Return the usual or the scene's values that the flag's own rule allows; the usual ones if
        it allows none.
        """
        return [text for text in given or self.usual if self.legal(text)] or list(self.usual)


def _above(text: str, most: float) -> bool:
    try:
        return most < float(text) < ABSURD
    except ValueError:
        return False


def options_of(name: str, words: Sequence[str]) -> list[Option]:
    """Return a command's own flags. words: a line of it; its first word names the part of a command
    with several.
    """
    if name == "schedules":
        return _of_parser(schedule_flags.parser(), words[0])
    module = sys.modules[command(name).__module__]
    own = next((getattr(module, x) for x in ("Flags", "Options") if hasattr(module, x)), None)
    return [] if own is None else _of_class(own)


def options_of_a_run() -> list[Option]:
    """Return the flags of a run, followed by Megatron-LM's flags that have no effect here or are
    refused.
    """
    ours = _of_class(Config)
    others = sorted(KNOWN - {option.name for option in ours})
    return [
        *ours,
        *(Option(name, "maybe", ("1",), legal=lambda _: True, decides=False) for name in others),
    ]


def _of_class(cls: type) -> list[Option]:
    return [_of_flag(flag) for flag in flags_of(cls).values()]


def _of_flag(flag: Flag) -> Option:
    kind = flag.value_type
    ranges, fates = note_of(flag.owner, Range), note_of(flag.owner, Resume)
    usual: tuple[str, ...] = TEXTS
    if get_origin(kind) is Literal:
        usual = tuple(map(str, get_args(kind)))
    elif kind is int:
        usual = INTEGERS
    elif kind is float:
        usual = NUMBERS
    allowed = ranges.get(flag.field)

    def legal(text: str) -> bool:
        if flag.value_problem([text]) or flag.count == "none":
            return False
        return allowed is None or not allowed.problem(flag.read([text]))

    decides = fates.get(flag.field) is not FREE
    return Option(flag.name, flag.count, usual, kind in (int, float), legal, decides)


def _of_parser(top: argparse.ArgumentParser, part: str) -> list[Option]:
    found = []
    parts = next(
        action.choices for action in top._actions if isinstance(action, argparse._SubParsersAction)
    )
    for action in parts[part]._actions if part in parts else ():
        for name in action.option_strings[-1:]:
            found.append(_of_action(name, action))
    return found


def _of_action(name: str, action: argparse.Action) -> Option:
    count: Count = "none" if action.nargs == 0 else "many" if action.nargs == "+" else "one"
    if action.nargs == "?":
        count = "maybe"
    read: Any = action.type or str

    def legal(text: str) -> bool:
        try:
            read(text)
        except (argparse.ArgumentTypeError, ValueError):
            return False
        return True

    usual = tuple(map(str, action.choices)) if action.choices else (*INTEGERS, *TEXTS)
    return Option(name, count, usual, action.choices is None, legal)
