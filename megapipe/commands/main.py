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
    "emulate": ". Schedules on emulated devices are run in a clone: "
    "python tools/bench/schedules.py --help",
}
"""Commands of earlier versions, and what to run now."""


def main() -> None:
    """Run the command that the first word names, with the other words."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in DOORS:
        # Errors and --help begin with the program's name, which is then both words.
        sys.argv = [f"megapipe {name}", *rest]
        run(command(name))
    else:
        sys.argv[0] = "megapipe"
        run(lambda _: _other(name))


def door(name: str) -> None:
    """Run the command `name` from its script in tools. Errors and help name the script."""
    run(command(name))


def command(name: str) -> Callable[[Sequence[str]], int | None]:
    """Return the function that runs the command `name`.

    The function takes the words of the command line after the name, and returns the exit status, or
    None for 0. Modules of other commands are not imported, as that would take most of the time.
    """
    module, _, function = DOORS[name].module.partition(":")
    imported = importlib.import_module(f"megapipe.commands.{module}")
    found: Callable[[Sequence[str]], int | None] = getattr(imported, function or "main")
    return found


def _other(word: str) -> None:
    """Print the help or the version, for the word --help or --version.

    Raises: ConfigError for a word that is no command.
    """
    if word in ("--help", "-h"):
        say(help_text(shutil.get_terminal_size().columns))
    elif word == "--version":
        say(f"megapipe {version()}")
    else:
        hint = ". megapipe --help lists them."
        if near := difflib.get_close_matches(word, DOORS, n=1):
            hint = f"; did you mean {near[0]}?"
        # A command that has left is no misspelling of another.
        raise ConfigError(f"unknown command {word}{_LEFT.get(word, hint)}")


def tell(text: str, numbers: object, file: str | None) -> None:
    """Print the result of a command as text, or write it as JSON, or both.

    Args:
        text: the result for a person.
        numbers: the same result, as lists, dicts and numbers for JSON.
        file: the value of --json. A name writes the numbers there too, - prints them instead of the
            text, and None prints the text alone.
    """
    # Another program reads this output, so nothing else may be printed.
    if file == "-":
        print(json.dumps(numbers, indent=1))
        return
    print(text)
    if file is not None:
        write_complete(file, f"{json.dumps(numbers, indent=1)}\n")


def help_text(width: int) -> str:
    """Return the list of all commands, wrapped to `width` columns."""
    # Two blanks stand before a name, and two after the longest.
    indent = max(map(len, DOORS)) + 4
    lines = ["usage: megapipe COMMAND ...; megapipe COMMAND --help for its flags", ""]
    for name, door in DOORS.items():
        line = f"  {name:<{indent - 2}}{door.about}"
        # Below 40 columns there would be no room for the text.
        lines += textwrap.wrap(line, max(width, 40), subsequent_indent=" " * indent)
    return "\n".join([*lines, "", f"  {'--version':<{indent - 2}}of the package"])
