"""Runs schedules for real on emulated devices and compares them with their prediction and with torch's runtime.

    python tools/bench/schedules.py --pp 4 --microbatches 16

Processes, messages, executor and communicator are real; a pass sleeps instead of computing (emulate/device.py), so many
ranks show true schedules on few cores. All schedules run in one pool of processes and take turns step by step, so
that whatever else the machine does meets all of them.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # a fresh clone runs it before anything is installed

from megapipe.config.notes import flag
from megapipe.data.files import file_problems, write_complete
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse, run
from megapipe.schedule import (
    SCHEDULES,
    Costs,
    Kind,
    Schedule,
    build,
    entry_of,
    is_file,
    simulate,
    unpaired,
)
from megapipe.schedule.core.cuts import Cutting
from megapipe.schedule.costs import ATTENTION
from megapipe.schedule.families.sharding.sharded import UnshardedStages, with_sharded_weights
from megapipe.schedule.ingredients import FixedCosts
from megapipe.schedule.measured.costs import measured_costs
from megapipe.schedule.views.features.sliced import in_slices
from tools.bench.emulate import ways
from tools.bench.emulate.device import times
from tools.bench.emulate.pool import Job, Turns, run_pool
from tools.bench.emulate.runs import PEERS

LARGEST = 100_000
"""Ranks, microbatches or other counts of an emulation at most: each is listed before anything starts."""


@dataclass(frozen=True)
class Row:
    """The numbers of one job. Times in ms, of the slowest rank; shares of the step; medians over the repeats.

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


@dataclass(frozen=True)
class Flags:
    """Run schedules on emulated devices, and compare them with their prediction and with torch's
    runtime.

    Processes, messages, executor and communicator are real; a pass sleeps instead of computing. All schedules run in
    one pool of processes and take turns step by step.
    """

    pp: int = 4
    """Ranks, each a process."""
    microbatches: int = 16
    """Microbatches in a step."""
    chunks: int = 2
    """Stages per rank of interleaved schedules; zb-auto chooses."""
    schedules: str = ",".join(SCHEDULES)
    """Names, files, FILE.py:NAME, by commas."""
    ms: str = "20,20,20"
    """F,B,W of a device share, in ms."""
    link_ms: float = 0.0
    """Latency of each message, costs no CPU."""
    message_kib: int = 4
    """Size of each message."""
    repeats: int = 5
    """Measured steps of each schedule."""
    measure_overhead: bool = False
    """First time what a pass costs here beside its work and a message beside --link-ms; predict and search so."""
    post_validation: bool = False
    """Consecutive steps with and without a barrier."""
    steps: int = 8
    """Steps of --post-validation, in a row."""
    reduction: float | None = None
    """A data-parallel link that takes this part of the compute."""
    reduction_mib: float = 0.0
    """gloo instead: MiB of a device share's gradients."""
    dp: int = 1
    """Data-parallel ranks, of --reduction-mib."""
    pairs: bool = False
    """Each schedule with passes run together, and without."""
    comm_share: float = 0.3
    """Part of all passes that is communication within F and B, of --pairs: an emulated link of each rank."""
    memory: float | None = None
    """Most activation of a rank, in device shares, of --pairs. Default: what pairs ask for."""
    comm_pieces: int = 4
    """How often it takes turns with arithmetic in F of a device share."""
    slices: int = 0
    """Each schedule with its microbatches in so many slices of equal work too."""
    attention_share: float = 0.0
    """Part of all passes that is causal attention, of --slices."""
    gather_ms: float = 0.0
    """Each schedule with weights gathered for runs of passes too, for one stage of a rank at a time and for two: what a
    gather of a device share takes on an emulated link of each rank."""
    scatter_ms: float = 0.0
    """Milliseconds that the reduction of a device share's gradients takes on that link, with --gather-ms."""
    replica_ms: float | None = None
    """Each schedule with copies of states to a peer's memory: milliseconds of a device share's on a link of each rank."""
    copy_ratio: float | None = None
    """Each schedule with the copies to the host that are back in time, and with all: what one takes of F, each way."""
    switch: int | None = None
    """So many neighbours share the way to the host, of --copy-ratio."""
    no_torch: bool = False
    """Leave torch.distributed.pipelining out."""
    json: str | None = None
    """Write all numbers to this file."""

    @property
    def modes(self) -> list[str]:
        """The fields given that choose another comparison than that with the prediction and torch."""
        names = ("pairs", "post_validation", "copy_ratio", "reduction", "reduction_mib", "replica_ms")
        return [name for name in names if getattr(self, name) != getattr(Flags, name)]

    @cached_property
    def link(self) -> float:
        """Seconds of a reduction: a part of the compute, or what gloo takes here."""
        if self.reduction_mib:
            return ways.link_of(self.turns)
        return (self.reduction or 0.0) * sum(times(self.ms)) / 1000 * self.microbatches

    @property
    def turns(self) -> Turns:
        steps = self.steps if self.post_validation else 1
        return Turns(self.pp, self.dp, self.message_kib, self.repeats, steps, self.reduction_mib)


def main(argv: Sequence[str]) -> None:
    flags = parse(Flags, argv)
    if problems := list(_wrong(flags)):
        raise ConfigError(problems)
    f, b, w = (x / 1000 for x in times(flags.ms))
    attention = dict.fromkeys(ATTENTION, flags.attention_share)
    beside = {"a": flags.gather_ms / 1000, "g": flags.scatter_ms / 1000}
    known = costs = Costs(f, b, w, comm=flags.link_ms / 1000, **beside, **attention)
    if flags.measure_overhead:
        overhead, comm = overhead_here(flags.pp, flags.message_kib, costs, flags.repeats)
        known = replace(costs, comm=flags.link_ms / 1000 + comm, overhead=overhead)
        print(f"measured here: a pass costs {overhead * 1e3:.3g} ms beside its work, a message {comm * 1e3:.3g} ms")
    jobs = _jobs(flags, known)
    own = [job.schedule for job in jobs if job.runtime == "megapipe"]
    if groups := [group for schedule in own for group in _ways(flags, schedule, costs, known)]:
        print(ways.compared(groups, flags.turns))
        return
    if flags.modes:
        return
    measured = run_pool(jobs, costs, flags.turns)
    rows = [_row(job, known, steps) for job, steps in zip(jobs, measured, strict=True)]
    rows = [_against_torch(i, jobs, rows, measured) for i in range(len(jobs))]
    print(_table(rows, flags))
    if flags.json:
        written = {"arguments": asdict(flags), "costs": asdict(known), "rows": [asdict(r) for r in rows]}
        write_complete(flags.json, json.dumps(written, indent=1))


def _ways(flags: Flags, schedule: Schedule, costs: Costs, known: Costs) -> list[list[ways.Way]]:
    """The ways of running a schedule that a flag asks to compare, in groups; none for the plain comparison."""
    if flags.pairs:
        alone, told = (ways.with_link(x, flags.comm_share, flags.comm_pieces) for x in (costs, known))
        return ways.of_pairs(schedule, alone, told, flags.memory)
    if flags.copy_ratio is not None:
        return ways.of_copies(schedule, costs, known, flags.copy_ratio, flags.switch)
    if flags.replica_ms is not None:
        return ways.of_replicas(schedule, costs, known, flags.replica_ms / 1000)
    if flags.post_validation:
        return ways.of_steps(schedule, costs, known)
    if flags.reduction is not None or flags.reduction_mib:
        return ways.of_reductions(schedule, costs, known, flags.link)
    return []


_ONLY_WITH = {
    "comm_share": "pairs",
    "memory": "pairs",
    "comm_pieces": "pairs",
    "steps": "post_validation",
    "switch": "copy_ratio",
    "dp": "reduction_mib",
    "attention_share": "slices",
}
"""Fields that act with another one alone."""
_ADDED = {"pairs": "", "post_validation": "", "copy_ratio": " 0.5", "reduction_mib": " 64", "slices": " 4"}
"""What to add for it."""


def _wrong(flags: Flags) -> Iterator[str]:
    yield from _out_of_range(flags)
    given = {field.name for field in fields(Flags) if getattr(flags, field.name) != field.default}
    modes = [flag(name) for name in flags.modes]
    if len(modes) > 1:
        yield f"{' and '.join(modes)} are comparisons of their own. Leave all but one out."
    for name, other in _ONLY_WITH.items():
        if name in given and other not in given:
            yield f"{flag(name)} acts with {flag(other)} alone: add {flag(other)}{_ADDED[other]}, or leave it out"
    for name in ("slices", "gather_ms", "scatter_ms", "json"):
        if name in given and modes:
            yield f"{flag(name)} does not go with {' and '.join(modes)}. Leave one of them out."
    entries = [entry_of(name) for name in flags.schedules.split(",") if not is_file(name)]
    if "chunks" in given and not any(entry.any_chunks for entry in entries):
        yield f"--chunks {flags.chunks}: --schedules {flags.schedules} leave no choice of chunks. Leave it out."
    if "reduction_mib" in given and flags.dp < 2:
        yield f"--reduction-mib {flags.reduction_mib:g} needs ranks to sum over; add --dp 2"
    yield from file_problems({"--json": flags.json})


def _out_of_range(flags: Flags) -> Iterator[str]:
    """Numbers that mean nothing."""
    for name in ("pp", "microbatches", "chunks", "repeats", "message_kib", "steps", "dp", "comm_pieces", "switch"):
        number = getattr(flags, name)
        if number is not None and not 1 <= number <= LARGEST:
            yield f"{flag(name)} {number} must be at least 1 and at most {LARGEST}"
    for name in ("link_ms", "gather_ms", "scatter_ms", "reduction", "reduction_mib", "copy_ratio", "replica_ms"):
        number = getattr(flags, name)
        if number is not None and not 0 <= number < math.inf:
            kind = "time" if name.endswith("_ms") else "number"
            yield f"{flag(name)} {number:g} must be a {kind} from 0, such as 10"
    if flags.memory is not None and not 0 < flags.memory < math.inf:
        yield f"--memory {flags.memory:g} must be a number above 0, such as 8"
    if not 0 <= flags.attention_share < 1 or not 0 <= flags.slices <= LARGEST:
        yield f"--slices {flags.slices} and --attention-share {flags.attention_share:g}: give 4 and 0.6, say"
    if not 0 < flags.comm_share < 1:
        yield f"--comm-share {flags.comm_share:g} must be a part of a pass, such as 0.3"


def _jobs(flags: Flags, costs: Costs) -> list[Job]:
    jobs = []
    for name in flags.schedules.split(","):
        entry = None if is_file(name) else entry_of(name)
        chunks = flags.chunks if entry and entry.any_chunks else None
        searched = flags.post_validation and entry and entry.searched
        options: dict[str, Any] = {"objective": "period"} if searched else {}
        schedule = build(name, flags.pp, flags.microbatches, chunks=chunks, costs=costs, **options)
        jobs.append(Job("megapipe", schedule))
        if flags.slices and not (entry and entry.searched):
            cutting = Cutting(flags.slices)
            recipe = in_slices(name, flags.pp, flags.microbatches, costs, cutting=cutting, chunks=chunks)
            cut = recipe.build(FixedCosts(costs)).table
            jobs.append(Job("megapipe", replace(cut, name=f"{cut.name} in {flags.slices} slices")))
        for n in (1, 2) if flags.gather_ms or flags.scatter_ms else ():
            whole = with_sharded_weights(unpaired(schedule), costs, UnshardedStages(n, n))
            jobs.append(Job("megapipe", replace(whole, name=f"{schedule.name}, {n} whole")))
        if schedule.name in PEERS and not flags.no_torch and flags.pp > 1:
            jobs.append(Job("torch", schedule))
    return jobs


def overhead_here(ranks: int, message_kib: int, costs: Costs, repeats: int) -> tuple[float, float]:
    """Return the seconds that a pass and a message cost on this machine in addition to `costs`."""
    job = Job("megapipe", build("zb-h1", ranks, 2 * ranks))
    settings = Turns(ranks, message_kib=message_kib, repeats=repeats)
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
    """Return the row, with torch's time of the same schedule if torch has it."""
    peer = Job("torch", jobs[i].schedule)
    if peer not in jobs or jobs[i] == peer:
        return rows[i]
    j = jobs.index(peer)
    pairs = zip(measured[i], measured[j], strict=True)
    quotients = [max(rank[0] for rank in own) / max(rank[0] for rank in other) for own, other in pairs]
    cpu = rows[i].cpu_us / rows[j].cpu_us
    return replace(rows[i], to_torch=statistics.median(quotients), cpu_to_torch=cpu)


def _table(rows: list[Row], flags: Flags) -> str:
    f, b, w = times(flags.ms)
    lines = [
        f"pp {flags.pp}, {flags.microbatches} microbatches, F/B/W {f:g}/{b:g}/{w:g} ms per device share, link "
        f"{flags.link_ms:g} ms, messages of {flags.message_kib} KiB, median of {flags.repeats} steps",
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


if __name__ == "__main__":
    run(main)
