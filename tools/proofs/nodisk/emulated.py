"""Time steps without a rank on emulated devices: next to the simulator's, and to healthy steps.

    python -m tools.proofs.nodisk.emulated --schedules 1f1b,zb-h1 --replicas 3 --pp 2

Each rank is a process, messages and executor are real, and a pass sleeps. The lost rank is the last
of the last replica, and no rank holds more than the fullest one of a healthy replica, as in a run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from megapipe.flags.parse import parse
from megapipe.schedule import Costs, build, simulate, unpaired
from megapipe.schedule.core.joint import joint, joint_costs
from megapipe.schedule.core.reroute import reroute
from tools.bench.emulate.device import times
from tools.bench.emulate.pool import Job, Turns, run_pool


@dataclass(frozen=True)
class Options:
    """Run healthy and rerouted steps on emulated devices."""

    schedules: str = "1f1b,zb-h1"
    """Schedules, separated by commas."""
    replicas: int = 2
    """Data-parallel replicas."""
    pp: int = 2
    """Ranks of a replica, each a process."""
    microbatches: int = 4
    """Microbatches of a replica."""
    ms: str = "200,200,200"
    """F,B,W of a device share, in ms."""
    repeats: int = 3
    """Measured steps of each table, after one that is not counted."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each schedule: measured and simulated times of both steps, in ms."""
    options = parse(Options, sys.argv[1:] if argv is None else argv)
    costs = Costs(*(x / 1000 for x in times(options.ms)))
    lost = (options.replicas - 1, options.pp - 1)
    whole = []
    without = []
    for name in options.schedules.split(","):
        # Passes that sleep do not overlap.
        table = unpaired(build(name, options.pp, options.microbatches))
        of_all = joint_costs(costs, table)
        memory = max(simulate(table, costs).peak)
        found = reroute(table, options.replicas, lost, costs, memory)
        whole.append(Job("megapipe", joint(table, options.replicas), of_all))
        without.append(Job("megapipe", found, of_all))
    ranks = options.replicas * options.pp
    healthy = _measured(whole, Turns(ranks, repeats=options.repeats))
    rerouted = _measured(without, Turns(ranks - 1, repeats=options.repeats))
    bound = options.replicas / (options.replicas - 1)
    for of_whole, of_found, before, after in zip(whole, without, healthy, rerouted, strict=True):
        first = _predicted(of_whole)
        then = _predicted(of_found)
        line = (
            f"{of_found.schedule.name}: {after:.0f} ms, {after / then:.3f} of the simulated "
            f"{then:.0f}; healthy {before:.0f} ms, {before / first:.3f} of {first:.0f}; rerouted / "
            f"healthy {after / before:.3f}, simulated {then / first:.3f}, d/(d-1) {bound:.3f}"
        )
        print(line, flush=True)
    return 0


def _measured(jobs: list[Job], turns: Turns) -> list[float]:
    """Return the median time of each job's steps, of its slowest rank, in ms."""
    of_jobs = run_pool(jobs, Costs(), turns)
    slowest = [[max(rank[0] for rank in step) for step in steps] for steps in of_jobs]
    return [median(steps) * 1000 for steps in slowest]


def _predicted(job: Job) -> float:
    """Return the simulated time of a job's step, in ms."""
    assert job.costs is not None
    return simulate(job.schedule, job.costs).makespan * 1000


if __name__ == "__main__":
    sys.exit(main())
