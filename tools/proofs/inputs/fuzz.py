"""Every command on files that are slightly wrong: none may end in a traceback or a hang, each
refusal names its place.

    python -m tools.proofs.inputs.fuzz --cases 20000 --seed 7

A draw takes a scene (scenes.py: a command that works and its small files), damages a file or two
(damage.py), and runs the command in a forked process of its own. Wrong words are drawn by
commands.py.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from megapipe.errors import ConfigError
from megapipe.flags.parse import parse, run
from tools.proofs.inputs.damage import damage_file
from tools.proofs.inputs.forked import block_signals
from tools.proofs.inputs.scenes import Bench, Scene, read_scenes
from tools.proofs.inputs.tally import Tally, breakdown, names_one_of
from tools.proofs.shrink import Draws, Fuzzer

CODES = {1, 2, 16, 17}
"""Exit statuses of errors that a user can act on, see megapipe/errors.py."""


@dataclass(frozen=True)
class Flags(Draws):
    """Damage the files of commands, and see that each refusal names its place."""

    cases: float = 1000
    """How many at most."""
    kinds: tuple[str, ...] = ()
    """Scenes to draw from. Default: all."""
    keep: str | None = None
    """Folder to leave the files of a draw in that fails."""


@dataclass(frozen=True)
class Drawn:
    """A damaged scene. wanted: words, one of them must stand in a refusal. done: the damage, for a
    reader.
    """

    scene: Scene
    words: list[str]
    wanted: frozenset[str]
    done: list[str]

    def __str__(self) -> str:
        """Return the line as it is typed, and the damage."""
        line = shlex.join(["megapipe", self.scene.command, *self.words])
        return f"{line}\n{'; '.join(self.done)}"


def main(argv: Sequence[str]) -> None:
    flags = parse(Flags, argv)
    every = {name: scene for name, scene in read_scenes().items() if scene.files}
    if unknown := sorted(set(flags.kinds) - every.keys()):
        raise ConfigError(f"--kinds {' '.join(unknown)}: there are {', '.join(every)}.")
    if flags.cases < 1:
        raise ConfigError(f"--cases {flags.cases} must be at least 1.")
    scenes = [every[kind] for kind in flags.kinds or every]
    weights = [scene.weight for scene in scenes]
    tally = Tally([scene.name for scene in scenes])
    with TemporaryDirectory() as folder:
        bench = Bench(scenes, Path(folder))

        def draw(dice: Random) -> Drawn:
            scene = dice.choices(scenes, weights)[0]
            bench.fresh(scene)
            return damaged(dice, scene, bench.here)

        def run_last(drawn: Drawn) -> list[str]:
            powerless = any("permission" in done for done in drawn.done)
            with tally.timed(drawn.scene.name):
                code, text = bench.run(drawn.scene, drawn.words, powerless=powerless)
            return tally.add(drawn.scene.name, judge(code, text, drawn.wanted), text)

        def told(drawn: Drawn) -> str:
            if flags.keep:  # Hypothesis has run the smallest one last
                shutil.copytree(bench.here, flags.keep, symlinks=True, dirs_exist_ok=True)
            return str(drawn)

        Fuzzer("inputs", draw, run_last).prove(flags, told)
    print(tally.report())


def judge(code: int | None, text: str, wanted: frozenset[str]) -> str:
    """Return the outcome of a draw. code: its exit status, None if it did not end."""
    if broken := breakdown(code, text):
        return broken
    if code == 0:
        return "accepted"
    return "refused" if code in CODES and names_one_of(text, wanted) else "unclear"


def damaged(draw: Random, scene: Scene, here: Path) -> Drawn:
    """The scene in `here`, with one or two of the files damaged that a line of it reads."""
    lines = (scene.damaged or scene.lines).strip().splitlines()
    words, done = draw.choice(lines).split(), list[str]()
    paths = {path for pattern in scene.files for path in here.glob(pattern) if path.is_file()}
    files = {path: _names(path.relative_to(here)) for path in paths}
    said = {name for word in words for name in re.split("[/:]", word)}
    read = sorted(path for path, names in files.items() if names & said) or sorted(files)
    wanted = {name for names in files.values() for name in names & said}
    for path in draw.sample(read, min(len(read), draw.choice((1, 1, 1, 1, 2)))):
        done.append(f"{path.relative_to(here)}: {damage_file(path, draw)}")
        wanted |= files[path]
        # The flag that names the file.
        wanted |= {
            word for word, value in pairwise(words) if files[path] & {*re.split("[/:]", value)}
        }
    return Drawn(scene, words, frozenset(wanted), done)


def _names(path: Path) -> set[str]:
    """By which a message may call a file: its own, without suffix, or of a folder above it."""
    return {*path.parts, path.name.partition(".")[0]} - {""}


if __name__ == "__main__":
    block_signals()
    run(main)
