"""Commands that work, each with the small files it reads: tools/proofs/inputs/scenes.toml, read."""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from megapipe.commands.main import command
from megapipe.config import Config
from megapipe.doors import DOORS
from megapipe.flags.parse import flags_of
from megapipe.flags.rules import KNOWN
from tools.proofs.inputs import small_files

ROOT = Path(__file__).resolve().parents[3]
_OF_A_RUN = ("pretrain_gpt.py", "tools/plan.py", "tools/rehearse.py")


@dataclass(frozen=True)
class Scene:
    """A command in a folder.

    Attributes:
        commands: lines, one of which is taken each time.
        made: the function of tools/proofs/inputs/small_files.py that fills the folder.
        files: patterns of what is damaged.
        words: how often the words are damaged, where there are files.
        ranks: False ends a command that comes as far as starting processes.
    """

    name: str
    program: str
    commands: str
    made: str = "nothing"
    files: tuple[str, ...] = ()
    weight: float = 1.0
    words: float = 0.1
    ranks: bool = True

    @property
    def known(self) -> list[str]:
        """The flags of its program."""
        return [
            *_flags(self.program),
            *(word for word in self.commands.split() if word.startswith("--")),
        ]


@cache
def _flags(program: str) -> list[str]:
    of_a_run = [*flags_of(Config), *KNOWN] if program in _OF_A_RUN else []
    doors = {f"tools/{door.script}.py": name for name, door in DOORS.items()}
    if program in doors:
        module = sys.modules[command(doors[program]).__module__]
    else:
        module = importlib.import_module(_module(program))
    own = re.findall(r'"(--[a-z-]+)"', inspect.getsource(module))
    own += [*flags_of(module.Flags)] if hasattr(module, "Flags") else []
    return [*own, *of_a_run, "--help"]


def _module(program: str) -> str:
    return program.removesuffix(".py").replace("/", ".")


def read_scenes() -> dict[str, Scene]:
    """By name."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    rows: dict[str, dict[str, Any]] = tomllib.loads(Template(text).substitute(small_files.WORDS))
    return {
        name: Scene(name=name, **row | {"files": tuple(row.get("files", ()))})
        for name, row in rows.items()
    }


def make(scenes: Sequence[Scene], folders: Sequence[Path]) -> None:
    """Import what the scenes do, and fill a folder for each; what several need is made once."""
    for scene in scenes:
        importlib.import_module(_module(scene.program))
    made: dict[str, Path] = {}
    for scene, folder in zip(scenes, folders, strict=True):
        if scene.made not in made:
            folder.mkdir(parents=True)
            getattr(small_files, scene.made)(folder)
            made[scene.made] = folder
        else:
            shutil.copytree(made[scene.made], folder, symlinks=True)
