"""Every command on inputs that are slightly wrong: none may end in a traceback or a hang, each
refusal names its place.

    python tools/proofs/inputs/fuzz.py --draws 20000 --seed 7

A draw takes a scene (scenes.py: a command that works and its small files), damages a file or a word
or a few (damage.py), and runs the command in a forked process of its own. `--only-draw N` shows a
single one.
"""

from __future__ import annotations

import gc
import re
import runpy
import shutil
import sys
import time
from collections import Counter
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
from tools.proofs.inputs.commands import gist  # noqa: E402
from tools.proofs.inputs.damage import damage_file, damage_words  # noqa: E402
from tools.proofs.inputs.forked import Limits, block_signals, run_forked  # noqa: E402
from tools.proofs.inputs.scenes import Scene, make, read_scenes  # noqa: E402

CODES = {1, 2, 16, 17}
"""Exit statuses of errors that a user can act on, see megapipe/errors.py."""


@dataclass(frozen=True)
class Flags:
    """Flags of this tool."""

    draws: int = 1000
    """How many."""
    seed: int = 0
    """Of all draws."""
    kinds: tuple[str, ...] = ()
    """Scenes to draw from. Default: all."""
    seconds: float = 5.0
    """A draw that computes longer hangs, and one that waits for ten times as long: other programs
    take their turns.
    """
    only_draw: int | None = None
    """Run this one alone and show its command, what was damaged and all that it printed."""
    keep: str | None = None
    """Folder to leave its files in."""


@dataclass(frozen=True)
class Drawn:
    """A damaged scene. wanted: words, one of them must stand in a refusal. done: the damage, for a
    reader.
    """

    scene: Scene
    words: list[str]
    wanted: frozenset[str]
    done: list[str]


def main(argv: Sequence[str]) -> None:
    flags = parse(Flags, argv)
    every = read_scenes()
    if unknown := sorted(set(flags.kinds) - every.keys()):
        raise ConfigError(f"--kinds {' '.join(unknown)}: there are {', '.join(every)}.")
    if flags.draws < 1 or not flags.seconds > 0:
        raise ConfigError(f"--draws {flags.draws} and --seconds {flags.seconds} must be above 0.")
    scenes = [every[kind] for kind in flags.kinds or every]
    with TemporaryDirectory() as folder:
        if flags.only_draw is not None:
            raise SystemExit(_show(flags, scenes, flags.only_draw, Path(folder)))
        sources = {scene.name: Path(folder, "made", scene.name) for scene in scenes}
        make(scenes, [*sources.values()])
        gc.freeze()  # what was imported stays shared with every fork
        table, found, slowest = Counter[tuple[str, str]](), dict[str, list[str]](), Counter[str]()
        for n in range(flags.draws):
            began, scene = time.monotonic(), _scene(flags, scenes, n)
            verdict, text, _ = _one(flags, scene, n, sources[scene.name], Path(folder))
            kind = scene.name
            slowest[kind] = max(slowest[kind], int(1e3 * (time.monotonic() - began)))
            table[kind, verdict] += 1
            if verdict not in ("accepted", "refused"):
                where = f"{kind}, {verdict}: {gist(text)}"
                found.setdefault(where, []).append(str(n))
                if len(found[where]) == 1:
                    print(f"{where}  (--only-draw {n})", flush=True)
    print(report([scene.name for scene in scenes], table, slowest))
    for where, draws in found.items():
        print(f"{len(draws)} x {where}: draws {', '.join(draws[:5])}")
    raise SystemExit(bool(found))


def _scene(flags: Flags, scenes: Sequence[Scene], n: int) -> Scene:
    return Random(f"{flags.seed}/{n}/scene").choices(scenes, [scene.weight for scene in scenes])[0]


def _one(flags: Flags, scene: Scene, n: int, source: Path, folder: Path) -> tuple[str, str, Drawn]:
    """Run draw n: return its outcome and the text that it printed."""
    here = folder / "here"
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(source, here, symlinks=True)
    drawn = _drawn(Random(f"{flags.seed}/{n}"), scene, here)
    code, text = _run(drawn, here, flags.seconds)
    return judge(code, text, drawn.wanted), text, drawn


def _show(flags: Flags, scenes: Sequence[Scene], n: int, folder: Path) -> int:
    scene = _scene(flags, scenes, n)
    make([scene], [folder / "made"])
    verdict, text, drawn = _one(flags, scene, n, folder / "made", folder)
    print(
        f"{scene.program} {drawn.words}\n{'; '.join(drawn.done)}\n{text}\n{scene.name}: {verdict}"
    )
    if flags.keep:
        shutil.copytree(folder / "here", flags.keep, symlinks=True, dirs_exist_ok=True)
    return verdict not in ("accepted", "refused")


def report(kinds: Sequence[str], table: Counter[tuple[str, str]], slowest: Counter[str]) -> str:
    """A row for each scene."""
    verdicts = ("accepted", "refused", "refused without its place", "traceback", "crash", "hang")
    rows = [
        f"| {kind} | " + " | ".join(str(table[kind, v]) for v in verdicts) + f" | {slowest[kind]} |"
        for kind in kinds
    ]
    whole = [str(sum(table[kind, v] for kind in kinds)) for v in verdicts]
    head = [
        f"| kind | {' | '.join(verdicts)} | slowest, ms |",
        "|---|" + "---:|" * (len(verdicts) + 1),
    ]
    return "\n".join([*head, *rows, f"| all | {' | '.join(whole)} | {max(slowest.values())} |"])


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


def _drawn(draw: Random, scene: Scene, here: Path) -> Drawn:
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
