"""Lose a data-parallel replica, go on without it, and grow again: dp 4 -> 3 -> 4, without disk.

    python -m tools.proofs.nodisk.elastic --layouts dp4,dp4zero,dp4pp2

The losses are compared with those of a run of dp 4 that nobody disturbs, and the samples of each
step with its samples, in their order.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from megapipe.data.indexed import IndexedWriter
from megapipe.flags.parse import parse
from tools.proofs.nodisk.__main__ import FLAGS, MEMORY, Launcher
from tools.proofs.nodisk.rank import Death

# A replica's ranks are neighbours, as on a machine.
_REPLICA = "--use-tp-pp-dp-mapping --pipeline-model-parallel-size 2 --num-layers 4"
LAYOUTS = {
    "dp4": (1, "--num-layers 2"),
    "dp4zero": (1, "--num-layers 2 --use-distributed-optimizer"),
    "dp4pp2": (2, f"{_REPLICA} --replication-jump 2 --use-distributed-optimizer"),
    "dp4pp2plain": (2, f"{_REPLICA}"),
    "dp4zero3": (
        1,
        "--num-layers 2 --use-distributed-optimizer --ckpt-format torch_dist "
        "--data-parallel-sharding-strategy optim_grads_params --use-megatron-fsdp",
    ),
}
NEAR = 1e-6
"""The largest relative difference of a loss."""


@dataclass(frozen=True)
class Options:
    """Shrink and grow runs in memory, and compare them with undisturbed ones."""

    layouts: str = "dp4,dp4zero,dp4pp2"
    """Layouts, separated by commas: names of LAYOUTS."""
    steps: int = 24
    """Steps of a run."""
    schedule: str = "1f1b"
    """The schedule."""
    seed: int = 1
    """Seed of the draws."""
    kills: int = 0
    """Kills within the return to fewer ranks, and within the return to all."""


def proved(options: Options, layout: str, data: Path, root: Path) -> str:
    """Shrink and grow a run, compare it with an undisturbed one, and return a line on it.

    Raises: SystemExit for a difference.
    """
    draw = random.Random(f"{options.seed} {layout}")
    each, more = LAYOUTS[layout]
    flags = (
        f"{FLAGS} {more} --global-batch-size 12 --pipeline-schedule {options.schedule} "
        f"--train-iters {options.steps} --data-path {data}"
    ).split()
    # Both run with copies, so that both have one table.
    flags += [*MEMORY.split(), "--elastic"]
    whole = range(4 * each)
    plain, broken = (Launcher(flags, root / name, len(whole)) for name in ("plain", "broken"))
    for launcher in (plain, broken):
        launcher.folder.mkdir()
    if not plain.attempt(None):
        raise SystemExit(f"the undisturbed run failed, see {plain.folder}")
    gone = draw.randrange(4)
    fewer = [n for n in whole if n // each != gone]
    lost = draw.choice([n for n in whole if n not in fewer])
    sizes = []

    def attempt(places: Sequence[int], death: Death | None) -> bool:
        sizes.append(len(places) // each)
        return broken.attempt(death, places)

    third = options.steps // 3
    attempt(whole, Death(lost, "pass", third, draw.randrange(4)))
    for n in whole:
        if n not in fewer:
            broken.forget(n)
    for _ in range(options.kills):
        attempt(fewer, Death(draw.randrange(len(fewer)), "return", 0, draw.randrange(2)))
    attempt(fewer, Death(draw.randrange(len(fewer)), "pass", third, draw.randrange(4)))
    for _ in range(options.kills):
        attempt(whole, Death(draw.randrange(len(whole)), "return", 0, draw.randrange(2)))
    if not attempt(whole, None):
        raise SystemExit(f"the disturbed run failed, see {broken.folder}")

    expected = {row["step"]: row for row in plain.rows() if "step" in row}
    rows = [row for row in broken.rows() if "step" in row]
    far = 0.0
    for row in rows:
        for name, value in row["losses"].items():
            other = float.fromhex(expected[row["step"]]["losses"][name])
            far = max(far, abs(float.fromhex(value) / other - 1))
    samples, others = plain.samples(), broken.samples()
    differ = [step for step in samples if others[step] != samples[step]]
    back = [x for x in broken.said() if " are back " in x]
    text = (
        f"{layout:11} {options.schedule}: replicas {' -> '.join(map(str, sizes))}, {len(back)} "
        f"returns in memory; {len(rows)} losses, at most {far:.1e} apart; samples of "
        f"{len(samples)} steps, {len(differ)} differ"
    )
    reads = [row for row in broken.rows() if "read" in row]
    # Of each of the two new sizes, one return was not cut off.
    short = len(back) != 2 or {row["step"] for row in rows} != expected.keys()
    if far > NEAR or differ or reads or short:
        raise SystemExit(f"{text}\n{reads[:3]} {differ[:3]} {broken.said()}")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 if all samples are the same, and all losses near."""
    options = parse(Options, sys.argv[1:] if argv is None else argv)
    with TemporaryDirectory() as name:
        data = Path(name, "data")
        with IndexedWriter(str(data), np.uint16) as writer:
            writer.add_documents(np.arange(20_000) % 127, np.full(200, 100))
        for layout in options.layouts.split(","):
            root = Path(name, layout)
            root.mkdir()
            try:
                print(proved(options, layout, data, root), flush=True)
            except SystemExit:
                shutil.copytree(root, Path("runs", "elastic-failed"), dirs_exist_ok=True)
                raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
