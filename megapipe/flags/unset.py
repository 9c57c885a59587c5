"""Take flags back that stand earlier on a command line.

A later flag wins over an earlier one, but a switch has no value that turns it off. So flags that
are appended to a script could not undo its switches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megapipe.flags.fork import PADDING, SWITCHES
from megapipe.flags.old_names import OLD_NAMES

UNSET = "--unset"
HELP = (
    f"{UNSET} NAME ...",
    "Forget these flags where they stand before this one. A name has no dashes: "
    f"{UNSET} tp-comm-overlap recompute-granularity.",
)
"""What --help says of it: the head and the text."""


def unset(names: Iterable[str]) -> list[str]:
    """Return the words that take these flags back; an empty list without flags.

    Args:
        names: flags with their dashes.
    """
    bare = [name.removeprefix("--") for name in names]
    return [UNSET, *bare] if bare else []


def without_unset(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (the words that count, the flags that --unset names, with their dashes).

    An old name stands for the flags that it means, and so is forgotten with any of them. The
    zero-bubble fork's switches that choose a schedule are forgotten with --pipeline-schedule.

    Args:
        argv: flags and values.
    """
    # Each flag with its values. The first group has words before any flag, which are errors.
    groups: list[list[str]] = [[]]
    named: list[str] = []
    for word in argv:
        first, equals, value = word.partition("=")
        if first == UNSET or word.startswith("--"):
            groups.append([first, value] if first == UNSET and equals else [word])
        else:
            groups[-1].append(word)
    kept: list[list[str]] = []
    for group in groups:
        if group[:1] == [UNSET] and len(group) > 1:
            names = [f"--{name}" for name in group[1:]]
            named += names
            gone = {*map(_spelled, names)}
            kept = [x for x in kept if not x or gone.isdisjoint(_meant(x[0].partition("=")[0]))]
        else:
            kept.append(group)
    return [word for group in kept for word in group], named


def _spelled(name: str) -> str:
    # Megatron-LM takes --override-opt_param-scheduler in two spellings.
    return name.replace("_", "-")


def _meant(name: str) -> list[str]:
    """Return a flag as typed, and the flags of megapipe that it means if it is an old name."""
    meant = [name, *OLD_NAMES.get(name, ())]
    if name in SWITCHES and name != PADDING:
        meant.append("--pipeline-schedule")
    return [*map(_spelled, meant)]
