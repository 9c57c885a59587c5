"""Compare runs of one training under several sets of flags: time, memory and losses.

    python -m tools.bench.flags --of-all='<flags of all>' \\
        --variants '1f1b=' 'zb-h1=--pipeline-schedule zb-h1'

The variants take turns, so that a busy machine slows all of them equally. Each run is a torchrun of
its own; the time of a step and its loss are those of --metrics-file. Memory is that of the process
with most, as Linux counts it, and the processor's time that of all ranks, imports included.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse, run

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Flags:
    """Compare runs of one training under several sets of flags."""

    of_all: str = ""
    """Flags of all runs."""
    variants: tuple[str, ...] = ()
    """NAME=FLAGS, the first is the base."""
    ranks: int | None = None
    """Processes of each run. Default: those of one replica of the model."""
    rounds: int = 3
    """Runs of each variant."""
    warm_up: int = 3
    """Steps of a run whose time is left out."""


@dataclass(frozen=True)
class Ran:
    """What a run measured.

    Attributes:
        ms: of each step after those to warm up.
        losses: of all steps.
        mib: the most that a process held.
        processor: seconds of all processes.
    """

    ms: Sequence[float]
    losses: Sequence[float]
    mib: float
    processor: float


def ran(flags: Flags, more: str) -> Ran:
    """Run a variant. Raises: SystemExit with its output if it fails."""
    words = shlex.split(f"{flags.of_all} {more}")
    ranks = flags.ranks or parse(Config, words).parallel.ranks_of_a_replica
    launch = f"-m torch.distributed.run --standalone --nproc-per-node {ranks}".split()
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with TemporaryDirectory() as folder:
        metrics = Path(folder, "metrics.jsonl")
        words += ["--metrics-file", str(metrics)]
        command = [sys.executable, *launch, str(ROOT / "pretrain_gpt.py"), *words]
        with Path(folder, "log").open("w+") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            log.seek(0)
            said = log.read()
        if status or not metrics.exists():
            raise SystemExit(f"{shlex.join(words)}\n{said[-4000:]}")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return Ran(
        [row["step_ms"] for row in rows[flags.warm_up :]],
        [row["losses"]["lm loss"] for row in rows],
        used.ru_maxrss / 1024,
        used.ru_utime + used.ru_stime,
    )


def cells(mine: Sequence[Ran], base: Sequence[Ran]) -> list[str]:
    """Return the numbers of a variant's runs, one for each round, next to those of the base."""
    times = [statistics.median(one.ms) for one in mine]
    ratios = [time / statistics.median(other.ms) for time, other in zip(times, base, strict=True)]
    first, *_, last = losses = mine[-1].losses
    apart = [abs(a / b - 1) for a, b in zip(losses, base[-1].losses, strict=True)]
    return [
        f"{statistics.median(times):.0f}",
        f"{min(times):.0f}",
        f"{statistics.median(ratios):.3f}",
        f"{min(one.processor for one in mine):.0f}",
        f"{min(one.mib for one in mine):.0f}",
        f"{first:.6f}",
        f"{last:.6f}",
        f"{max(apart):.2%}",
    ]


def main(argv: Sequence[str]) -> None:
    flags = parse(Flags, argv)
    variants = dict(text.partition("=")[::2] for text in flags.variants)
    if not variants:
        raise ConfigError(
            "--variants are missing: --variants 'base=' 'zb-h1=--pipeline-schedule zb-h1'"
        )
    rounds = [[ran(flags, more) for more in variants.values()] for _ in range(flags.rounds)]
    print(
        "| variant | ms a step, median | fastest round | of the first, paired | processor s "
        "| MiB | loss of step 1 | of the last | most beside the first |"
    )
    print("|---|" + "---:|" * 8)
    base, *_ = columns = list(zip(*rounds, strict=True))
    for name, column in zip(variants, columns, strict=True):
        print(f"| {name} | {' | '.join(cells(column, base))} |")


if __name__ == "__main__":
    run(main)
