"""Time the steps of one training under several sets of flags.

The sets take turns, so that a busy machine slows all of them equally.

python tools/bench/flags.py --ranks 2 --variant '1f1b=' --variant 'zb-h1=--pipeline-schedule zb-h1'
-- <flags of all>

Each run is a torchrun of its own; the time of a step is the log line's.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEP = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+).*? lm loss: ([\dE.+-]+)")


def steps_of(flags: list[str], ranks: int) -> list[tuple[float, float]]:
    """(ms, loss) of each step of a run. Raises: SystemExit with its output if it fails."""
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = [*start, str(ROOT / "pretrain_gpt.py"), *flags, "--log-interval", "1"]
    done = subprocess.run(run, env=env, capture_output=True, text=True, check=False)
    found = [(float(ms), float(loss)) for ms, loss in STEP.findall(done.stdout)]
    if done.returncode or not found:
        raise SystemExit(f"{' '.join(flags)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes of each run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each variant")
    parser.add_argument("--warm-up", type=int, default=3, help="steps of a run that are left out")
    parser.add_argument(
        "--variant",
        action="append",
        required=True,
        metavar="NAME=FLAGS",
        help="the first is the base",
    )
    parser.add_argument("flags", nargs="+", help="of all runs, behind --")
    args = parser.parse_args()
    variants = dict(text.split("=", 1) for text in args.variant)
    rounds = [
        [
            steps_of([*args.flags, *more.split()], args.ranks)[args.warm_up :]
            for more in variants.values()
        ]
        for _ in range(args.rounds)
    ]
    print(
        "| variant | ms a step, median | fastest round | of the first, paired | last loss "
        "|\n|---|---:|---:|---:|---:|"
    )
    for i, name in enumerate(variants):
        times = [statistics.median(ms for ms, _ in turn[i]) for turn in rounds]
        ratio = statistics.median(
            statistics.median(ms for ms, _ in turn[i]) / statistics.median(ms for ms, _ in turn[0])
            for turn in rounds
        )
        loss = rounds[-1][i][-1][1]
        print(
            f"| {name} | {statistics.median(times):.0f} | {min(times):.0f} | {ratio:.3f} | "
            f"{loss:.6E} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
