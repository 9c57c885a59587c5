"""Command lines: good ones from commands.toml, with flags added, changed, doubled, cut off and
misspelled.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from random import Random
from string import Template
from typing import Any

from tools.proofs.inputs import small_files
from tools.proofs.inputs.options import WRONG, Option, options_of, options_of_a_run

Groups = list[list[str]]
"""A line: words before any flag, then each flag with the words that follow it. `--` is a group too.
"""


@dataclass(frozen=True)
class Scene:
    """A command in a folder where it works.

    Attributes:
        lines: words that work.
        made: the function of tools/proofs/inputs/small_files.py that fills the folder.
        seconds: the time that every line is promised to take at most.
        weight: how often it is drawn.
        ranks: False ends a command where it would start a process.
        stable: equal lines print the same.
        of_a_run: flags of a run that it takes too, and which of them are looked at: "told", all, as
            the command tells what becomes of each; "trained", those that decide numbers; "planned",
            none: those that a plan does not depend on act in the run.
        ends: flags with which a line ends at its first process, before others can act.
        codes: exit statuses, in addition to 0 and 2, that the command documents.
        shared: the table of values, work and reasons of all commands.
        values, most, silent: those of this one.
    """

    name: str
    command: str
    lines: str
    made: str = "nothing"
    seconds: float = 5.0
    weight: float = 1.0
    ranks: bool = True
    stable: bool = True
    of_a_run: str = ""
    ends: str = ""
    codes: tuple[int, ...] = ()
    shared: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    most: Mapping[str, float] = field(default_factory=dict)
    silent: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def of_run(self) -> dict[str, Option]:
        """Flags of a run, by name."""
        return {option.name: option for option in options_of_a_run()} if self.of_a_run else {}

    def own(self, words: Sequence[str]) -> dict[str, Option]:
        """Flags of the command's own, by name."""
        return {option.name: option for option in options_of(self.command, words)}

    def looks_at(self, option: Option) -> bool:
        """Return whether a flag of a run must change the output that is compared."""
        return self.of_a_run == "told" or (self.of_a_run == "trained" and option.decides)

    def given(self, flag: str) -> list[str]:
        """Values of a flag that mean something here."""
        texts = self.values.get(flag, self.shared["values"].get(flag))
        return [] if texts is None else texts.split()

    def limit(self, flag: str) -> float | None:
        """The largest number that is drawn for a flag that a command's work grows with."""
        found: float | None = self.most.get(flag, self.shared["most"].get(flag))
        return found

    def reason(self, flag: str) -> str | None:
        """Why a flag may change nothing that can be seen here; None where it may not."""
        rows = [*self.silent.items(), *self.shared["silent"].items()]
        return next(
            (why for names, why in rows if any(fnmatchcase(flag, name) for name in names.split())),
            None,
        )


def read_scenes() -> dict[str, Scene]:
    """By name."""
    text = (Path(__file__).parent / "commands.toml").read_text(encoding="utf-8")
    rows: dict[str, dict[str, Any]] = tomllib.loads(
        Template(text).safe_substitute(small_files.WORDS)
    )
    shared = rows.pop("all")
    found = {}
    for name, row in rows.items():
        row = {"command": name, **row, "codes": tuple(row.get("codes", ())), "shared": shared}
        found[name] = Scene(name=name, **row)
    return found


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
