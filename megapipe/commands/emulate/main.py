"""Runs schedules for real on emulated devices and compares them with their prediction and with torch's runtime.

Processes, messages, executor and communicator are real; a pass sleeps instead of computing (see emulated.py), so many
ranks show true schedules on few cores. All schedules run in one pool of processes and take turns step by step, so
that whatever else the machine does meets all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megapipe.commands.emulate import late, reduction
from megapipe.commands.emulate.device import times
from megapipe.commands.emulate.pool import Job, run_pool
from megapipe.commands.emulate.runs import PEERS
from megapipe.schedule import (
    SCHEDULES,
    Costs,
    Kind,
    ScheduleError,
    build,
    entry_of,
    is_file,
    simulate,
    unpaired,
)
from megapipe.schedule.measured.costs import measured_costs


@dataclass(frozen=True)
class Row:
    """What one job showed. Times in ms, of the slowest rank; shares of the step; medians over the repeats.

    Attributes:
        bubble: share of the step in which an average rank does not compute.
        peak: most saved activations on any rank, in device shares.
        sent_mb: sent by all ranks together in one step; None where it was not counted.
        cpu_us: CPU time of the main thread per microbatch, mean over ranks.
        to_torch: step time over that of torch's same schedule, paired by repeat.
    """

    runtime: str
    schedule: str
    predicted_ms: float
    step_ms: float
    ratio: float
    predicted_bubble: float
    bubble: float
    predicted_peak: float
    peak: float
    sent_mb: float | None
    cpu_us: float
    to_torch: float | None = None
    cpu_to_torch: float | None = None


def main() -> int:
    """Parse, run, print. Returns the exit status."""
    args = _arguments()
    f, b, w = (x / 1000 for x in args.ms)
    costs = Costs(f, b, w, comm=args.link_ms / 1000)
    known = costs
    if args.measure_overhead:
        overhead, comm = overhead_here(args.pp, args.message_kib, costs, args.repeats)
        known = Costs(f, b, w, comm=args.link_ms / 1000 + comm, overhead=overhead)
        print(f"measured here: a pass costs {overhead * 1e3:.3g} ms beside its work, a message {comm * 1e3:.3g} ms")
    try:
        jobs = _jobs(args, known)
    except ScheduleError as error:
        print(f"bench_schedules.py: error: {error}", file=sys.stderr)
        return 2
    if args.post_validation:
        jobs = [Job("megapipe", x) for job in jobs if job.runtime == "megapipe" for x in late.both(job.schedule)]
        tables = [job.schedule for job in jobs]
        print(late.table(tables, run_pool(jobs, costs, args), known, args.steps))
        return 0
    if args.reduction is not None or args.reduction_mib:
        tables = [x for job in jobs if job.runtime == "megapipe" for x in reduction.three(job.schedule)]
        link = reduction.link_of(args)
        measured = run_pool([Job("megapipe", x) for x in tables], replace(costs, g=link), args)
        print(reduction.table(tables, measured, replace(known, g=link)))
        return 0
    measured = run_pool(jobs, costs, args)
    rows = [_row(job, known, steps) for job, steps in zip(jobs, measured, strict=True)]
    rows = [_against_torch(i, jobs, rows, measured) for i in range(len(jobs))]
    print(_table(rows, args))
    if args.json:
        written = {"arguments": vars(args), "costs": asdict(known), "rows": [asdict(r) for r in rows]}
        Path(args.json).write_text(json.dumps(written, indent=1))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=4, help="ranks, each a process")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--chunks", type=int, default=2, help="of interleaved schedules; zb-auto chooses")
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="names, files, FILE.py:NAME, by commas")
    parser.add_argument("--ms", type=times, default=(20.0, 20.0, 20.0), help="F,B,W of a device share, in ms")
    parser.add_argument("--link-ms", type=float, default=0.0, help="latency of each message, costs no CPU")
    parser.add_argument("--message-kib", type=int, default=4, help="size of each message")
    parser.add_argument("--repeats", type=int, default=5, help="measured steps of each schedule")
    parser.add_argument(
        "--measure-overhead",
        action="store_true",
        help="first time what a pass costs here beside its work and a message beside --link-ms; predict and search so",
    )
    parser.add_argument("--post-validation", action="store_true", help="consecutive steps with and without a barrier")
    parser.add_argument("--steps", type=int, default=8, help="of --post-validation, in a row")
    parser.add_argument("--reduction", type=float, metavar="X", help="a data-parallel link that takes X of the compute")
    parser.add_argument(
        "--reduction-mib", type=float, default=0.0, help="gloo instead: MiB of a device share's gradients"
    )
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks, of --reduction-mib")
    parser.add_argument("--no-torch", action="store_true", help="leave torch.distributed.pipelining out")
    parser.add_argument("--json", help="write all numbers to this file")
    args = parser.parse_args()
    for name in ("pp", "microbatches", "repeats", "message_kib", "steps", "dp"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if args.reduction_mib and args.dp < 2:
        parser.error(f"--reduction-mib {args.reduction_mib:g} needs ranks to sum over; add --dp 2")
    return args


def _jobs(args: argparse.Namespace, costs: Costs) -> list[Job]:
    jobs = []
    for name in args.schedules.split(","):
        fixed = is_file(name) or name.lower() == "zb-auto" or entry_of(name).chunks is not None
        chunks = None if fixed else args.chunks
        options: dict[str, Any] = {"objective": "period"} if args.post_validation and name.lower() == "zb-auto" else {}
        schedule = build(name, args.pp, args.microbatches, chunks=chunks, costs=costs, **options)
        jobs.append(Job("megapipe", schedule))
        if schedule.name in PEERS and not args.no_torch and args.pp > 1:
            jobs.append(Job("torch", schedule))
    return jobs


def overhead_here(ranks: int, message_kib: int, costs: Costs, repeats: int) -> tuple[float, float]:
    """Seconds that a pass and a message cost on this machine beside what `costs` say of passes."""
    job = Job("megapipe", build("zb-h1", ranks, 2 * ranks))
    settings = argparse.Namespace(pp=ranks, dp=1, message_kib=message_kib, repeats=repeats)
    bare = replace(costs, comm=0.0)
    found = measured_costs(run_pool([job], bare, settings, timed=True), job.schedule.placement, bare)
    place = job.schedule.placement
    took, given = found.durations(place), bare.durations(place)
    beside = [x - y for kind in (Kind.F, Kind.B, Kind.W) for x, y in zip(took[kind], given[kind], strict=True)]
    return statistics.median(beside), statistics.mean(found.lag(r, r + 1, ranks) for r in range(ranks - 1))


def _row(job: Job, costs: Costs, steps: list[list[list[float]]]) -> Row:
    schedule, ranks = job.schedule, job.schedule.placement.num_ranks
    timeline = simulate(unpaired(schedule), costs)  # sleeping passes do not overlap
    times = [max(rank[0] for rank in step) for step in steps]
    busy = [sum(rank[1] for rank in step) / ranks for step in steps]
    cpu = [sum(rank[2] for rank in step) / ranks / schedule.num_microbatches for step in steps]
    sent = sum(rank[4] for rank in steps[0])
    return Row(
        runtime=job.runtime,
        schedule=schedule.name,
        predicted_ms=timeline.makespan * 1e3,
        step_ms=statistics.median(times) * 1e3,
        ratio=statistics.median(times) / timeline.makespan if timeline.makespan else float("inf"),
        predicted_bubble=1 - sum(timeline.busy) / ranks / timeline.makespan if timeline.makespan else 0.0,
        bubble=statistics.median(1 - b / t for b, t in zip(busy, times, strict=True)),
        predicted_peak=max(timeline.peak),
        peak=max(rank[3] for step in steps for rank in step),
        sent_mb=None if sent < 0 else sent / 1e6,
        cpu_us=statistics.median(cpu) * 1e6,
    )


def _against_torch(i: int, jobs: list[Job], rows: list[Row], measured: list[list[list[list[float]]]]) -> Row:
    """The row, beside torch's of the same schedule if there is one."""
    peer = Job("torch", jobs[i].schedule)
    if peer not in jobs or jobs[i] == peer:
        return rows[i]
    j = jobs.index(peer)
    pairs = zip(measured[i], measured[j], strict=True)
    quotients = [max(rank[0] for rank in own) / max(rank[0] for rank in other) for own, other in pairs]
    cpu = rows[i].cpu_us / rows[j].cpu_us
    return replace(rows[i], to_torch=statistics.median(quotients), cpu_to_torch=cpu)


def _table(rows: list[Row], args: argparse.Namespace) -> str:
    f, b, w = args.ms
    lines = [
        f"pp {args.pp}, {args.microbatches} microbatches, F/B/W {f:g}/{b:g}/{w:g} ms per device share, link "
        f"{args.link_ms:g} ms, messages of {args.message_kib} KiB, median of {args.repeats} steps",
        "",
        "| schedule | runtime | predicted ms | step ms | step/predicted | bubble predicted | measured "
        "| peak predicted | counted | MB sent | CPU us/microbatch | step/torch | CPU/torch |",
        "|---|---|" + "---:|" * 11,
    ]
    for r in rows:
        cells = (
            r.schedule,
            r.runtime,
            f"{r.predicted_ms:.0f}",
            f"{r.step_ms:.0f}",
            f"{r.ratio:.3f}",
            f"{r.predicted_bubble:.1%}",
            f"{r.bubble:.1%}",
            f"{r.predicted_peak:g}",
            f"{r.peak:g}",
            "" if r.sent_mb is None else f"{r.sent_mb:.1f}",
            f"{r.cpu_us:.0f}",
            "" if r.to_torch is None else f"{r.to_torch:.3f}",
            "" if r.cpu_to_torch is None else f"{r.cpu_to_torch:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def command() -> None:
    """This command, as a shell runs it."""
    sys.exit(main())
