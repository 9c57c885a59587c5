"""What sharing the vocabulary over pipeline ranks is worth: each schedule with the best whole-layer split, its head on
the last stage, and with vocabulary passes, on emulated devices (see emulated.py).

python tools/bench_vocabulary.py --pp 4 --microbatches 16 --head-layers 4
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a fresh clone runs it before anything is installed

from megapipe.plan.auto import Judge, search
from megapipe.plan.work import Pieces, Work
from megapipe.schedule import Costs, build, entry_of, simulate, unpaired
from megapipe.schedule.transforms.vocabulary import with_vocabulary
from tools.bench_pool import Job, run_pool
from tools.bench_schedules import overhead_here
from tools.emulated import times


def jobs_of(name: str, ranks: int, microbatches: int, layers: int, head: float, ms: Sequence[float]) -> list[Job]:
    """Whole layers and shared vocabulary, of a model with so many layers a rank and a head worth so many layers."""
    f, b, w = (x / 1000 / layers for x in ms)
    pieces = Pieces(Work(), (Work(f, b, w),) * (layers * ranks), Work(f * head, b * head, w * head))
    chunks = 2 if entry_of(name).chunks is None else None
    table = unpaired(build(name, ranks, microbatches, chunks=chunks))
    whole = pieces.costs(search(Judge(table, pieces)))
    chain = table.placement.chain
    even = replace(pieces, shares=ranks).costs((layers * ranks // chain,) * chain)
    return [Job("megapipe", table, whole), Job("megapipe", with_vocabulary(table, even), even)]


def known(job: Job, overhead: float, comm: float) -> Costs:
    """What its passes take here, with what each costs beside its work, and its messages."""
    costs = job.costs or Costs()
    shared = {name: getattr(costs, name) + overhead for name in ("s", "t", "e")}
    return replace(costs, overhead=overhead, comm=comm, **shared)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=4, help="ranks, each a process")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4, help="of a device share")
    parser.add_argument("--head-layers", type=float, default=4.0, help="layers that output head and loss are worth")
    parser.add_argument("--schedules", default="1f1b,zb-h1,zb-v,interleaved,dualpipe-v", help="names, by commas")
    parser.add_argument("--ms", type=times, default=(20.0, 20.0, 20.0), help="F,B,W of a device share, in ms")
    parser.add_argument("--message-kib", type=int, default=4, help="size of each message")
    parser.add_argument("--repeats", type=int, default=5, help="measured steps")
    parser.add_argument(
        "--measure-overhead", action="store_true", help="first time what a pass and a message cost here"
    )
    args = parser.parse_args()
    args.dp, names = 1, args.schedules.split(",")
    overhead, comm = 0.0, 0.0
    if args.measure_overhead:
        f, b, w = (x / 1000 for x in args.ms)
        overhead, comm = overhead_here(args.pp, args.message_kib, Costs(f, b, w), args.repeats)
        print(f"measured here: a pass costs {overhead * 1e3:.3g} ms beside its work, a message {comm * 1e3:.3g} ms\n")
    size = args.pp, args.microbatches, args.layers, args.head_layers, args.ms
    jobs = [job for name in names for job in jobs_of(name, *size)]
    measured = run_pool(jobs, Costs(), args)
    print(
        f"pp {args.pp}, {args.microbatches} microbatches, {args.layers} layers a rank and a head worth "
        f"{args.head_layers:g}, F/B/W of a rank's layers {'/'.join(f'{x:g}' for x in args.ms)} ms, median of "
        f"{args.repeats} steps\n"
    )
    print(
        "| schedule | whole layers: predicted ms | measured | shared: predicted | measured | measured/predicted |",
        end="",
    )
    print(" gain predicted | measured |\n|---|" + "---:|" * 7)
    for i, name in enumerate(names):
        told, seen = [], []
        for job, steps in zip(jobs[2 * i : 2 * i + 2], measured[2 * i : 2 * i + 2], strict=True):
            told.append(simulate(job.schedule, known(job, overhead, comm)).makespan * 1e3)
            seen.append(statistics.median(max(rank[0] for rank in step) for step in steps) * 1e3)
        print(
            f"| {name} | {told[0]:.0f} | {seen[0]:.0f} | {told[1]:.0f} | {seen[1]:.0f} | {seen[1] / told[1]:.3f} | "
            f"{1 - told[1] / told[0]:.1%} | {1 - seen[1] / seen[0]:.1%} |"
        )


if __name__ == "__main__":
    main()
