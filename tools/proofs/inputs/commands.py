"""Drawn lines of every command: none may end in a traceback, take too long, or ignore a flag in
silence.

    python -m tools.proofs.inputs.commands --cases 5000 --seed 0

A line that works (scenes.toml) gets flags from the command's own table, with values in range, at
the border and wrong (lines.py, options.py), and runs in a fork of this process. It ends with status
0, or with 2 and one error. Each flag of a line that is accepted changes what is printed or written:
the line runs again without it, and with other values of it.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from megapipe.errors import ConfigError
from megapipe.flags.parse import parse, run
from tools.proofs.inputs.forked import block_signals
from tools.proofs.inputs.lines import Groups, draw_line, flag_of, without, words_of
from tools.proofs.inputs.scenes import Bench, Scene, read_scenes
from tools.proofs.inputs.tally import Tally, breakdown, names_one_of
from tools.proofs.shrink import Draws, Fuzzer

_WARNING = re.compile(r"^\S+\.py:\d+: \w*Warning", re.M)


@dataclass(frozen=True)
class Flags(Draws):
    """Draw lines of commands, and see that each ends well and no flag of them is ignored."""

    cases: float = 1000
    """How many at most."""
    commands: tuple[str, ...] = ()
    """Scenes of tools/proofs/inputs/scenes.toml to draw from. Default: all."""


@dataclass(frozen=True)
class Line:
    """A drawn line.

    Attributes:
        drawn: the flags that were added to it or changed in it.
        seed: of the values with which it runs again.
    """

    scene: Scene
    groups: Groups
    drawn: list[str]
    seed: int

    def __str__(self) -> str:
        """Return it as it is typed."""
        words = shlex.join(["megapipe", self.scene.command, *words_of(self.groups)])
        return f"{words!a}\n{self.scene.name}, flags {self.drawn}"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a command line.

    Attributes:
        code: its exit status, None if it was killed for taking too long.
        parts: the lines that it printed and digests of the files that it wrote, by place.
    """

    code: int | None
    text: str
    parts: Mapping[str, str] = field(default_factory=dict)


def ran(bench: Bench, scene: Scene, groups: Groups) -> Outcome:
    """Run a line in a fresh copy of its folder."""
    bench.fresh(scene)
    code, text = bench.run(scene, words_of(groups))
    parts = {f"line {n}": line for n, line in enumerate(text.splitlines())}
    for path, content in bench.written(scene).items():
        parts[f"file {path}"] = hashlib.sha256(content).hexdigest()
    return Outcome(code, text, parts)


def draw(dice: Random, scenes: Sequence[Scene]) -> Line:
    """Draw a line."""
    scene = dice.choices(scenes, [scene.weight for scene in scenes])[0]
    return Line(scene, *draw_line(scene, dice), dice.randrange(2**16))


def try_line(line: Line, bench: Bench, tally: Tally) -> list[str]:
    """Run a line, and again without each of its flags. Returns what is wrong."""
    name = line.scene.name
    run_again = partial(ran, bench, line.scene)
    with tally.timed(name):
        outcome = run_again(line.groups)
    verdict = judge(line.scene, outcome, words_of(line.groups))
    idle = silent(run_again, line, outcome) if verdict == "accepted" else None
    return tally.add(name, "silent" if idle else verdict, idle or outcome.text)


def main(argv: Sequence[str]) -> None:
    flags = parse(Flags, argv)
    every = {name: scene for name, scene in read_scenes().items() if scene.lines}
    if unknown := sorted(set(flags.commands) - every.keys()):
        raise ConfigError(f"--commands {' '.join(unknown)}: there are {', '.join(every)}.")
    if flags.cases < 1:
        raise ConfigError(f"--cases {flags.cases} must be at least 1.")
    scenes = [every[name] for name in flags.commands or every]
    tally = Tally([scene.name for scene in scenes])
    with TemporaryDirectory() as folder:
        run_line = partial(try_line, bench=Bench(scenes, Path(folder)), tally=tally)
        Fuzzer("commands", partial(draw, scenes=scenes), run_line).prove(flags)
    print(tally.report())


def judge(scene: Scene, outcome: Outcome, words: Sequence[str]) -> str:
    """Return the outcome of a line. words: those of the line; a refusal has one of them, or a
    flag.
    """
    text = outcome.text
    if broken := breakdown(outcome.code, text):
        return broken
    if _WARNING.search(text) or outcome.code not in (0, 2, *scene.codes):
        return "unclear"
    if outcome.code == 0:
        return "accepted"
    # Standard error has bytes that are no text in this form.
    printed = {word.encode(errors="backslashreplace").decode() for word in words} - {""}
    # What is missing is no word of the line.
    named = names_one_of(text, {*printed, "--", "''", "argument", "missing"})
    errors = len(re.findall(r"^\S.*?\berror: ", text, re.M))
    return "refused" if errors == 1 and named else "unclear"


def silent(run_line: Callable[[Groups], Outcome], line: Line, first: Outcome) -> str | None:
    """A flag of an accepted line that changes nothing, neither left out nor with another value;
    None if all act.

    Looks at the flags that were drawn and at one other of the line.

    Args:
        run_line: runs the line with other words.
        first: what the line printed.
    """
    scene, groups, draw = line.scene, line.groups, Random(line.seed)
    others = [flag for flag in map(flag_of, groups) if flag not in ("", "--", *line.drawn)]
    looked_at = [*line.drawn, *draw.sample(others, min(1, len(others)))]
    words = words_of(groups)
    own = scene.own(words) if words else {}
    options = scene.of_run | own
    alone = [[f"--{kind}", *to] for kind in ("json", "csv") for to in ([], ["-"])]
    asked = {"--help", "-h", "--json=-", "--csv=-"} & set(words)
    if asked or any(x in groups for x in alone):
        return None  # the help, or the table alone, which costs do not change
    again = None
    for flag in looked_at:
        option = options.get(flag)
        if option is None or flag not in map(flag_of, groups) or scene.reason(flag):
            continue
        if flag in scene.of_run and flag not in own and not scene.looks_at(option):
            continue
        tried = [without(groups, flag)]
        values = [
            value for value in option.legal_values(scene.given(flag)) if option.count != "none"
        ]
        for value in draw.sample(values, min(3, len(values))):
            tried.append(_with(groups, flag, value))
        for other in tried:
            outcome = run_line(other)
            if outcome.code == first.code and outcome.parts == first.parts:
                continue
            if scene.stable or outcome.code != first.code:
                break
            again = again or run_line(groups)
            steady = {
                name: text for name, text in first.parts.items() if again.parts.get(name) == text
            }
            if {name: outcome.parts.get(name) for name in steady} != steady:
                break
        else:
            return flag
    return None


def _with(groups: Groups, flag: str, value: str) -> Groups:
    """The line with another value of a flag."""
    changed = without(groups, flag)
    at = next(n for n, group in enumerate(groups) if flag_of(group) == flag)
    changed.insert(min(at, len(changed)), [flag, value])
    return changed


if __name__ == "__main__":
    block_signals()
    run(main)
