"""List every command: its name in a shell, its module, and how a reader can call it.

Nothing heavy is imported here: `megapipe --help` reads this file alone.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Door:
    """One command of megapipe, and how the shell and a clone call it.

    Attributes:
        module: the module below megapipe.commands whose function `main(argv)` runs the command, or
            MODULE:FUNCTION for a function with another name.
        about: the command's line of `megapipe --help`.
        script: the file in tools that runs the command in a clone that is not installed. None:
            `python -m megapipe NAME` runs the command.
    """

    module: str
    about: str
    script: str | None = None


DOORS = {
    "quickstart": Door(
        "start.quickstart", "from nothing to a trained GPT in minutes, without a download"
    ),
    "init": Door(
        "start.init", "a folder to start from: a model, a loss, a program, launch scripts"
    ),
    "schedules": Door(
        "schedules", "list, draw and compare pipeline schedules, or put all on a page", "schedules"
    ),
    "compare": Door(
        "compare",
        "train a small GPT under every schedule: loss, time, bubble, memory",
        "compare_runs",
    ),
    "plan": Door(
        "plan.main", "stages, time and memory of a run; --search: the best of all plans", "plan"
    ),
    "rehearse": Door(
        "plan.rehearse", "each rank of a run alone on this machine: its memory and time", "rehearse"
    ),
    "check": Door(
        "pretrain:check", "everything that a launch would refuse, and what becomes of each flag"
    ),
    "pretrain": Door("pretrain", "train; --nproc N starts N processes"),
    "preprocess": Door(
        "preprocess", "text to token files, Megatron's .bin and .idx", "preprocess_data"
    ),
    "tokenizer": Door("tokenizer", "train a SentencePiece tokenizer on text", "train_tokenizer"),
    "convert": Door(
        "convert", "Hugging Face and Megatron-LM checkpoints to ours and back", "convert_checkpoint"
    ),
    "generate": Door("generate", "continue a text with a checkpoint", "generate_text"),
    "traces": Door(
        "traces", "the profiles of all ranks in one file, next to the prediction", "merge_traces"
    ),
    "gpu-check": Door("gpu.main", "does everything work on this machine's GPU", "gpu_check"),
    "chaos": Door(
        "chaos.main", "break a run at random, let it heal, compare its weights to the bit", "chaos"
    ),
    "completion": Door(
        "start.completion", "a script that completes commands and flags in bash or zsh"
    ),
}
"""Doors by name, in the order of the help."""

ROOT = Path(__file__).resolve().parents[1]
"""The folder of a clone, or the folder where the package was installed."""
# `--nproc N` belongs to the match: without the command, torchrun takes it as a flag of its own.
_NAMED = re.compile(rf"\bmegapipe ({'|'.join(DOORS)})\b( --nproc (\S+))?")


def as_called(text: str) -> str:
    """Return a text in which each command is written as this installation runs it.

    text: has commands such as `megapipe plan`. In a clone that is not installed this becomes
        `python tools/plan.py`.
    """
    # Whoever has called `megapipe` has it, in a clone too.
    if Path(sys.argv[0]).name.startswith("megapipe") or not in_clone():
        return text
    return _NAMED.sub(lambda found: _script_of(found[1], found[3]), text)


def in_clone() -> bool:
    """Return whether the package lies in a clone, with tools and scripts next to it."""
    # Two files, as another project's folder may have one of them.
    return (ROOT / "tools" / "rehearse.py").is_file() and (ROOT / "pretrain_gpt.py").is_file()


def _script_of(name: str, processes: str | None) -> str:
    """Return the command line by which a clone runs the command `name`.

    processes: the number of ranks to launch, the value of --nproc; None to launch none.
    """
    if name == "pretrain":
        if processes:
            return f"torchrun --nproc-per-node {processes} pretrain_gpt.py"
        return "python pretrain_gpt.py"
    script = DOORS[name].script
    return f"python tools/{script}.py" if script else f"python -m megapipe {name}"


def version() -> str:
    """Return the version of the installed package; "of a clone" where nothing was installed."""
    # Imported here: it takes an eighth of the start of `megapipe schedules show`.
    from importlib import metadata

    try:
        return metadata.version("megapipe")
    except metadata.PackageNotFoundError:
        return "of a clone"
