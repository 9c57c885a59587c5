"""Kill drawn ranks at drawn passes: all losses and the weights at the end are an undisturbed run's.

    python -m tools.proofs.nodisk --kills 20 --layouts dp2pp4,dp4pp2 --schedules 1f1b,zb-h1
    python -m tools.proofs.nodisk --kills 6 --after 20 --steps 160 --layouts dp4pp2,ep2,tp2

A launcher forks the ranks of a world, kills them all when one is lost, as torchrun does, and starts
them again. Memory of a machine is lost by removing its folder in /dev/shm.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from megapipe.checkpoint.memory.slots import SHARED
from megapipe.commands.chaos.broken_run import difference
from megapipe.data.indexed import IndexedWriter
from megapipe.flags.parse import parse
from tools.proofs.nodisk.rank import PLACES, Death, run

FLAGS = (
    "--hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--split 1,0,0 --tokenizer-type NullTokenizer --vocab-size 127 --micro-batch-size 1 "
    "--global-batch-size 8 --num-workers 0 --lr 1e-3 --eval-iters 0 --log-interval 1000 "
    "--distributed-timeout-minutes 2"
)
LAYOUTS = {
    "dp2pp4": "--pipeline-model-parallel-size 4 --num-layers 8",
    "dp4pp2": "--pipeline-model-parallel-size 2 --num-layers 4",
    "zero": "--pipeline-model-parallel-size 4 --num-layers 8 --use-distributed-optimizer",
    "ep2": "--pipeline-model-parallel-size 2 --num-layers 4 --num-experts 4 "
    "--expert-model-parallel-size 2 --moe-router-topk 2 --moe-router-enable-expert-bias "
    "--moe-router-score-function sigmoid --moe-router-load-balancing-type none",
    "ep4": "--pipeline-model-parallel-size 2 --num-layers 4 --num-experts 4 "
    "--expert-model-parallel-size 4 --moe-router-topk 2",
    "pp2": "--pipeline-model-parallel-size 2 --num-layers 2",
    "tp2": "--pipeline-model-parallel-size 4 --num-layers 8 --tensor-model-parallel-size 2",
    "bf16": "--pipeline-model-parallel-size 4 --num-layers 8 --use-distributed-optimizer --bf16",
    # For four ranks.
    "pp2zero": "--pipeline-model-parallel-size 2 --num-layers 4 --use-distributed-optimizer",
    "pp2tp2": "--pipeline-model-parallel-size 2 --num-layers 4 --tensor-model-parallel-size 2",
    "pp2ep2": "--pipeline-model-parallel-size 2 --num-layers 4 --num-experts 4 "
    "--expert-model-parallel-size 2 --moe-router-topk 2 --moe-router-enable-expert-bias "
    "--moe-router-score-function sigmoid --moe-router-load-balancing-type none",
    "pp2bf16": "--pipeline-model-parallel-size 2 --num-layers 4 --use-distributed-optimizer --bf16",
}
MEMORY = "--non-persistent-ckpt-type local --non-persistent-save-interval 1 --replication"
_HANGS_S = 3000.0


@dataclass(frozen=True)
class Options:
    """Kill drawn ranks, and compare the run with an undisturbed one to the bit."""

    kills: int = 8
    """Kills in each run."""
    world: int = 8
    """Number of ranks. Rank n keeps the state of rank n + half of them, and the other way round."""
    layouts: str = "dp2pp4,dp4pp2,zero,ep2,ep4,tp2,bf16"
    """Layouts, separated by commas: names of LAYOUTS."""
    schedules: str = "1f1b,zb-h1"
    """Schedules, separated by commas. "+" at the end: with post-validation."""
    steps: int = 40
    """Steps of a run."""
    every: int = 1000
    """Steps between two saves to disk, besides the one at the end."""
    after: int = 0
    """Least number of steps that are trained after a kill, before the next one."""
    seed: int = 1
    """Seed of all draws."""
    nodes: float = 0.5
    """How often the memory of the killed rank is lost with it."""
    pairs: float = 0.0
    """How often the memory of its buddy is lost too."""
    places: str = ",".join(PLACES[:3])
    """Where a rank is killed, separated by commas."""
    shuffle: float = 0.0
    """How often ranks get other numbers when they start again."""
    results: str = ""
    """File that each line of the proof is added to. Lines that it has are not proved again."""
    flags: str = ""
    """More flags."""


class Launcher:
    """Starts the ranks of a run again and again, until it has ended.

    Attributes:
        lines: of the logs, that tell of states in memory.
    """

    def __init__(self, flags: Sequence[str], folder: Path, world: int) -> None:
        self.flags = flags
        self.places = range(world)
        self.folder = folder
        self.attempts = 0

    def attempt(self, death: Death | None, places: Sequence[int] | None = None) -> bool:
        """Start all ranks, and wait for their end; return whether all have ended well.

        Args:
            death: which rank is killed, and when.
            places: for each rank, the number of the memory that it has; by default its own.
        Raises: SystemExit if a rank has ended that nobody has killed, and if the run hangs.
        """
        places = self.places if places is None else places
        world = len(places)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        env = {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_MAX_RESTARTS": "1000",
            "TORCHELASTIC_RESTART_COUNT": str(self.attempts),
        }
        log = self.folder / f"log-{self.attempts:03d}"
        self.attempts += 1
        ranks = {}
        for rank, place in enumerate(places):
            own = env | {"RANK": str(rank), "LOCAL_RANK": str(place)}
            pid = os.fork()
            if not pid:
                # Whatever happens, a rank must not go on as a launcher.
                code = 70
                try:
                    code = run(self.flags, own, log, self.folder / "numbers", death)
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            ranks[pid] = rank
        good = True
        until = time.monotonic() + _HANGS_S
        while ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in ranks:
                rank = ranks.pop(pid)
                if status and good:
                    good = False
                    # Others may end by the loss of the killed one, and be seen first.
                    died = death is not None and (rank == death.rank or _died(ranks, death.rank))
                    for other in ranks:
                        os.kill(other, signal.SIGKILL)
                    if not died:
                        text = log.read_text()[-2000:]
                        raise SystemExit(f"rank {rank} has ended by itself: {log}\n{text}")
            elif time.monotonic() > until:
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
                raise SystemExit(f"hangs, see {log}: {death}")
            else:
                time.sleep(0.01)
        return good

    def forget(self, place: int) -> None:
        """Lose a memory, as with its machine."""
        for base in SHARED.glob(f"megapipe-{os.getuid()}-{os.getpid()}-*"):
            shutil.rmtree(base / str(place), ignore_errors=True)

    def said(self) -> list[str]:
        """Return the lines on states in memory of all attempts."""
        found = []
        for path in sorted(self.folder.glob("log-*")):
            found += [x for x in path.read_text().splitlines() if x.startswith("in memory: ")]
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of all attempts: numbers of steps, and files that were read."""
        path = self.folder / "numbers"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def samples(self) -> dict[int, set[tuple[int, ...]]]:
        """Return, by samples before a step, the checksums of its samples in order.

        A step that was trained again has one such tuple too, unless it had other samples.
        """
        parts: dict[tuple[int, int], dict[int, list[int]]] = {}
        found: dict[int, set[tuple[int, ...]]] = {}
        for row in self.rows():
            if "samples" not in row:
                continue
            of = parts.setdefault((row["before"], row["dp"]), {})
            of[row["replica"]] = row["samples"]
            # Microbatch n of replica r is number n x dp + r.
            if len(of) == row["dp"]:
                ordered = zip(*(of[replica] for replica in sorted(of)), strict=True)
                found.setdefault(row["before"], set()).add(tuple(x for xs in ordered for x in xs))
        return found


def _died(ranks: dict[int, int], rank: int) -> bool:
    """Return whether a rank ends within a second, and reap it.

    Args:
        ranks: process ids -> living ranks. The rank is taken out.
    """
    pid = next((pid for pid, one in ranks.items() if one == rank), None)
    until = time.monotonic() + 1
    while pid is not None and time.monotonic() < until:
        if os.waitpid(pid, os.WNOHANG)[0]:
            del ranks[pid]
            return True
        time.sleep(0.01)
    return False


def proved(options: Options, layout: str, schedule: str, data: Path, root: Path) -> str:
    """Train undisturbed and disturbed, compare, and return a line on it.

    All schedules have the same numbers to the bit. So one undisturbed run of a layout, under the
    first of the schedules, is enough for all.

    Raises: SystemExit for a difference.
    """
    draw = random.Random(f"{options.seed} {layout} {schedule}")
    launchers = []
    for of, more in ((options.schedules.split(",")[0], ""), (schedule, MEMORY)):
        name = of.removesuffix("+")
        late = " --enable-optimizer-post-validation" if of != name else ""
        folder = root / (f"{layout}-{schedule}" if more else f"{layout}-undisturbed")
        flags = (
            f"{FLAGS} {LAYOUTS[layout]} --pipeline-schedule {name}{late} {more} {options.flags} "
            f"--train-iters {options.steps} --save-interval {options.every} --data-path {data} "
            f"--save {folder}/save --load {folder}/save"
        )
        launchers.append(Launcher(flags.split(), folder, options.world))
    plain, broken = launchers
    broken.folder.mkdir()
    if not plain.folder.exists():
        plain.folder.mkdir()
        if not plain.attempt(None):
            raise SystemExit(f"the undisturbed run failed, see {plain.folder}")
    kills = gone = 0
    places = list(range(options.world))
    began = time.monotonic()
    for _ in range(options.kills):
        place = draw.choice(options.places.split(","))
        count = draw.randrange({"pass": 30, "copy": 2, "seal": 2}.get(place, 1))
        step = draw.randrange(4)
        if kills:
            step += options.after
        death = Death(draw.randrange(options.world), place, step, count)
        if broken.attempt(death, places):
            text = "the run ended before"
            print(f"{layout:7} {schedule:8} {text} {death}", flush=True)
            break
        kills += 1
        if draw.random() < options.nodes:
            broken.forget(places[death.rank])
            gone += 1
            if draw.random() < options.pairs:
                broken.forget(places[(death.rank + options.world // 2) % options.world])
        if draw.random() < options.shuffle:
            draw.shuffle(places)
    else:
        if not broken.attempt(None, places):
            raise SystemExit(f"the disturbed run failed, see {broken.folder}")
    took = (time.monotonic() - began) / max(kills, 1)
    left = list(SHARED.glob(f"megapipe-{os.getuid()}-{os.getpid()}-*"))
    expected = {row["step"]: row for row in plain.rows() if "step" in row}
    rows = [row for row in broken.rows() if "step" in row]
    wrong = [row for row in rows if expected[row["step"]] != row]
    reads = {str(row["read"]) for row in broken.rows() if "read" in row}
    last = f"save/iter_{options.steps:07d}"
    tensors, differing = difference(plain.folder / last, broken.folder / last)
    # The recipe of its table has P.
    states = [json.loads((x.folder / last / "state.json").read_text())["state"] for x in launchers]
    if {**states[0], "recipe": ""} == {**states[1], "recipe": ""}:
        differing = [x for x in differing if x != "state.json"]
    lost = [int(x.partition(", ")[2].split()[0]) for x in broken.said() if " are back " in x]
    text = (
        f"{layout:7} {schedule:8} {kills:3} kills, {gone:3} with their memory: {len(lost):3} "
        f"returns, {max(lost, default=0)} step(s) lost at most; {len(rows)} losses and norms, "
        f"{len(wrong)} differ; {tensors} tensors, {len(differing)} differ; {took:.1f} s a kill"
    )
    disk = sum("on disk" in x for x in broken.said())
    text += f"; {disk} times from disk"
    read = [x for x in reads if not x.startswith(str(broken.folder / last))]
    if wrong or differing or left or max(lost, default=0) > 1 or (read and not options.pairs):
        raise SystemExit(f"{text}\n{wrong[:2]} {differing[:3]} {left} {read[:3]}")
    shutil.rmtree(broken.folder / "save")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 if nothing differs by a bit."""
    options = parse(Options, sys.argv[1:] if argv is None else argv)
    done = set()
    if options.results and Path(options.results).exists():
        done = {json.loads(line)[0] for line in Path(options.results).read_text().splitlines()}
    with TemporaryDirectory() as name:
        root = Path(name)
        data = root / "data"
        with IndexedWriter(str(data), np.uint16) as writer:
            writer.add_documents(np.arange(20_000) % 127, np.full(200, 100))
        try:
            for layout in options.layouts.split(","):
                for schedule in options.schedules.split(","):
                    key = f"{layout} {schedule} {sorted(vars(options).items())}"
                    if key in done:
                        continue
                    line = proved(options, layout, schedule, data, root)
                    print(line, flush=True)
                    if options.results:
                        with Path(options.results).open("a") as file:
                            file.write(json.dumps([key, line]) + "\n")
        except SystemExit:
            shutil.copytree(root, Path("runs", "nodisk-failed"), dirs_exist_ok=True)
            raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
