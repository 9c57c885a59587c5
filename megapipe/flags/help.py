"""The text of `--help`: every flag of a class with the docstring under its field."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby, pairwise
from typing import Literal, get_args, get_origin

from megapipe.doors import as_called
from megapipe.flags.flag import Flag

_NARROWEST, _WIDEST = 40, 120


def help_text(cls: type, flags: Mapping[str, Flag], program: str, width: int) -> str:
    """The whole text, by the sections of a configuration.

    Args:
        flags: those of cls, in their order.
        width: of the terminal.
    """
    width = min(max(width, _NARROWEST), _WIDEST)
    lines = [f"usage: {program} [--flag value ...]", ""]
    lines += [*_prose(as_called(text), width), ""] if (text := _about(cls)) else []
    lines += ["  -h, --help", "      Print this and end."]
    for section, group in groupby(flags.values(), lambda flag: flag.section):
        some = list(group)
        lines += ["", *_prose(f"{section}: {_about(some[0].owner)}", width), ""] if section else []
        for flag in some:
            lines += _filled(" ".join(filter(None, (flag.name, values(flag)))), width, "  ", "      ")
            lines += _filled(as_called(meaning(flag) + _default(flag)).strip(), width, "      ", "      ")
    return "\n".join(lines)


def values(flag: Flag) -> str:
    """The words that stand behind a flag: TEXT, INT ... for several, {a,b} for a choice."""
    if flag.count == "none":
        return ""
    many = " ..." if flag.count == "many" else ""
    if get_origin(flag.value_type) is Literal:
        return f"{{{','.join(map(str, get_args(flag.value_type)))}}}{many}"
    return {int: "INT", float: "NUMBER", str: "TEXT"}[flag.value_type] + many


def meaning(flag: Flag) -> str:
    """The docstring under the field, in one line; a program's own class may have none."""
    return " ".join(_docstrings(flag.owner).get(flag.field, "").split())


def _about(cls: type) -> str:
    """The docstring of the class, if it has one: a dataclass without has its signature there."""
    text = inspect.getdoc(cls) or ""
    return "" if text.startswith(f"{cls.__name__}(") else text


def _default(flag: Flag) -> str:
    if flag.count == "none" or flag.default in (None, ()):
        return ""
    default = flag.default if flag.count == "many" else (flag.default,)
    return f" (default: {' '.join(map(str, default))})"


@cache
def _docstrings(cls: type) -> dict[str, str]:
    """Docstrings by field, those of the classes that it inherits from too."""
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__[:-1]):
        try:
            source = inspect.getsource(owner)
        except (OSError, TypeError):  # typed in at a prompt
            continue
        (body,) = ast.parse(textwrap.dedent(source)).body
        assert isinstance(body, ast.ClassDef)
        for pair in pairwise(body.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = text
    return found


def _prose(text: str, width: int) -> Iterator[str]:
    """Paragraphs, each filled; one that is indented stays as it is."""
    for n, paragraph in enumerate(text.split("\n\n")):
        yield from [""] if n else []
        yield from paragraph.splitlines() if paragraph.startswith(" ") else textwrap.wrap(paragraph, width)


def _filled(text: str, width: int, first: str, then: str) -> Sequence[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )
