"""The table of every flag, in Markdown.

`python -m megapipe.flags.table` prints it, and the site of the docs has it as a page.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from megapipe.config import Config
from megapipe.config.notes import Refused
from megapipe.config.notes import flag as usual
from megapipe.flags.differences import DIFFERENCES, Difference
from megapipe.flags.flag import Flag, flags_of
from megapipe.flags.fork import SWITCHES
from megapipe.flags.help import meaning
from megapipe.flags.idle import IDLE, noted
from megapipe.flags.megatron_flags import MEGATRON_FLAGS
from megapipe.flags.noop_flags import MANY, NOOP_FLAGS
from megapipe.flags.old_names import OLD_NAMES, text_of
from megapipe.flags.rules import reason


def table() -> str:
    """Return Markdown tables of all flags: what each does, or why it is refused.

    A flag sets a field, is accepted and sets nothing, or is refused. A flag that sets a field may
    have no effect in some runs; a line at the start of such a run says so.
    """
    ours = flags_of(Config)
    # Megatron-LM has some flags with dashes and with underscores, and takes both.
    spelled = {spelling for name in ours for spelling in (name, name.replace("_", "-"))}
    acts = [(f"`{flag.name}`", _default(flag), meaning(flag)) for _, flag in sorted(ours.items())]
    means = {old: text_of(flags) for old, flags in OLD_NAMES.items()} | SWITCHES
    old = [(f"`{name}`", flag) for name, flag in sorted(means.items())]
    # Flags with the same sentence and values share a row: 200 of them would fill the page.
    by_sentence: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, noop in sorted(NOOP_FLAGS.items()):
        by_sentence[noop.because, _values(noop.values)].append(f"`{name}`")
    noops = sorted((*row, " ".join(names)) for row, names in by_sentence.items())
    differ = [_difference(ours[row.flag], row) for row in DIFFERENCES]
    idle = [(flag.name, text) for flag, _, text in IDLE]
    together = []
    for flag, note in noted(Refused):
        others = " ".join(map(usual, note.others))
        together.append((flag.name, others, note.text.format("A", "B")))
    refused: dict[str, list[str]] = defaultdict(list)
    # All that is left of Megatron-LM's flags, so that the table has every one of them.
    for name in sorted(MEGATRON_FLAGS - spelled - set(NOOP_FLAGS) - set(OLD_NAMES)):
        refused[reason(name) or "not implemented yet"].append(f"`{name}`")
    whys = [(why, " ".join(names)) for why, names in sorted(refused.items())]
    count = sum(map(len, refused.values()))
    return "\n".join(
        (
            f"## Flags that act ({len(acts)})\n",
            *_rows(("flag", "default", "meaning"), acts),
            "\n## Old names and switches of forks, which act through another flag "
            f"({len(means)})\n",
            *_rows(("flag", "means"), old),
            "\n## Hold already: accepted, and a line at start says what happens instead "
            f"({len(NOOP_FLAGS)})\n",
            *_rows(("what happens instead", "values", "flags"), noops),
            "\n## Defaults, choices and numbers of values that are not Megatron-LM's "
            f"({len(DIFFERENCES)})\n",
            *_rows(("flag", "what", "Megatron-LM", "megapipe", "why"), differ),
            "\n## Accepted with a line where there is nothing to act on, as in Megatron-LM\n",
            *_rows(("flag", "what happens instead"), idle),
            "\n## Refused with another flag, or without one\n",
            *_rows(("A", "B", "what the line says"), together),
            f"\n## Refused in one line ({count})\n",
            *_rows(("what the line says", "flags"), whys),
            "",
        )
    )


def _rows(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table in Markdown: the header, a rule, and the rows."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ("---",) * len(header), *rows)]


def _default(flag: Flag) -> str:
    if flag.count == "none":
        return "off"
    return "" if flag.default in (None, ()) else f"`{flag.default}`"


def _difference(flag: Flag, row: Difference) -> tuple[str, ...]:
    """Return the cells of a row of the table of flags that differ from Megatron-LM's.

    Args:
        row: the entry of the flag in DIFFERENCES.
    """
    default = flag.default if isinstance(flag.default, tuple) else (flag.default,)
    here = {
        "default": " ".join(map(str, default)),
        "choices": flag.allowed,
        "values": flag.count,
    }
    return flag.name, row.what, row.there, here[row.what], row.why


def _values(values: tuple[str, ...]) -> str:
    words = {"*": "any", "#": "an integer", MANY: "or several"}
    return ", ".join(words.get(value, f"`{value}`") for value in values)


if __name__ == "__main__":
    print(table(), end="")
