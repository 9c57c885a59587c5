"""The table of every flag in docs/megatron.md: `python -m megapipe.flags.table` writes it between two marks."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from megapipe.config import Config
from megapipe.flags.known import MEGATRON_FLAGS
from megapipe.flags.parse import Flag, flags_of
from megapipe.flags.rules import ACCEPTED, reason

PAGE = Path(__file__).parents[2] / "docs" / "megatron.md"
BEGIN, END = "<!-- flags: begin -->\n", "<!-- flags: end -->\n"


def table() -> str:
    """Markdown: flags that act, flags accepted, flags refused by reason."""
    ours = flags_of(Config)
    spelled = {spelling for name in ours for spelling in (name, name.replace("_", "-"))}
    acts = [(f"`{flag.name}`", _default(flag), _help(flag)) for _, flag in sorted(ours.items())]
    accepted = [(f"`{name}`", _values(rule.values), rule.because) for name, rule in sorted(ACCEPTED.items())]
    refused: dict[str, list[str]] = defaultdict(list)
    for name in sorted(MEGATRON_FLAGS - spelled - set(ACCEPTED)):
        refused[reason(name) or "not implemented yet"].append(f"`{name}`")
    return "\n".join(
        (
            f"### Flags that act ({len(acts)})\n",
            *_rows(("flag", "default", "meaning"), acts),
            f"\n### Accepted, because it is always so ({len(accepted)})\n",
            *_rows(("flag", "values", "because"), accepted),
            f"\n### Refused in one line ({sum(map(len, refused.values()))})\n",
            *_rows(("what the line says", "flags"), ((why, " ".join(refused[why])) for why in sorted(refused))),
            "",
        )
    )


def with_table(page: str) -> str:
    """The page with its generated part replaced."""
    head, rest = page.split(BEGIN)
    return head + BEGIN + table() + END + rest.split(END)[1]


def _rows(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ("---",) * len(header), *rows)]


def _default(flag: Flag) -> str:
    if flag.count == "none":
        return "off"
    return "" if flag.default in (None, ()) else f"`{flag.default}`"


def _values(values: tuple[str, ...]) -> str:
    return ", ".join("any" if value == "*" else f"`{value}`" for value in values)


def _help(flag: Flag) -> str:
    """The docstring under the field."""
    (body,) = ast.parse(inspect.getsource(flag.owner)).body
    assert isinstance(body, ast.ClassDef)
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id == flag.field:
            assert isinstance(text, ast.Expr), f"{flag.field} has no docstring"
            assert isinstance(text.value, ast.Constant), f"{flag.field} has no docstring"
            return str(text.value.value)
    raise AssertionError(flag.field)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
