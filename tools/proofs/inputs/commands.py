"""Drawn lines of every command: none may end in a traceback, take too long, or ignore a flag in
silence.

    python -m tools.proofs.inputs.commands --cases 5000 --seed 0

A line that works (commands.toml) gets flags from the command's own table, with values in range, at
the border and wrong (lines.py, options.py), and runs in a fork of this process. It ends with status
0, or with 2 and one error. Each flag of a line that is accepted changes what is printed or written:
the line runs again without it, and with other values of it.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
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
from tools.proofs.inputs.tally import Tally  # noqa: E402
from tools.proofs.shrink import Draws, Fuzzer  # noqa: E402

VERDICTS = ("accepted", "refused", "traceback", "unclear", "silent", "too slow")
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
class Flags(Draws):
    """Draw lines of commands, and see that each ends well and no flag of them is ignored."""

    cases: float = 1000
    """How many at most."""
    commands: tuple[str, ...] = ()
    """Scenes of tools/proofs/inputs/commands.toml to draw from. Default: all."""


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


def draw(dice: Random, scenes: Sequence[Scene]) -> Line:
    """Draw a line."""
    scene = dice.choices(scenes, [scene.weight for scene in scenes])[0]
    return Line(scene, *draw_line(scene, dice), dice.randrange(2**16))


def try_line(line: Line, bench: Bench, tally: Tally) -> list[str]:
    """Run a line, and again without each of its flags. Returns what is wrong."""
    name = line.scene.name
    with tally.timed(name):
        outcome = bench.run(line.scene, line.groups)
    verdict = judge(line.scene, outcome)
    idle = silent(bench, line, outcome) if verdict == "accepted" else None
    return tally.add(name, "silent" if idle else verdict, idle or outcome.text)


def main(argv: Sequence[str]) -> None:
    flags = parse(Flags, argv)
    every = read_scenes()
    if unknown := sorted(set(flags.commands) - every.keys()):
        raise ConfigError(f"--commands {' '.join(unknown)}: there are {', '.join(every)}.")
    if flags.cases < 1:
        raise ConfigError(f"--cases {flags.cases} must be at least 1.")
    scenes = [every[name] for name in flags.commands or every]
    tally = Tally([scene.name for scene in scenes], VERDICTS)
    with TemporaryDirectory() as folder:
        run_line = partial(try_line, bench=Bench(scenes, Path(folder)), tally=tally)
        Fuzzer("commands", partial(draw, scenes=scenes), run_line).prove(flags)
    print(tally.report())


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


def silent(bench: Bench, line: Line, first: Outcome) -> str | None:
    """A flag of an accepted line that changes nothing, neither left out nor with another value;
    None if all act.

    Looks at the flags that were drawn and at one other of the line. first: what the line printed.
    """
    scene, groups, draw = line.scene, line.groups, Random(line.seed)
    others = [flag for flag in map(flag_of, groups) if flag not in ("", "--", *line.drawn)]
    looked_at = [*line.drawn, *draw.sample(others, min(1, len(others)))]
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


if __name__ == "__main__":
    block_signals()
    run(main)
