"""Milliseconds until names of `import megapipe` can be used, each in a fresh Python; asked: the
import in 60.

python tools/bench/start.py [--rounds 20]

Rounds take turns, so that a busy machine hits all alike. The least is of a quiet moment, the median
of this one.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from megapipe.flags.parse import parse, run  # noqa: E402

USES = {
    "import megapipe": "import megapipe",
    "a schedule and its picture": "import megapipe; megapipe.build('zb-h1', 4, 8)._repr_svg_()",
    "a comparison of all": "import megapipe; megapipe.compare(4, 8, effort=0.1)",
    "flags to a Config": "import megapipe; megapipe.parse(megapipe.Config, ['--num-layers', '4'])",
    "make_plan, with torch": "import megapipe; megapipe.make_plan",
}
TIMED = "from time import perf_counter as t; began = t(); {}; print((t() - began) * 1e3)"


def took(code: str) -> float:
    """Milliseconds of this code in a Python of its own, without Python's own start."""
    start = [sys.executable, "-c", TIMED.format(code)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(start, env=env, capture_output=True, text=True, check=True)
    return float(done.stdout)


@dataclass(frozen=True)
class Flags:
    """Milliseconds until names of `import megapipe` can be used, each in a fresh Python."""

    rounds: int = 20
    """Pythons for each use. They take turns."""


def main(argv: list[str]) -> None:
    rounds = parse(Flags, argv).rounds
    times = [[took(code) for code in USES.values()] for _ in range(rounds)]
    print("| | least ms | median ms |\n|---|---:|---:|")
    for name, column in zip(USES, zip(*times, strict=True), strict=True):
        print(f"| {name} | {min(column):.1f} | {statistics.median(column):.1f} |")


if __name__ == "__main__":
    run(main)
