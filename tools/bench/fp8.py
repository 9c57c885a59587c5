"""Compare the losses of a small model in FP8, by each recipe, with losses in bf16 and in float32.

python tools/bench/fp8.py --steps 50

The same weights and batches; the last column is the largest difference of a step's loss, as a part
of that in bf16.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megapipe.flags.parse import parse, run

_MODEL = """--num-layers 4 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 256 --swiglu
--normalization RMSNorm --position-embedding-type rope --max-position-embeddings 128
--disable-bias-linear
--attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights"""
_RUN = """--seq-length 128 --micro-batch-size 4 --global-batch-size 8 --lr-decay-style constant
--mock-data --tokenizer-type NullTokenizer --vocab-size 255
--eval-iters 0 --log-interval 1 --num-workers 0"""


@dataclass(frozen=True)
class Flags:
    """Flags of this tool."""

    steps: int = 50
    """Steps of each run."""
    lr: float = 3e-4
    """Learning rate."""
    format: tuple[str, ...] = ("e4m3", "hybrid")
    """e4m3, hybrid."""
    recipe: tuple[str, ...] = ("tensorwise", "delayed", "blockwise", "mxfp8")
    """tensorwise, delayed, blockwise, mxfp8."""


def main(argv: Sequence[str]) -> None:
    flags = parse(Flags, argv)
    usual = losses(flags, "--bf16")
    print(f"{'':20s} loss of step 1  of step {flags.steps}  most beside bf16")
    show("bf16", usual, usual)
    show("float32", losses(flags, ""), usual)
    for form in flags.format:
        for recipe in flags.recipe:
            show(
                f"{form} {recipe}",
                losses(flags, f"--bf16 --fp8-format {form} --fp8-recipe {recipe}"),
                usual,
            )


def show(name: str, found: Sequence[float], usual: Sequence[float]) -> None:
    most = max(abs(a - b) / b for a, b in zip(found, usual, strict=True))
    print(f"{name:20s} {found[0]:14.4f} {found[-1]:11.4f} {most:17.2%}", flush=True)


def losses(flags: Flags, precision: str) -> list[float]:
    """Return the losses of a run with these flags, step by step."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "metrics.jsonl")
        command = [
            sys.executable,
            "-m",
            "megapipe",
            "pretrain",
            *_MODEL.split(),
            *_RUN.split(),
            *precision.split(),
        ]
        command += [
            "--lr",
            str(flags.lr),
            "--train-iters",
            str(flags.steps),
            "--metrics-file",
            str(metrics),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        rows = map(json.loads, metrics.read_text().splitlines())
        return [row["losses"]["lm loss"] for row in rows]


if __name__ == "__main__":
    run(main)
