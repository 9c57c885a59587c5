"""A folder to start from: a model, a loss and a program of your own, and scripts that launch them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from megapipe.data.files import folder_problems
from megapipe.errors import ConfigError
from megapipe.flags.stop import say

FILES = Path(__file__).parent / "files"
_ABOUT = """usage: megapipe init FOLDER

Writes a folder to start from: model.py (a model of your own), forward_step.py (its batch and loss), pretrain_gpt.py
(the program), pretrain.sh (a launch on this machine), scripts (launches under Slurm and Kubernetes), README.md."""
_OURS, _YOURS = "from megapipe.training.forward_step import", "from forward_step import"


def main(argv: Sequence[str]) -> None:
    """Write the folder."""
    if {"--help", "-h"} & {*argv}:
        say(_ABOUT)
        return
    if len(argv) != 1 or not argv[0] or argv[0].startswith("-"):
        raise ConfigError(f"init takes the folder to write, such as megapipe init my; got {' '.join(argv) or 'none'}")
    if problems := list(folder_problems({"init": argv[0]})):
        raise ConfigError(problems)
    folder = Path(argv[0])
    names = sorted(
        str(path.relative_to(FILES)) for path in FILES.rglob("*") if path.is_file() and path.suffix != ".pyc"
    )
    if there := [name for name in names if (folder / name).exists()]:
        raise ConfigError(f"{folder} has {', '.join(there)} already. Name a new folder.")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(FILES / name, folder / name)
    program = folder / "pretrain_gpt.py"
    program.write_text(program.read_text().replace(_OURS, _YOURS))
    say(f"Wrote {folder}: {', '.join(names)}\nNext: cd {folder} && bash pretrain.sh")
