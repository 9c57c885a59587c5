"""Lose ranks, go on without them, and grow again, without disk.

    python -m tools.proofs.nodisk.elastic --layouts dp4,dp4zero,dp4pp2
    python -m tools.proofs.nodisk.elastic --layouts dp2pp2,dp2pp4 --schedule zb-h1
    python -m tools.proofs.nodisk.elastic --layouts dp2pp2,dp2pp4 --torchrun

Either a whole data-parallel replica is lost, as in dp 4 -> 3 -> 4, or one rank, whose passes its
peers run. Losses are compared with those of a run that nobody disturbs, and the samples of each
step with its samples, in their order. With two replicas and one lost rank all numbers, and the
weights at the end, must be equal to the bit. With --torchrun two agents of torchrun start the
ranks, as on two hosts. The second agent is killed with its ranks, and comes back.
"""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from megapipe.commands.chaos.broken_run import difference
from megapipe.data.indexed import IndexedWriter
from megapipe.flags.parse import parse
from tools.proofs.nodisk.__main__ import FLAGS, MEMORY, Launcher
from tools.proofs.nodisk.hosts import Hosts
from tools.proofs.nodisk.rank import Death

# A replica's ranks are neighbours, as on a machine.
_REPLICA = "--use-tp-pp-dp-mapping --pipeline-model-parallel-size 2 --num-layers 4"
_PP2 = "--pipeline-model-parallel-size 2 --num-layers 4"


class Layout(NamedTuple):
    """Ranks of a run, and how many of them are lost.

    Attributes:
        ranks: number of ranks.
        lost: number of ranks that are lost together: neighbours.
        flags: the flags.
        near: the largest relative difference of a loss; 0 compares norms and weights, too.
    """

    ranks: int
    lost: int
    flags: str
    near: float = 1e-6


LAYOUTS = {
    "dp4": Layout(4, 1, "--num-layers 2"),
    "dp4zero": Layout(4, 1, "--num-layers 2 --use-distributed-optimizer"),
    "dp4pp2": Layout(8, 2, f"{_REPLICA} --replication-jump 2 --use-distributed-optimizer"),
    "dp4pp2plain": Layout(8, 2, _REPLICA),
    "dp4zero3": Layout(
        4,
        1,
        "--num-layers 2 --use-distributed-optimizer --ckpt-format torch_dist "
        "--data-parallel-sharding-strategy optim_grads_params --use-megatron-fsdp",
    ),
    # One rank of a pipeline: its peers run its passes.
    "dp2pp2": Layout(4, 1, _PP2, near=0),
    # Small gradients underflow, so a peer has to multiply losses as a whole run does.
    "dp2pp2fp16": Layout(4, 1, f"{_PP2} --fp16 --initial-loss-scale 1024", near=0),
    "dp2pp4": Layout(8, 1, "--pipeline-model-parallel-size 4 --num-layers 8", near=0),
    "dp3pp2": Layout(6, 1, _PP2),
}


@dataclass(frozen=True)
class Options:
    """Shrink and grow runs in memory, and compare them with undisturbed ones."""

    layouts: str = "dp4,dp4zero,dp4pp2"
    """Layouts, separated by commas: names of LAYOUTS."""
    steps: int = 24
    """Steps of a run. With --torchrun it has as many as it takes, a third of these before the loss
    and a third after the return."""
    schedule: str = "1f1b"
    """The schedule."""
    seed: int = 1
    """Seed of the draws."""
    kills: int = 0
    """Kills within the return to fewer ranks, and within the return to all."""
    torchrun: bool = False
    """Start the ranks by torchrun, as on two hosts."""


def proved(options: Options, layout: str, data: Path, root: Path) -> str:
    """Shrink and grow a run, compare it with an undisturbed one, and return a line on it.

    Raises: SystemExit for a difference.
    """
    draw = random.Random(f"{options.seed} {layout}")
    ranks, together, more, near = LAYOUTS[layout]
    flags = (
        f"{FLAGS} {more} --global-batch-size 12 --pipeline-schedule {options.schedule} "
        f"--data-path {data} --log-interval 1 "
        # Both run with copies, so that both have one table.
        f"{MEMORY} --elastic --train-iters {10_000 if options.torchrun else options.steps}"
    )

    def launcher(name: str, last: int) -> Launcher:
        folder = root / name
        (folder / "asks").mkdir(parents=True)
        saves = f"--save {folder}/save --save-interval 10000 --exit-interval {last}"
        return Launcher(f"{flags} {saves} --trigger-path {folder}/asks".split(), folder, ranks)

    if options.torchrun:
        broken = launcher("broken", 10_000)
        sizes = _hosts(broken, ranks, together, draw, options)
    else:
        broken = launcher("broken", options.steps)
        sizes = _deaths(broken, ranks, together, draw, options)
    rows = [row for row in broken.rows() if "step" in row]
    end = rows[-1]["step"]
    plain = launcher("plain", end)
    if not plain.attempt(None):
        raise SystemExit(f"the undisturbed run failed, see {plain.folder}")

    expected = {row["step"]: row for row in plain.rows() if "step" in row}
    far = 0.0
    for row in rows:
        for name, value in row["losses"].items():
            other = float.fromhex(expected[row["step"]]["losses"][name])
            far = max(far, abs(float.fromhex(value) / other - 1))
    last = f"save/iter_{end:07d}"
    tensors, differing = difference(plain.folder / last, broken.folder / last)
    exact = all(row == expected[row["step"]] for row in rows) and not differing
    samples, others = plain.samples(), broken.samples()
    differ = [step for step in samples if others[step] != samples[step]]
    back = [x for x in broken.said() if " are back " in x]
    text = (
        f"{layout:11} {options.schedule}: ranks {' -> '.join(map(str, sizes))}, {len(back)} "
        f"returns in memory; {len(rows)} losses, at most {far:.1e} apart; samples of "
        f"{len(samples)} steps, {len(differ)} differ; {tensors} tensors, {len(differing)} differ"
    )
    own = str(broken.folder / last)
    reads = [x for x in broken.rows() if not str(x.get("read", own)).startswith(own)]
    # Of each of the two new sizes, one return was not cut off.
    short = len(back) != 2 or {row["step"] for row in rows} != expected.keys()
    if far > near or (near == 0 and not exact) or differ or reads or short:
        raise SystemExit(f"{text}\n{reads[:3]} {differ[:3]} {broken.said()}")
    return text


def _deaths(
    broken: Launcher, ranks: int, together: int, draw: random.Random, options: Options
) -> list[int]:
    """Train with deaths of ranks, and return the number of ranks of each start.

    Args:
        broken: the launcher of the run.
        ranks: number of ranks.
        together: number of ranks that are lost together.
        draw: draws the deaths.
        options: the options of the proof.
    Raises: SystemExit if a rank ends by itself.
    """
    whole = range(ranks)
    gone = draw.randrange(ranks // together)
    fewer = [n for n in whole if n // together != gone]
    lost = draw.choice([n for n in whole if n not in fewer])
    sizes = []

    def attempt(places: Sequence[int], death: Death | None) -> bool:
        sizes.append(len(places))
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
    return sizes


def _hosts(
    broken: Launcher, ranks: int, together: int, draw: random.Random, options: Options
) -> list[int]:
    """Train on two hosts, of which one is lost and comes back; return the numbers of ranks.

    Args:
        broken: the run: its flags and its folder.
        ranks: number of ranks.
        together: number of ranks of the host that is lost.
        draw: draws the moment of the loss, and the host that starts first.
        options: the options of the proof.
    Raises: SystemExit if a host ends by itself, or hangs.
    """
    third = options.steps // 3
    fewer = ranks - together
    with Hosts(broken, (fewer, together)) as hosts:
        # The agents' process ids decide which of them has the first ranks.
        for host in draw.sample(range(2), 2):
            hosts.start(host)
        hosts.train(third)
        time.sleep(draw.random())
        hosts.kill(1)
        hosts.returned(ranks, fewer)
        hosts.train(third)
        hosts.start(1)
        hosts.returned(fewer, ranks)
        hosts.train(third)
        (broken.folder / "asks" / "exit").touch()
        hosts.end()
    return [ranks, fewer, ranks]


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
