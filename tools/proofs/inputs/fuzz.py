"""Every command on inputs that are slightly wrong: none may end in a traceback or a hang, each
refusal names its place.

    python tools/proofs/inputs/fuzz.py --cases 20000 --seed 7

A draw takes a scene (scenes.py: a command that works and its small files), damages a file or a word
or a few (damage.py), and runs the command in a forked process of its own.
"""

from __future__ import annotations

import gc
import re
import runpy
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # a fresh clone runs it before anything is installed

from megapipe.errors import ConfigError  # noqa: E402
from megapipe.flags.parse import parse, run  # noqa: E402
from tools.proofs.inputs.damage import damage_file, damage_words  # noqa: E402
from tools.proofs.inputs.forked import Limits, block_signals, run_forked  # noqa: E402
from tools.proofs.inputs.scenes import Scene, make, read_scenes  # noqa: E402
from tools.proofs.inputs.tally import Tally  # noqa: E402
from tools.proofs.shrink import Draws, Fuzzer  # noqa: E402

CODES = {1, 2, 16, 17}
"""Exit statuses of errors that a user can act on, see megapipe/errors.py."""
VERDICTS = ("accepted", "refused", "refused without its place", "traceback", "crash", "hang")


@dataclass(frozen=True)
class Flags(Draws):
    """Damage the files and words of commands, and see that each refusal names its place."""

    cases: float = 1000
    """How many at most."""
    kinds: tuple[str, ...] = ()
    """Scenes to draw from. Default: all."""
    limit: float = 5.0
    """Seconds. A draw that computes longer hangs, and one that waits for ten times as long: other
    programs take their turns.
    """
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


class Bench:
    """A folder for each scene. Draws damage and run copies of them."""

    def __init__(self, scenes: Sequence[Scene], folder: Path, limit: float) -> None:
        self.scenes, self.limit = scenes, limit
        self.here = folder / "here"
        self.sources = {scene.name: folder / "made" / scene.name for scene in scenes}
        make(scenes, [*self.sources.values()])
        self.tally = Tally([*self.sources], VERDICTS)
        gc.freeze()  # what was imported stays shared with every fork

    def draw(self, draw: Random) -> Drawn:
        """Draw a scene, and damage it in a fresh copy of its folder."""
        scene = draw.choices(self.scenes, [scene.weight for scene in self.scenes])[0]
        shutil.rmtree(self.here, ignore_errors=True)
        shutil.copytree(self.sources[scene.name], self.here, symlinks=True)
        return damaged(draw, scene, self.here)

    def run(self, drawn: Drawn) -> list[str]:
        """Run the scene that was drawn last. Returns what is wrong with its end."""
        scene = drawn.scene
        with self.tally.timed(scene.name):
            code, text = _run(drawn, self.here, self.limit)
        return self.tally.add(scene.name, judge(code, text, drawn.wanted), text)


def main(argv: Sequence[str]) -> None:
    flags = parse(Flags, argv)
    every = read_scenes()
    if unknown := sorted(set(flags.kinds) - every.keys()):
        raise ConfigError(f"--kinds {' '.join(unknown)}: there are {', '.join(every)}.")
    if flags.cases < 1 or not flags.limit > 0:
        raise ConfigError(f"--cases {flags.cases} and --limit {flags.limit} must be above 0.")
    with TemporaryDirectory() as folder:
        bench = Bench([every[kind] for kind in flags.kinds or every], Path(folder), flags.limit)

        def told(drawn: Drawn) -> str:
            if flags.keep:  # Hypothesis has run the smallest one last
                shutil.copytree(bench.here, flags.keep, symlinks=True, dirs_exist_ok=True)
            return f"{drawn.scene.program} {drawn.words}\n{'; '.join(drawn.done)}"

        Fuzzer("inputs", bench.draw, bench.run).prove(flags, told)
        print(bench.tally.report())


def judge(code: int | None, text: str, wanted: frozenset[str]) -> str:
    """Return the outcome of a draw. code: its exit status, None if it did not end."""
    if code is None:
        return "hang"
    if "Traceback (most recent call last)" in text or "panicked at" in text:
        return "traceback"
    if code == 0:
        return "accepted"
    if code not in CODES:
        return "crash"
    named = any(re.search(rf"(?<!\w){re.escape(word)}", text) for word in wanted)
    return "refused" if named else "refused without its place"


def damaged(draw: Random, scene: Scene, here: Path) -> Drawn:
    """The scene in `here`, damaged."""
    words, done = draw.choice(scene.commands.strip().splitlines()).split(), list[str]()
    files = {
        p: _names(p.relative_to(here))
        for pattern in scene.files
        for p in here.glob(pattern)
        if p.is_file()
    }
    said = {name for word in words for name in re.split("[/:]", word)}
    read = sorted(path for path, names in files.items() if names & said) or sorted(files)
    wanted = {name for names in files.values() for name in names & said}
    at_words = not files or draw.random() < scene.words
    if files and not (at_words and draw.random() < 0.7):
        for path in draw.sample(read, min(len(read), draw.choice((1, 1, 1, 1, 2)))):
            done.append(f"{path.relative_to(here)}: {damage_file(path, draw)}")
            wanted |= files[path] | {
                word for word, value in pairwise(words) if files[path] & {*re.split("[/:]", value)}
            }
    if at_words:
        words = damage_words(words, scene.known, draw)
        done.append("words")
        # A flag or an argument that is missing is none of the words.
        wanted |= {_printed(word.rstrip("/") or word or "''") for word in words} | {
            "--",
            "argument",
            "arguments",
        }
    return Drawn(scene, words, frozenset(wanted), done)


def _printed(word: str) -> str:
    """Return a text as standard error has it, where the bytes of an argument are no text."""
    return word.encode(errors="backslashreplace").decode()


def _names(path: Path) -> set[str]:
    """By which a message may call a file: its own, without suffix, or of a folder above it."""
    return {*path.parts, path.name.partition(".")[0]} - {""}


def _run(drawn: Drawn, here: Path, seconds: float) -> tuple[int | None, str]:
    """Return the exit status, None if it took too long and was killed, and the text that was
    printed.
    """

    def work() -> None:
        sys.argv = [str(ROOT / drawn.scene.program), *drawn.words]
        sys.path[0] = str(ROOT / Path(drawn.scene.program).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")

    powerless = any("permission" in done for done in drawn.done)
    return run_forked(work, here, Limits(seconds, drawn.scene.ranks, powerless))


if __name__ == "__main__":
    block_signals()
    run(main)
