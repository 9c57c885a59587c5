"""The text of `--help`: every flag of a class with the docstring under its field."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Literal, get_args, get_origin

from megapipe.doors import as_called
from megapipe.flags.flag import Flag

_NARROWEST = 40
_WIDEST = 120


def help_text(
    cls: type,
    flags: Mapping[str, Flag],
    program: str,
    width: int,
    more: Iterable[tuple[str, str]] = (),
) -> str:
    """Return the whole text of --help, by the sections of a configuration.

    Args:
        cls: the configuration class.
        flags: the flags of cls, in their order.
        program: the command that the user typed.
        width: columns of the terminal.
        more: (head, text) of flags that set no field.
    """
    # A terminal of 10 columns would break every word, and one of 300 is hard to read.
    width = min(max(width, _NARROWEST), _WIDEST)
    lines = [f"usage: {program} [--flag value ...]", ""]
    if text := _about(cls):
        lines += [*_prose(as_called(text), width), ""]
    for head, body in [("-h, --help", "Print this and end."), *more]:
        lines += [*_filled(head, width, "  ", "      "), *_filled(body, width, "      ", "      ")]
    for section, group in groupby(flags.values(), lambda flag: flag.section):
        some = list(group)
        if section:
            lines += ["", *_prose(f"{section}: {_about(some[0].owner)}", width), ""]
        for flag in some:
            takes = values(flag)
            head = f"{flag.name} {takes}" if takes else flag.name
            body = as_called(meaning(flag) + _default(flag)).strip()
            lines += _filled(head, width, "  ", "      ")
            lines += _filled(body, width, "      ", "      ")
    return "\n".join(lines)


def values(flag: Flag) -> str:
    """Return the placeholder of a flag: TEXT or FILE; INT ... for several; {a,b} for a choice."""
    if flag.count == "none":
        return ""
    many = " ..." if flag.count == "many" else ""
    if get_origin(flag.value_type) is Literal:
        return f"{{{','.join(map(str, get_args(flag.value_type)))}}}{many}"
    names = {int: "INT", float: "NUMBER", str: "TEXT", Path: "FILE"}
    return names[flag.value_type] + many


def meaning(flag: Flag) -> str:
    """Return the string below a field in its class, in one line; empty if there is none.

    Args:
        flag: the flag of the field.
    """
    return " ".join(_docstrings(flag.owner).get(flag.field, "").split())


def _about(cls: type) -> str:
    """Return the docstring of a class, empty if it has none."""
    text = inspect.getdoc(cls) or ""
    # A dataclass without a docstring has its signature there.
    return "" if text.startswith(f"{cls.__name__}(") else text


def _default(flag: Flag) -> str:
    # A switch is off by default, and a flag without a default says in its text what happens.
    if flag.count == "none" or flag.default in (None, ()):
        return ""
    default = flag.default if flag.count == "many" else (flag.default,)
    return f" (default: {' '.join(map(str, default))})"


@cache
def _docstrings(cls: type) -> dict[str, str]:
    """Return the strings below the fields of a class and of its bases, by field.

    Python does not keep these strings, so they are read from the source.
    """
    found: dict[str, str] = {}
    # From the last base to the class itself, so that a class's own docstring of a field wins.
    for owner in reversed(cls.__mro__[:-1]):
        try:
            source = inspect.getsource(owner)
        except (OSError, TypeError):  # typed in at a prompt
            continue
        (body,) = ast.parse(textwrap.dedent(source)).body
        assert isinstance(body, ast.ClassDef)
        # A field and the text after it are two statements of the class.
        for pair in pairwise(body.body):
            match pair:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = text
    return found


def _prose(text: str, width: int) -> Iterator[str]:
    """Yield the lines of a text, each paragraph wrapped to `width` columns.

    An indented paragraph keeps its lines.
    """
    for n, paragraph in enumerate(text.split("\n\n")):
        if n:
            yield ""
        if paragraph.startswith(" "):
            yield from paragraph.splitlines()
        else:
            yield from textwrap.wrap(paragraph, width)


def _filled(text: str, width: int, first: str, then: str) -> Sequence[str]:
    """Return the lines of a text, wrapped to `width` columns.

    Args:
        first: the indentation of the first line.
        then: the indentation of the other lines.
    """
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=then,
        break_long_words=False,
        break_on_hyphens=False,
    )
