"""Lines of a scene with flags added, changed, doubled, cut off and misspelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from tools.proofs.inputs.options import WRONG, Option
from tools.proofs.inputs.scenes import Scene

Groups = list[list[str]]
"""A line: words before any flag, then each flag with the words that follow it. `--` is a group too.
"""


def groups_of(words: Sequence[str]) -> Groups:
    """The line in groups."""
    found: Groups = [[]]
    for word in words:
        if word.startswith("--"):
            found.append([])
        found[-1].append(word)
    return found


def words_of(groups: Groups) -> list[str]:
    """The line in words. No argument of a process holds a NUL, nor bytes that the system would not
    take.
    """
    return [word.replace("\0", "") for group in groups for word in group]


def flag_of(group: Sequence[str]) -> str:
    """The name of a group's flag, empty for the words before any."""
    return group[0].partition("=")[0] if group else ""


def without(groups: Groups, flag: str) -> Groups:
    """The line without a flag, wherever it is given."""
    return [group for group in groups if flag_of(group) != flag]


def draw_line(scene: Scene, draw: Random) -> tuple[Groups, list[str]]:
    """A line, and the flags that were added to it or changed in it."""
    words = draw.choice(scene.lines.strip().splitlines()).split()
    own, groups, drawn = scene.own(words), groups_of(words), list[str]()
    for _ in range(draw.choice((1, 1, 1, 2, 2, 3))):
        kind = draw.random()
        flags = [n for n, group in enumerate(groups) if flag_of(group) not in ("", "--")]
        at = draw.choice(flags) if flags else 0
        if kind < 0.62 or not flags:
            option = _drawn_option(scene, own, draw)
            if option is not None:
                _add(groups, option, scene, own, draw)
                drawn.append(option.name)
        elif kind < 0.75:
            name = flag_of(groups[at])
            option = own.get(name) or scene.of_run.get(name)
            if option is not None:
                groups[at] = [name, *option.values(draw, scene.given(name), scene.limit(name))]
                drawn.append(name)
        else:
            _break(groups, at, draw)
            drawn.append(flag_of(groups[at]) if at < len(groups) else "")
    return groups, [flag for flag in dict.fromkeys(drawn) if flag]


def _drawn_option(scene: Scene, own: Mapping[str, Option], draw: Random) -> Option | None:
    """Draw a flag of the command or of a run; rarely one of Megatron-LM's that megapipe lacks."""
    of_run = [
        option
        for option in scene.of_run.values()
        if option.count != "maybe" or draw.random() < 0.02
    ]
    pool = [*own.values()] if own and (not of_run or draw.random() < 0.6) else of_run
    pool = [option for option in pool if option.name != "--help" or draw.random() < 0.1]
    return draw.choice(pool) if pool else None


def _add(
    groups: Groups, option: Option, scene: Scene, own: Mapping[str, Option], draw: Random
) -> None:
    new = [option.name, *option.values(draw, scene.given(option.name), scene.limit(option.name))]
    if len(new) == 2 and (draw.random() < 0.1 or new[1].startswith("-")):
        new = [f"{new[0]}={new[1]}"]
    border = next((n for n, group in enumerate(groups) if flag_of(group) == "--"), None)
    if border is None:
        groups.append(new)
    elif option.name in own:
        groups.insert(border, new)
    else:
        groups.append(new)


def _break(groups: Groups, at: int, draw: Random) -> None:
    """A flag is left out, misspelled, given twice, or has no value or one too many; or a word
    stands astray.
    """
    kind, group = draw.randrange(6), groups[at]
    if kind == 0:
        del groups[at]
    elif kind == 1:
        name = group[0]
        cut = draw.randrange(3, max(4, len(name)))
        groups[at] = [
            draw.choice((name[:cut], name[:cut] + name[cut + 1 :], f"{name}s", name.upper())),
            *group[1:],
        ]
    elif kind == 2:
        groups.append(list(group))
    elif kind == 3:
        groups[at] = group[:1]
    elif kind == 4:
        groups[at] = [*group, draw.choice(WRONG)]
    else:
        groups[0] = [*groups[0], draw.choice(WRONG)]
