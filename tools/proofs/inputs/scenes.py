"""Commands that work, each with the small files that it reads: scenes.toml, and what runs them."""

from __future__ import annotations

import gc
import importlib
import runpy
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from string import Template
from typing import Any

from megapipe.commands.main import command
from megapipe.commands.main import main as megapipe
from megapipe.doors import DOORS
from tools.proofs.inputs import small_files
from tools.proofs.inputs.forked import Limits, run_forked
from tools.proofs.inputs.options import Option, options_of, options_of_a_run

ROOT = Path(__file__).resolve().parents[3]
WARM = """
torch.distributed.device_mesh torch.utils._sympy.functions torch.utils.serialization
safetensors.torch megapipe.training.pretrain megapipe.checkpoint.shards encodings.utf_8_sig
matplotlib.figure matplotlib._constrained_layout matplotlib.backends.backend_svg
matplotlib.backends.backend_agg matplotlib.backends.backend_pdf
transformers.models.gpt2.modeling_gpt2 transformers.models.llama.modeling_llama
transformers.models.auto.modeling_auto
"""
"""Modules that commands import late; those of a package that is not installed are left out."""


@dataclass(frozen=True)
class Scene:
    """A command in a folder where it works.

    Attributes:
        command: its name, or a module that runs as a program.
        lines: words that work, to which commands.py adds flags.
        damaged: words that work, whose files fuzz.py damages. Default: `lines`.
        files: patterns of the files that are damaged; () for none.
        made: the functions of small_files.py that fill the folder.
        seconds: the time that every line is promised to take at most.
        weight: how often it is drawn.
        ranks: False ends a command where it would start a process.
        stable: equal lines print the same.
        of_a_run: flags of a run that it takes too, and which of them are looked at: "told", all, as
            the command tells what becomes of each; "trained", those that decide numbers; "planned",
            none: those that a plan does not depend on act in the run.
        codes: exit statuses, in addition to 0 and 2, that the command documents.
        shared: the table of values, work and reasons of all commands.
        values, most, silent: those of this one.
    """

    name: str
    command: str
    lines: str = ""
    damaged: str = ""
    files: tuple[str, ...] = ()
    made: str = "nothing"
    seconds: float = 5.0
    weight: float = 1.0
    ranks: bool = True
    stable: bool = True
    of_a_run: str = ""
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
        for names, why in self.silent.items():
            if any(fnmatchcase(flag, name) for name in names.split()):
                return why
        return None


def read_scenes() -> dict[str, Scene]:
    """By name."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    rows: dict[str, dict[str, Any]] = tomllib.loads(
        Template(text).safe_substitute(small_files.WORDS)
    )
    shared = rows.pop("all")
    found = {}
    for name, row in rows.items():
        row = {"command": name, "shared": shared, **row}
        row |= {key: tuple(row.get(key, ())) for key in ("codes", "files")}
        found[name] = Scene(name=name, **row)
    return found


class Bench:
    """A warm process and a folder for each scene. Lines run in copies of the folders.

    Attributes:
        here: the folder that a line runs in.
    """

    def __init__(self, scenes: Sequence[Scene], folder: Path) -> None:
        self.here = folder / "here"
        self.sources: dict[str, Path] = {}
        for name in dict.fromkeys(scene.command for scene in scenes):
            if name in DOORS:
                command(name)
        for name in WARM.split():
            with suppress(ImportError):
                importlib.import_module(name)
        for made in dict.fromkeys(scene.made for scene in scenes):
            source = self.sources[made] = folder / "made" / made
            source.mkdir(parents=True)
            for name in made.split():
                getattr(small_files, name)(source)
        self.known = {made: _contents(source) for made, source in self.sources.items()}
        gc.freeze()  # what was imported stays shared with every fork

    def fresh(self, scene: Scene) -> None:
        """Make `here` a copy of a scene's folder."""
        shutil.rmtree(self.here, ignore_errors=True)
        shutil.copytree(self.sources[scene.made], self.here, symlinks=True)

    def run(
        self, scene: Scene, words: Sequence[str], *, powerless: bool = False
    ) -> tuple[int | None, str]:
        """Run a line in `here`. powerless: without the rights of root.

        Returns: its exit status, None if it was killed for taking too long, and what it printed.
        """

        def work() -> None:
            if scene.command in DOORS:
                sys.argv = [str(ROOT / "megapipe" / "__main__.py"), scene.command, *words]
                megapipe()
            else:
                sys.argv = [scene.command, *words]
                runpy.run_module(scene.command, run_name="__main__")

        return run_forked(work, self.here, Limits(scene.seconds, scene.ranks, powerless))

    def written(self, scene: Scene) -> dict[Path, bytes]:
        """Return the files that a line has written or changed."""
        before = self.known[scene.made]
        after = _contents(self.here)
        return {path: content for path, content in after.items() if before.get(path) != content}


def _contents(folder: Path) -> dict[Path, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder): path.read_bytes() for path in files}
