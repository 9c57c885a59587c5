"""`megapipe NAME ...`: finds the command, imports it alone, and ends all of them in the same way."""

from __future__ import annotations

import difflib
import importlib
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence

from megapipe.data.files import write_complete
from megapipe.doors import DOORS, version
from megapipe.errors import ConfigError
from megapipe.flags.stop import run, say

_LEFT = {"emulate": ". Schedules on emulated devices are run in a clone: python tools/bench/schedules.py --help"}
"""What became of a command that is gone."""


def main() -> None:
    """The command that the first word names, with the words behind it."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in DOORS:
        sys.argv = [f"megapipe {name}", *rest]
        run(command(name))
    else:
        sys.argv[0] = "megapipe"
        run(lambda _: _other(name))


def door(name: str) -> None:
    """End a command run from a script of that name's own, which errors and help then name."""
    run(command(name))


def command(name: str) -> Callable[[Sequence[str]], int | None]:
    """The function of a command. Imports its module alone: most of a start is what is imported."""
    module, _, function = DOORS[name].module.partition(":")
    found: Callable[[Sequence[str]], int | None] = getattr(
        importlib.import_module(f"megapipe.commands.{module}"), function or "main"
    )
    return found


def _other(word: str) -> None:
    if word in ("--help", "-h"):
        say(help_text(shutil.get_terminal_size().columns))
    elif word == "--version":
        say(f"megapipe {version()}")
    else:
        near = difflib.get_close_matches(word, DOORS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ". megapipe --help lists them."
        raise ConfigError(f"unknown command {word}{_LEFT.get(word, hint)}")


def tell(text: str, numbers: object, file: str | None) -> None:
    """Print what a command has found, and write its numbers as JSON; - prints these alone."""
    if file == "-":
        print(json.dumps(numbers, indent=1))
        return
    print(text)
    if file is not None:
        write_complete(file, f"{json.dumps(numbers, indent=1)}\n")


def help_text(width: int) -> str:
    """One line for each command, two where the terminal is narrow."""
    indent = max(map(len, DOORS)) + 4
    lines = ["usage: megapipe COMMAND ...; megapipe COMMAND --help for its flags", ""]
    for name, about in ((name, it.about) for name, it in DOORS.items()):
        lines += textwrap.wrap(f"  {name:<{indent - 2}}{about}", max(width, 40), subsequent_indent=" " * indent)
    return "\n".join([*lines, "", f"  {'--version':<{indent - 2}}of the package"])
