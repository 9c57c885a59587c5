"""Days of training in fast motion: does anything grow? A tiny model with saves, evaluations,
retention and restarts.

    python tools/proofs/soak.py --steps 20000

Each restart is a new `pretrain` in the same process, so that what a run leaves behind is seen too.
Prints a table of memory, open files, threads and bytes on disk, and ends with 1 if the median of
one of them has grown between the second and the last quarter.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

# A fresh clone runs it before anything is installed.
sys.path.insert(0, str(Path(__file__).parents[2]))

from megapipe.config import Config
from megapipe.data.indexed import IndexedWriter
from megapipe.errors import ConfigError, UserError
from megapipe.flags.parse import parse, stop
from megapipe.models.provider import gpt_provider
from megapipe.training.forward_step import forward_step
from megapipe.training.hooks import Callback, Hooks
from megapipe.training.pretrain import pretrain
from megapipe.training.run import Run
from megapipe.training.steps.step import StepResult

FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --split 8,1,1 "
    "--tokenizer-type NullTokenizer --vocab-size 127 --micro-batch-size 1 --global-batch-size 1 "
    "--lr 1e-3 "
    "--num-workers 1 --eval-interval 100 --eval-iters 2 --save-interval 50 --save-keep-last 3 "
    "--log-interval 100 "
    "--save-remove-earlier "
    "--check-weight-hash-across-dp-replicas-interval 200 --check-for-spiky-loss"
)

NOISE_MIB = 2.0
"""What the allocator keeps or gives back differs so much from sample to sample."""


@dataclass(frozen=True)
class Options:
    """Length of the run."""

    steps: int = 20000
    """Of training in all."""
    restarts: int = 20
    """How often it begins again from its last checkpoint."""
    flags: str = ""
    """More flags of pretrain_gpt.py, in quotes."""


@dataclass
class Sampler(Callback):
    """Sample the memory and files of the process at regular steps."""

    folder: Path
    every: int
    rows: list[tuple[int, float, int, int, float]] = field(default_factory=list)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Note it down."""
        if run.progress.iteration % self.every == self.every // 2:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            disk = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
            held = (
                pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
                len(os.listdir("/proc/self/fd")),
                threading.active_count(),
            )
            self.rows.append((run.progress.iteration, *held, disk / 2**10))
            print(
                "{:9,}  {:10.1f}  {:5}  {:7}  {:8.0f}".format(*self.rows[-1]),
                file=sys.stderr,
                flush=True,
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 if nothing grows."""
    try:
        options = parse(Options, argv)
        if not 4 <= options.restarts <= options.steps:
            raise ConfigError(
                f"--restarts {options.restarts}: give at least 4, the second and the last quarter "
                "are compared, and no "
                f"more than --steps {options.steps}"
            )
        print("    steps  memory MiB  files  threads  disk KiB", file=sys.stderr)
        with (
            TemporaryDirectory() as name,
            open(os.devnull, "w") as nothing,
            redirect_stdout(nothing),
        ):
            with IndexedWriter(f"{name}/data", np.uint16) as writer:
                writer.add_documents(np.arange(100_000) % 127, np.full(1000, 100))
            each = options.steps // options.restarts
            sampler = Sampler(Path(name, "run"), each)
            length = f"--train-iters {options.steps} --exit-interval {each}"
            flags = f"{FLAGS} {length} {options.flags}".split()
            folders = [
                "--data-path",
                f"{name}/data",
                "--save",
                f"{name}/run",
                "--load",
                f"{name}/run",
            ]
            folders += ["--tensorboard-dir", f"{name}/board"]
            for _ in range(options.restarts):
                pretrain(
                    parse(Config, flags + folders),
                    gpt_provider,
                    forward_step,
                    hooks=Hooks(callbacks=(sampler,)),
                )
    except (UserError, KeyboardInterrupt) as error:
        stop(error)
    quarter = len(sampler.rows) // 4
    first, last = sampler.rows[quarter : 2 * quarter], sampler.rows[-quarter:]
    before, after = ([median(row[n] for row in rows) for n in (1, 2, 3)] for rows in (first, last))
    grown = after[0] > before[0] + NOISE_MIB or any(
        b > a for a, b in zip(before[1:], after[1:], strict=True)
    )
    changes = zip(("MiB", "open files", "threads"), before, after, strict=True)
    print(
        "grows:" if grown else "flat:",
        ", ".join(f"{a:.1f} to {b:.1f} {what}" for what, a, b in changes),
    )
    return int(grown)


if __name__ == "__main__":
    sys.exit(main())
