"""Measure the gain of sharing the vocabulary over pipeline ranks, on emulated devices
(emulate/device.py). Each schedule runs with the best split into whole layers, its head on the last
stage, and with vocabulary passes.

python tools/bench/vocabulary.py --pp 4 --microbatches 16 --head-layers 4
python tools/bench/vocabulary.py --balance --pp 8 --microbatches 32 --ms 10,11,8
    by the clock alone, no run
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

# A fresh clone runs it before anything is installed.
sys.path.insert(0, str(Path(__file__).parents[2]))

from megapipe.flags.parse import parse, run
from megapipe.plan.auto import Judge, search
from megapipe.plan.layers import Work
from megapipe.plan.pieces import ModelWork
from megapipe.schedule import Costs, Schedule, build, entry_of, simulate, unpaired
from megapipe.schedule.core.merge import activation
from megapipe.schedule.families.vocabulary.shares import with_vocabulary
from tools.bench.emulate.device import times
from tools.bench.emulate.pool import Job, Turns, run_pool
from tools.bench.schedules import overhead_here

THOUSANDS = (32, 64, 128, 256)
LAYERS_PER_K = 9.6 / 256
"""What 1,024 ids cost in layers: 2 h V FLOPs a token beside some 27 h^2 of a Llama's layer, h =
4096.
"""


@dataclass(frozen=True)
class Model:
    """The layers of a rank and the size of the head in layers, under a schedule. ms: F, B, W of a
    rank's layers.
    """

    name: str
    ranks: int
    microbatches: int
    layers: int
    head: float
    ms: Sequence[float]

    @property
    def pieces(self) -> ModelWork:
        f, b, w = (x / 1000 / self.layers for x in self.ms)
        head = Work(f * self.head, b * self.head, w * self.head)
        return ModelWork(Work(), (Work(f, b, w),) * (self.layers * self.ranks), head)

    @property
    def table(self) -> Schedule:
        chunks = 2 if entry_of(self.name).chunks is None else None
        return unpaired(build(self.name, self.ranks, self.microbatches, chunks=chunks))

    def whole(self) -> Job:
        """In the best split of whole layers, its head on the last stage."""
        return Job(
            "megapipe", self.table, self.pieces.costs(search(Judge(self.table, self.pieces)))
        )

    def shared(self) -> Job:
        """With vocabulary passes."""
        table, chain = self.table, self.table.placement.chain
        even = replace(self.pieces, shares=self.ranks).costs(
            (self.layers * self.ranks // chain,) * chain
        )
        return Job("megapipe", with_vocabulary(table, even), even)

    def balance(self) -> tuple[float, float]:
        """Return two measures of how evenly vocabulary passes spread the head.

        The first is the simulated step over the step of a schedule with the head's work spread over
        all its passes. The second is the largest number of microbatches that a rank holds in
        addition.
        """
        job, more = self.shared(), 1 + self.head / self.layers / self.ranks
        plain = simulate(self.table, Costs(*(x / 1000 * more for x in self.ms)))
        costs = replace(job.costs or Costs(), mem_b=Costs().mem_b, mem_w=Costs().mem_w)
        time = simulate(job.schedule, costs)
        held = max(activation(job.schedule, costs, time)) - max(plain.peak)
        return time.makespan / plain.makespan, held


def balances(models: Sequence[Model]) -> str:
    """A row for each schedule, a column for each vocabulary."""
    lines = [
        "| schedule | "
        + " | ".join(f"{k}k" for k in THOUSANDS)
        + " | microbatches more, at most |",
        "|---|" + "---:|" * (len(THOUSANDS) + 1),
    ]
    for x in models:
        found = [replace(x, head=k * LAYERS_PER_K).balance() for k in THOUSANDS]
        cells = " | ".join(f"{step:.3f}" for step, _ in found)
        lines.append(f"| {x.name} | {cells} | {max(0.0, *(held for _, held in found)):.2f} |")
    return "\n".join(lines)


def known(job: Job, overhead: float, comm: float) -> Costs:
    """Return the times of its passes on this machine, the cost of each pass in addition to its
    work, and its messages.
    """
    costs = job.costs or Costs()
    shared = {name: getattr(costs, name) + overhead for name in ("s", "t", "e")}
    return replace(costs, overhead=overhead, comm=comm, **shared)


@dataclass(frozen=True)
class Flags:
    """Compare a head on the last stage with a head that all ranks share, on emulated devices."""

    pp: int = 4
    """Ranks, each a process."""
    microbatches: int = 16
    """In a step."""
    layers: int = 4
    """Layers of a device share."""
    head_layers: float = 4.0
    """Layers that output head and loss are worth."""
    schedules: str = "1f1b,zb-h1,zb-v,interleaved,dualpipe-v"
    """Names, by commas."""
    ms: str = "20,20,20"
    """F,B,W of a device share, in ms."""
    message_kib: int = 4
    """Size of each message."""
    repeats: int = 5
    """Measured steps."""
    measure_overhead: bool = False
    """First time what a pass and a message cost here."""
    balance: bool = False
    """Simulated alone, for vocabularies of 32k to 256k."""


def main(argv: Sequence[str]) -> None:
    args = parse(Flags, argv)
    names, ms = args.schedules.split(","), times(args.ms)
    size = args.pp, args.microbatches, args.layers, args.head_layers, ms
    models = [Model(name, *size) for name in names]
    if args.balance:
        print(balances(models))
        return
    overhead, comm = 0.0, 0.0
    if args.measure_overhead:
        f, b, w = (x / 1000 for x in ms)
        overhead, comm = overhead_here(args.pp, args.message_kib, Costs(f, b, w), args.repeats)
        print(
            f"measured here: a pass costs {overhead * 1e3:.3g} ms beside its work, a message "
            f"{comm * 1e3:.3g} ms\n"
        )
    jobs = [job for x in models for job in (x.whole(), x.shared())]
    measured = run_pool(
        jobs, Costs(), Turns(args.pp, message_kib=args.message_kib, repeats=args.repeats)
    )
    print(
        f"pp {args.pp}, {args.microbatches} microbatches, {args.layers} layers a rank and a head "
        "worth "
        f"{args.head_layers:g}, F/B/W of a rank's layers {'/'.join(f'{x:g}' for x in ms)} ms, "
        "median of "
        f"{args.repeats} steps\n"
    )
    print(
        "| schedule | whole layers: predicted ms | measured | shared: predicted | measured | "
        "measured/predicted |",
        end="",
    )
    print(" gain predicted | measured |\n|---|" + "---:|" * 7)
    for i, name in enumerate(names):
        told, seen = [], []
        for job, steps in zip(jobs[2 * i : 2 * i + 2], measured[2 * i : 2 * i + 2], strict=True):
            told.append(simulate(job.schedule, known(job, overhead, comm)).makespan * 1e3)
            seen.append(statistics.median(max(rank[0] for rank in step) for step in steps) * 1e3)
        print(
            f"| {name} | {told[0]:.0f} | {seen[0]:.0f} | {told[1]:.0f} | {seen[1]:.0f} | "
            f"{seen[1] / told[1]:.3f} | "
            f"{1 - told[1] / told[0]:.1%} | {1 - seen[1] / seen[0]:.1%} |"
        )


if __name__ == "__main__":
    run(main)
