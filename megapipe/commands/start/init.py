"""Write a folder to start from: a model, a loss, a program, and scripts that launch it."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from megapipe.data.files import folder_problems
from megapipe.errors import ConfigError
from megapipe.flags.stop import say

FILES = Path(__file__).parent / "files"
_ABOUT = """usage: megapipe init FOLDER

Writes a folder to start from:
  model.py         a model to change
  forward_step.py  its batch and its loss
  pretrain_gpt.py  the program that every rank runs
  pretrain.sh      a launch on this machine
  scripts          launches under Slurm and Kubernetes
  README.md        first steps"""
_IMPORT = "from megapipe.training.forward_step import"
_LOCAL_IMPORT = "from forward_step import"


def main(argv: Sequence[str]) -> None:
    """Write a program for the user to change into the folder in `argv`. Overwrite no file."""
    if {"--help", "-h"} & {*argv}:
        say(_ABOUT)
        return
    if len(argv) != 1 or not argv[0] or argv[0].startswith("-"):
        raise ConfigError(
            f"init takes the folder to write, got {' '.join(argv) or 'none'}. "
            "An example: megapipe init my"
        )
    if problems := list(folder_problems({"init": argv[0]})):
        raise ConfigError(problems)
    folder = Path(argv[0])
    # Python leaves compiled files next to a file that was imported.
    names = sorted(
        str(path.relative_to(FILES))
        for path in FILES.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    )
    if there := [name for name in names if (folder / name).exists()]:
        other = shlex.quote(f"{folder}-2")
        raise ConfigError(
            f"{folder} already has {', '.join(there)}. Name a new folder: megapipe init {other}"
        )
    # In a clone these files are links, and the files that they lead to are copied.
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(FILES / name, folder / name)
    # The program has to use the copy of forward_step.py next to it, which the user may change.
    program = folder / "pretrain_gpt.py"
    program.write_text(program.read_text().replace(_IMPORT, _LOCAL_IMPORT))
    say(f"Wrote {folder}: {', '.join(names)}\nNext: cd {folder} && bash pretrain.sh")
