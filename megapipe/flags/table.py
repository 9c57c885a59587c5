"""The table of every flag in docs/megatron.md: `python -m megapipe.flags.table` writes it between two marks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from megapipe.config import Config
from megapipe.config.notes import Refused
from megapipe.config.notes import flag as usual
from megapipe.flags.different import DIFFERENT, Different
from megapipe.flags.flag import Flag, flags_of
from megapipe.flags.fork import SWITCHES
from megapipe.flags.help import meaning
from megapipe.flags.holds import HOLDS, MANY
from megapipe.flags.idle import IDLE, noted
from megapipe.flags.known import MEGATRON_FLAGS
from megapipe.flags.parse import OLD_NAMES, text_of
from megapipe.flags.rules import reason

PAGE = Path(__file__).parents[2] / "docs" / "megatron.md"
BEGIN, END = "<!-- flags: begin -->\n", "<!-- flags: end -->\n"


def table() -> str:
    """Markdown: flags that act, hold already, have nothing to act on, or are refused, by reason."""
    ours = flags_of(Config)
    spelled = {spelling for name in ours for spelling in (name, name.replace("_", "-"))}
    acts = [(f"`{flag.name}`", _default(flag), meaning(flag)) for _, flag in sorted(ours.items())]
    means = {old: text_of(flags) for old, flags in OLD_NAMES.items()}
    means |= SWITCHES
    holds: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, rule in sorted(HOLDS.items()):
        holds[rule.because, _values(rule.values)].append(f"`{name}`")
    idle = [(flag.name, text) for flag, _, text in IDLE]
    together = [
        (flag.name, " ".join(map(usual, note.others)), note.text.format("A", "B")) for flag, note in noted(Refused)
    ]
    refused: dict[str, list[str]] = defaultdict(list)
    for name in sorted(MEGATRON_FLAGS - spelled - set(HOLDS) - set(OLD_NAMES)):
        refused[reason(name) or "not implemented yet"].append(f"`{name}`")
    return "\n".join(
        (
            f"### Flags that act ({len(acts)})\n",
            *_rows(("flag", "default", "meaning"), acts),
            f"\n### Old names and switches of forks, which act through another flag ({len(means)})\n",
            *_rows(("flag", "means"), ((f"`{name}`", flag) for name, flag in sorted(means.items()))),
            f"\n### Hold already: accepted, and a line at start says what happens instead ({len(HOLDS)})\n",
            *_rows(("what happens instead", "values", "flags"), sorted((*row, " ".join(holds[row])) for row in holds)),
            f"\n### Defaults, choices and numbers of values that are not Megatron-LM's ({len(DIFFERENT)})\n",
            *_rows(
                ("flag", "what", "Megatron-LM", "megapipe", "why"),
                (_different(ours[row.flag], row) for row in DIFFERENT),
            ),
            "\n### Accepted with a line where there is nothing to act on, as in Megatron-LM\n",
            *_rows(("flag", "what happens instead"), idle),
            "\n### Refused with another flag, or without one\n",
            *_rows(("A", "B", "what the line says"), together),
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


def _different(flag: Flag, row: Different) -> tuple[str, ...]:
    default = " ".join(map(str, flag.default)) if isinstance(flag.default, tuple) else str(flag.default)
    here = {"default": default, "choices": flag.allowed, "values": flag.count}[row.what]
    return flag.name, row.what, row.there, here, row.why


def _values(values: tuple[str, ...]) -> str:
    words = {"*": "any", "#": "an integer", MANY: "or several"}
    return ", ".join(words.get(value, f"`{value}`") for value in values)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
