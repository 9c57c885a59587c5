"""Let values show themselves in a notebook, as a picture or as a table.

Jupyter asks a value for `_repr_svg_` and `_repr_html_`. Data stands below its views in the order of
imports, so a class names the function that shows it. That function is imported at the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from importlib import import_module
from typing import Any


def shown_by(name: str) -> Callable[[Any], str | None]:
    """Return a method, such as _repr_svg_, that calls a function of megapipe to show the object.

    Args:
        name: MODULE:NAME below megapipe, such as `schedule.views.screen:picture`. The function
            takes the object.
    """
    module, _, function = name.partition(":")

    def show(self: Any) -> str | None:
        # A string, because an import would turn an arrow of the architecture back.
        shown: str | None = getattr(import_module(f"megapipe.{module}"), function)(self)
        return shown

    show.__doc__ = f"Return what `megapipe.{module}.{function}` makes of this."
    return show


def aligned(rows: Sequence[Sequence[str]], first: Callable[..., str] = str.rjust) -> list[str]:
    """Return rows of cells as lines of text, with all columns but the first aligned on the right.

    Args:
        first: alignment of the first column, str.ljust or str.rjust.
    """
    width, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join((first(x, width), *map(str.rjust, xs, widths))) for x, *xs in rows]


def html_table(rows: Sequence[Sequence[str]], caption: str) -> str:
    """Return rows of cells as an HTML table without scripts. The first row is the head.

    Args:
        rows: the cells, as plain text. The first cell of a row is aligned to the left.
        caption: a line above the table; none if it is empty.
    """
    # Cells are escaped: a schedule of a user's file may have any name.
    head, *body = rows
    lines = ["<table>"]
    if caption:
        lines.append(f'<caption style="text-align:left">{escape(caption)}</caption>')
    lines.append(f"<thead>{_row(head, 'th')}</thead>")
    lines.append("<tbody>")
    lines += [_row(row, "td") for row in body]
    lines.append("</tbody></table>")
    return "\n".join(lines)


def _row(cells: Sequence[str], tag: str) -> str:
    # Styles stand in each cell, because a style sheet would hold for the whole notebook.
    first, *others = cells
    text = f'<{tag} style="text-align:left">{escape(first)}</{tag}>'
    text += "".join(f'<{tag} style="text-align:right">{escape(cell)}</{tag}>' for cell in others)
    return f"<tr>{text}</tr>"
