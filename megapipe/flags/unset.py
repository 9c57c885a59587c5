"""Take flags back that stand earlier on a command line.

A later flag wins over an earlier one, but a switch has no value that turns it off. So flags that
are appended to a script could not undo its switches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
            kept = [x for x in kept if not x or x[0].partition("=")[0] not in names]
        else:
            kept.append(group)
    return [word for group in kept for word in group], named
