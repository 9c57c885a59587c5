"""Drawn lines of every command: none may end in a traceback, take too long, or ignore a flag in
silence.

    python -m tools.proofs.inputs.commands --lines 5000 --seed 0

A line that works (commands.toml) gets flags from the command's own table, with values in range, at
the border and wrong (lines.py, options.py), and runs in a fork of this process. It ends with status
0, or with 2 and one error. Each flag of a line that is accepted changes what is printed or written:
the line runs again without it, and with other values of it.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import math
import re
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # a fresh clone runs it before anything is installed

from megapipe.commands.main import command  # noqa: E402
from megapipe.commands.main import main as megapipe  # noqa: E402
from megapipe.errors import ConfigError  # noqa: E402
from megapipe.flags.parse import parse, run  # noqa: E402
from tools.proofs.inputs import small_files  # noqa: E402
from tools.proofs.inputs.forked import Limits, block_signals, run_forked  # noqa: E402
from tools.proofs.inputs.lines import (  # noqa: E402
    Groups,
    Scene,
    draw_line,
    flag_of,
    read_scenes,
    without,
    words_of,
)

VERDICTS = ("accepted", "refused", "traceback", "unclear", "silent", "too slow")
GOOD = ("accepted", "refused")
_WARNING = re.compile(r"^\S+\.py:\d+: \w*Warning", re.M)
WARM = (
    *("torch.distributed.device_mesh", "torch.utils._sympy.functions", "torch.utils.serialization"),
    *(
        "safetensors.torch",
        "megapipe.training.pretrain",
        "megapipe.checkpoint.shards",
        "encodings.utf_8_sig",
    ),
    *(f"matplotlib.{name}" for name in ("figure", "_constrained_layout", "backends.backend_svg")),
    *(f"matplotlib.backends.backend_{name}" for name in ("agg", "pdf")),
    *(
        f"transformers.models.{name}"
        for name in ("gpt2.modeling_gpt2", "llama.modeling_llama", "auto.modeling_auto")
    ),
)
"""Modules that commands import late; those of a package that is not installed are left out."""


@dataclass(frozen=True)
class Flags:
    """Flags of this tool."""

    lines: int = 1000
    """Command lines to draw."""
    seed: int = 0
    """The seed of all lines."""
    commands: tuple[str, ...] = ()
    """Scenes of tools/proofs/inputs/commands.toml to draw from. Default: all."""
    first: int = 0
    """The number of the first line; a run that was cut off goes on so."""
    seconds: float = math.inf
    """Draw no more lines after this time."""
    only_line: int | None = None
    """Run this line alone, and show all that it prints and which of its flags act."""


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


class Bench:
    """A warm process and a folder for each scene. Lines run in copies of the folders."""

    def __init__(self, scenes: Sequence[Scene], folder: Path) -> None:
        self.here = folder / "here"
        self.sources: dict[str, Path] = {}
        self.known: dict[str, dict[Path, bytes]] = {}
        for name in dict.fromkeys([*(scene.command for scene in scenes)]):
            command(name)
        for name in WARM:
            with suppress(ImportError):
                importlib.import_module(name)
        for made in dict.fromkeys(scene.made for scene in scenes):
            source = self.sources[made] = folder / "made" / made
            source.mkdir(parents=True)
            getattr(small_files, made)(source)
            self.known[made] = _contents(source)
        gc.freeze()  # what was imported stays shared with every fork

    def run(self, scene: Scene, groups: Groups) -> Outcome:
        """A line in a fresh copy of its folder."""
        shutil.rmtree(self.here, ignore_errors=True)
        shutil.copytree(self.sources[scene.made], self.here, symlinks=True)

        def work() -> None:
            sys.argv = [str(ROOT / "megapipe" / "__main__.py"), scene.command, *words_of(groups)]
            megapipe()

        code, text = run_forked(work, self.here, Limits(scene.seconds, scene.ranks))
        parts = {f"line {n}": line for n, line in enumerate(text.splitlines())}
        before = self.known[scene.made]
        for path, content in _contents(self.here).items():
            if before.get(path) != content:
                parts[f"file {path}"] = hashlib.sha256(content).hexdigest()
        return Outcome(code, text, parts)


def _contents(folder: Path) -> dict[Path, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder): path.read_bytes() for path in files}


def main(argv: Sequence[str]) -> None:
    flags = parse(Flags, argv)
    every = read_scenes()
    if unknown := sorted(set(flags.commands) - every.keys()):
        raise ConfigError(f"--commands {' '.join(unknown)}: there are {', '.join(every)}.")
    if flags.lines < 1:
        raise ConfigError(f"--lines {flags.lines} must be at least 1.")
    scenes = [every[name] for name in flags.commands or every]
    table, slowest, found = Counter[tuple[str, str]](), Counter[str](), dict[str, list[int]]()
    with TemporaryDirectory() as folder:
        if flags.only_line is not None:
            raise SystemExit(_show(flags, scenes, Path(folder)))
        bench = Bench(scenes, Path(folder))
        until = time.monotonic() + flags.seconds
        for n in range(flags.first, flags.first + flags.lines):
            if time.monotonic() > until:
                break
            scene, groups, drawn, draw = _line(flags, scenes, n)
            began = time.monotonic()
            outcome = bench.run(scene, groups)
            slowest[scene.name] = max(slowest[scene.name], int(1e3 * (time.monotonic() - began)))
            verdict, about = judge(scene, outcome), gist(outcome.text)
            if verdict == "accepted" and (
                flag := silent(bench, scene, groups, drawn, outcome, draw)
            ):
                verdict, about = "silent", flag
            table[scene.name, verdict] += 1
            if verdict not in GOOD:
                where = f"{scene.name}, {verdict}: {about}"
                found.setdefault(where, []).append(n)
                if len(found[where]) == 1:
                    line = shlex.join([scene.command, *words_of(groups)])
                    print(f"{where}  (--only-line {n})\n    {ascii(line)[:400]}", flush=True)
    print(report([scene.name for scene in scenes], table, slowest))
    for where, lines in found.items():
        print(f"{len(lines)} x {where}: lines {', '.join(map(str, lines[:8]))}")
    raise SystemExit(bool(found))


def _line(flags: Flags, scenes: Sequence[Scene], n: int) -> tuple[Scene, Groups, list[str], Random]:
    draw = Random(f"{flags.seed}/{n}")
    scene = draw.choices(scenes, [scene.weight for scene in scenes])[0]
    groups, drawn = draw_line(scene, draw)
    return scene, groups, drawn, draw


def _show(flags: Flags, scenes: Sequence[Scene], folder: Path) -> int:
    """One line with all that it prints. Returns: the exit status."""
    assert flags.only_line is not None
    scene, groups, drawn, draw = _line(flags, scenes, flags.only_line)
    bench = Bench([scene], folder)
    outcome = bench.run(scene, groups)
    verdict = judge(scene, outcome)
    print(
        f"megapipe {shlex.join([scene.command, *words_of(groups)])}\n{outcome.text}\n{verdict}, "
        f"flags {drawn}"
    )
    idle = silent(bench, scene, groups, drawn, outcome, draw) if verdict == "accepted" else None
    if idle:
        print(f"silent: {idle}")
    return verdict not in GOOD or idle is not None


def judge(scene: Scene, outcome: Outcome) -> str:
    """Return the outcome of a line."""
    text = outcome.text
    if outcome.code is None:
        return "too slow"
    if (
        "Traceback (most recent call last)" in text
        or "panicked at" in text
        or "AssertionError" in text
    ):
        return "traceback"
    if _WARNING.search(text) or outcome.code not in (0, 2, *scene.codes):
        return "unclear"
    if outcome.code == 0:
        return "accepted"
    return "refused" if len(re.findall(r"^\S.*?\berror: ", text, re.M)) == 1 else "unclear"


def silent(
    bench: Bench, scene: Scene, groups: Groups, drawn: Sequence[str], first: Outcome, draw: Random
) -> str | None:
    """A flag of an accepted line that changes nothing, neither left out nor with another value;
    None if all act.

    Looks at the flags that were drawn and at one other of the line.
    """
    others = [flag for flag in map(flag_of, groups) if flag not in ("", "--", *drawn)]
    looked_at = [*drawn, *draw.sample(others, min(1, len(others)))]
    words = words_of(groups)
    own = scene.own(words) if words else {}
    options = scene.of_run | own
    alone = [[f"--{kind}", *to] for kind in ("json", "csv") for to in ([], ["-"])]
    if (
        "--help" in words
        or "-h" in words
        or "--json=-" in words
        or "--csv=-" in words
        or any(x in groups for x in alone)
    ):
        return None  # the help, or the table alone, which costs do not change
    if any(flag in map(flag_of, groups) for flag in scene.ends.split()):
        return None
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
            outcome = bench.run(scene, other)
            if outcome.code == first.code and outcome.parts == first.parts:
                continue
            if scene.stable or outcome.code != first.code:
                break
            again = again or bench.run(scene, groups)
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


def gist(text: str) -> str:
    """Where a traceback ends in our code, or the last line."""
    lines = text.strip().splitlines() or ["nothing printed"]
    places = re.findall(r'File "[^"]*/((?:megapipe|tools|pretrain_gpt)[^"]*)", line (\d+)', text)
    return (f"{places[-1][0]}:{places[-1][1]} " if places else "") + lines[-1][:150]


def report(names: Sequence[str], table: Counter[tuple[str, str]], slowest: Counter[str]) -> str:
    """A row for each scene: lines, and what became of them."""
    head = [
        "| command | lines |" + "".join(f" {verdict} |" for verdict in VERDICTS) + " slowest, ms |"
    ]
    rows = [*head, "|---|---:|" + "---:|" * (len(VERDICTS) + 1)]
    for name in [*names, "all"]:
        cells = [
            sum(table[x, verdict] for x in names if name in (x, "all")) for verdict in VERDICTS
        ]
        most = max((slowest[x] for x in names if name in (x, "all")), default=0)
        rows.append(f"| {name} | {sum(cells)} | " + " | ".join(map(str, [*cells, most])) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    block_signals()
    run(main)
