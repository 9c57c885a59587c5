"""Compare rehearsals with real runs: step time, bubble and the peak memory of each rank, cell by
cell.

python tools/bench/rehearsal.py
    the whole table: 20 trainings at pp 2, 12 emulated steps at pp 4 and 8
python tools/bench/rehearsal.py --steps 0
    memory alone, which no other program on the machine disturbs

A training and the rehearsals of its ranks take turns in the same processes, step by step; the ranks
rehearse at the same time, since on one machine they slow each other. On emulated devices (emulate/)
passes sleep, so that pp 8 fits on two cores; memory there is in device shares.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# A fresh clone runs it before anything is installed.
sys.path.insert(0, str(Path(__file__).parents[2]))

from megapipe.commands.plan.forecast import forecast
from megapipe.commands.plan.held_bytes import parts_of
from megapipe.commands.plan.rehearse import prepared, world_ranks
from megapipe.commands.plan.rehearsed_rank import (
    Alone,
    Answers,
    Rehearsed,
    answers_of,
    delivered,
    rank_alone,
    rehearsed,
    run_on,
    timed_step,
)
from megapipe.commands.ranks import run_ranks
from megapipe.config import Config
from megapipe.distributed.axis import CPU
from megapipe.distributed.mesh import ProcessMesh
from megapipe.flags.parse import parse, run
from megapipe.pipeline_parallel.stopwatch import Stopwatch
from megapipe.plan import Plan
from megapipe.schedule import Costs, Schedule, build, entry_of, simulate, unpaired
from megapipe.schedule.measured.costs import MeasuredPass, measured_costs
from tools.bench.emulate.device import sharpen_sleep
from tools.bench.emulate.pool import Job, Turns, run_pool
from tools.bench.emulate.runs import Ours

MODEL = (
    "--num-layers 8 --hidden-size 128 --num-attention-heads 4 --seq-length 192 "
    "--max-position-embeddings 192 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 99 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer "
    "--vocab-size 1023 --pipeline-model-parallel-size 2 --distributed-backend gloo "
    "--pipeline-schedule "
)
FULL, SELECTIVE = "--recompute-granularity full", "--recompute-granularity selective"
TRAININGS = (
    *(
        f"{name} {more}"
        for name in ("1f1b", "zb-h1", "zb-v", "v-min")
        for more in ("", FULL, "--bf16")
    ),
    f"1f1b {SELECTIVE} --bf16",
    f"zb-v {FULL} --bf16",
    "gpipe",
    f"interleaved --num-virtual-stages-per-pipeline-rank 2 {SELECTIVE}",
    "zb-h1 --pipeline-model-parallel-layout Ett|ttttttL",
    "1f1b --untie-embeddings-and-output-weights",
    "dualpipe",
    "dualpipe-v --bf16",
)
EMULATED = tuple(
    (pp, name)
    for pp in (4, 8)
    for name in ("1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "dualpipe")
)
F_B_W = Costs(0.02, 0.02, 0.02)


@dataclass(frozen=True)
class Flags:
    """Flags of this tool."""

    steps: int = 16
    """Timed steps of each training, a quarter of it of each emulated one; 0 compares memory alone.
    """
    only: tuple[str, ...] = ()
    """Cells that begin so: emulated, or the name of a schedule, for trainings."""


@dataclass(frozen=True)
class Seen:
    """Step in seconds, mean share of the passes' time in which a rank runs none, and the peak of
    each rank.
    """

    step: float
    bubble: float
    peaks: list[float]


def main(argv: Sequence[str]) -> None:
    flags = parse(Flags, argv)
    print(
        "| pp | cell | step ms rehearsed | real | off | bubble rehearsed | real | points | peak "
        "off at most |"
    )
    print("|---:|---|" + "---:|" * 7)
    for text in TRAININGS:
        if text.startswith(flags.only or ("",)):
            row(2, text, *training(text, flags.steps))
    for pp, name in EMULATED if flags.steps else ():
        if (cell := f"emulated {name}").startswith(flags.only or ("",)):
            row(pp, cell, *emulated(pp, name, max(1, flags.steps // 4)))


def row(pp: int, cell: str, rehearsal: Seen, real: Seen) -> None:
    """Print a line of the table."""
    off = max(abs(a / b - 1) for a, b in zip(rehearsal.peaks, real.peaks, strict=True))
    times = [
        f"{1e3 * rehearsal.step:.1f}",
        f"{1e3 * real.step:.1f}",
        f"{rehearsal.step / (real.step or 1) - 1:+.1%}",
    ]
    bubbles = [
        f"{rehearsal.bubble:.1%}",
        f"{real.bubble:.1%}",
        f"{100 * (rehearsal.bubble - real.bubble):+.1f}",
    ]
    print(
        f"| {pp} | "
        f"{' | '.join([cell, *(times + bubbles if real.step else [''] * 6), f'{off:.2%}'])} |",
        flush=True,
    )


def training(text: str, steps: int) -> tuple[Seen, Seen]:
    """Compare a rehearsal of a run of two processes with the run."""
    config, plan = prepared((MODEL + text).split(), 2)
    given = config, plan, answers_of(config, plan, world_ranks(config)), steps
    alone, real, peaks = zip(*run_ranks(2, _rank, *given), strict=True)
    forgotten = Seen(0.0, 0.0, list(peaks))
    if not steps:
        return replace(forgotten, peaks=[x.peak for x in alone]), forgotten
    told = forecast(config, plan, dict(enumerate(alone)))
    both = [*zip(*real, strict=True)]
    took = statistics.median(max(took for _, took in ranks) for ranks in both)
    return Seen(told.step, told.bubble, [x.peak for x in alone]), replace(
        forgotten,
        step=took,
        bubble=statistics.median(_bubble([row for row, _ in ranks]) for ranks in both),
    )


def _rank(
    config: Config, plan: Plan, answers: Answers, steps: int
) -> tuple[Rehearsed, list[Any], float]:
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  the run's own lines
    mesh = ProcessMesh.create(config.parallel, CPU, plan.shares)
    rank = mesh.world.rank
    run, alone = run_on(mesh, config, plan), rank_alone(config, plan, rank, answers)
    real, mine = [], []
    for _ in range(steps + 1 if steps else 0):
        mesh.world.barrier()
        real.append(timed_step(run))
        mesh.world.barrier()
        mine.append(timed_step(alone))
    seen = (
        rehearsed(alone, mine[1:]),
        [(row, took) for row, _, took in real[1:]],
        sum(parts_of(run).values()),
    )
    mesh.close()
    return seen


def _bubble(rows: list[list[MeasuredPass]]) -> float:
    span = max(row[-1].end for row in rows) - min(row[0].begin for row in rows)
    return 1 - sum(x.end - x.begin for row in rows for x in row) / span / len(rows)


def emulated(ranks: int, name: str, steps: int) -> tuple[Seen, Seen]:
    """The same of devices that sleep, each rank rehearsed in turn."""
    schedule = unpaired(
        build(name, ranks, 2 * ranks, chunks=2 if entry_of(name).any_chunks else None)
    )
    settings = Turns(ranks, repeats=steps)
    (real,) = run_pool([Job("megapipe", schedule)], F_B_W, settings)
    runners = [_alone(rank, schedule) for rank in range(ranks)]
    rows = [[_passes(runner) for _ in range(steps + 1)][1:] for runner in runners]
    costs = measured_costs([*map(list, zip(*rows, strict=True))], schedule.placement, F_B_W)
    span = simulate(schedule, costs).makespan
    slept = sum(runner.device.busy for runner in runners) / (steps + 1) / ranks
    rehearsal = Seen(span, 1 - slept / span, [runner.device.peak for runner in runners])
    took = [(max(rank[0] for rank in step), sum(rank[1] for rank in step) / ranks) for step in real]
    bubble = statistics.median(1 - busy / whole for whole, busy in took)
    return rehearsal, Seen(
        statistics.median(t for t, _ in took), bubble, [rank[3] for rank in real[0]]
    )


def _alone(rank: int, schedule: Schedule) -> Ours:
    axis = Alone(rank, schedule.placement.num_ranks, tuple(range(schedule.placement.num_ranks)))
    runner = Ours(replace(ProcessMesh.single(), pp=axis, world=axis), schedule, F_B_W, (1024, 1, 1))
    runner.transport.post = delivered  # type: ignore[method-assign]
    return runner


def _passes(runner: Ours) -> list[MeasuredPass]:
    runner.watch = watch = Stopwatch(CPU, runner.schedule)
    runner.step()
    return watch.ran(runner.mesh.pp.rank)


if __name__ == "__main__":
    sharpen_sleep()
    run(main)
