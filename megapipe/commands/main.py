"""Find the command of `megapipe NAME ...`, import it alone, and run it.

All commands end in the same way: `megapipe.flags.stop` prints errors and sets the exit status.
"""

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

_LEFT = {
    "emulate": ". Schedules on emulated devices are run in a clone: python tools/bench/schedules.py --help"
}
"""Commands of earlier versions, and what to run now."""


def main() -> None:
    """Run the command that the first word names, with the other words."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in DOORS:
        sys.argv = [f"megapipe {name}", *rest]
        run(command(name))
    else:
        sys.argv[0] = "megapipe"
        run(lambda _: _other(name))


def door(name: str) -> None:
    """Run a command from a script. Errors and help name the script."""
    run(command(name))


def command(name: str) -> Callable[[Sequence[str]], int | None]:
    """Return the function of a command.

    Only its module is imported, as imports take most of the time of a start.
    """
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
    """Print the text of a command's result.

    Args:
        numbers: the result as JSON.
        file: writes the numbers there too. - prints them instead of the text; None writes none.
    """
    if file == "-":
        print(json.dumps(numbers, indent=1))
        return
    print(text)
    if file is not None:
        write_complete(file, f"{json.dumps(numbers, indent=1)}\n")


def help_text(width: int) -> str:
    """Return the list of all commands, wrapped to `width` columns."""
    indent = max(map(len, DOORS)) + 4
    lines = ["usage: megapipe COMMAND ...; megapipe COMMAND --help for its flags", ""]
    for name, about in ((name, it.about) for name, it in DOORS.items()):
        lines += textwrap.wrap(
            f"  {name:<{indent - 2}}{about}", max(width, 40), subsequent_indent=" " * indent
        )
    return "\n".join([*lines, "", f"  {'--version':<{indent - 2}}of the package"])
