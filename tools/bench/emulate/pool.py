"""The pool of processes in which tools/bench/schedules.py runs schedules on emulated devices, in
turns.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any

import torch

from megapipe.commands.ranks import run_ranks
from megapipe.config import ParallelConfig
from megapipe.distributed.axis import CPU
from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.stopwatch import Stopwatch, ran_by_all
from megapipe.schedule import Costs, Schedule
from megapipe.schedule.measured.costs import MeasuredPass
from tools.bench.emulate.device import sharpen_sleep
from tools.bench.emulate.runs import Ours, Runner


@dataclass(frozen=True)
class Job:
    """One schedule under one runtime (megapipe or torch). costs: times of its stages, if they
    differ.
    """

    runtime: str
    schedule: Schedule
    costs: Costs | None = None


@dataclass(frozen=True)
class Turns:
    """Turns of the pool: pp x dp processes, and what each of the `repeats` turns of a job is.

    Attributes:
        message_kib: size of each message.
        steps: of a turn, in a row.
        reduction_mib: of a device share's gradients, summed over dp by gloo.
    """

    pp: int
    dp: int = 1
    message_kib: int = 4
    repeats: int = 5
    steps: int = 1
    reduction_mib: float = 0.0


def run_pool(jobs: list[Job], costs: Costs, turns: Turns, timed: bool = False) -> Any:
    """[job][repeat][rank] -> (step s, busy s, CPU s, peak, sent bytes or -1, s in which passes
    waited for their communication, and of it in pairs), run by one pool of processes.

    timed: the passes of the first job instead, [repeat][rank].
    """
    given = (jobs, costs, turns, timed)
    preload = ["torch", "tools.bench.emulate.runs"]
    if any(job.runtime == "torch" for job in jobs):
        preload.append("tools.bench.emulate.torchs")
    return run_ranks(turns.pp * turns.dp, _rank, *given, preload=tuple(preload))[0]


def _rank(jobs: list[Job], costs: Costs, turns: Turns, timed: bool) -> Any:
    shape, repeats = (turns.message_kib * 256, 1, 1), turns.repeats  # float32
    sharpen_sleep()
    mesh = ProcessMesh.create(ParallelConfig(pipeline_model_parallel_size=turns.pp), CPU)
    runners = [_runtime(job.runtime)(mesh, job.schedule, job.costs or costs, shape) for job in jobs]
    for runner in runners:
        runner.steps = turns.steps
        runner.reduced_bytes = int(turns.reduction_mib * 2**20)
    gc.freeze()  # collections would otherwise walk torch's own modules in the middle of a step
    # The first one warms up.
    measured = [[_step(runner) for runner in runners] for _ in range(repeats + 1)][1:]
    ran = [_passes(runners[0]) for _ in range(repeats * timed)]
    mesh.close()
    return ran if timed else [list(of_job) for of_job in zip(*measured, strict=True)]


def _runtime(name: str) -> type[Runner]:
    if name == "megapipe":
        return Ours
    # What imports torch.distributed.pipelining and with it torch._dynamo.
    from tools.bench.emulate.torchs import Torchs

    return Torchs


def _step(runner: Runner) -> list[list[float]]:
    """Numbers that every rank measured in one step, which all start at the same moment."""
    world, device = runner.mesh.world, runner.device
    device.busy = device.peak = device.held = 0.0
    start = world.broadcast(torch.tensor([time.perf_counter() + 0.02], dtype=torch.float64)).item()
    device.epoch = start
    time.sleep(max(0.0, start - time.perf_counter()))
    cpu = time.thread_time()
    runner.step()
    cpu, took = time.thread_time() - cpu, time.perf_counter() - start
    assert abs(device.held) < 1e-9, f"{runner.schedule.name} left {device.held} activations"
    sent = -1 if runner.sent_bytes is None else runner.sent_bytes
    mine = torch.tensor(
        [[took, device.busy, cpu, device.peak, sent, runner.exposed, runner.exposed_in_pairs]],
        dtype=torch.float64,
    )
    return world.all_gather(mine).tolist()


def _passes(runner: Runner) -> list[list[MeasuredPass]]:
    """The passes of every rank in one step."""
    runner.watch = watch = Stopwatch(CPU, runner.schedule)
    _step(runner)
    return ran_by_all([watch], runner.mesh.pp)[0]
