"""Check that passes as CUDA graphs are bitwise equal to passes launched one by one, under every
schedule, on 2 and 4 ranks (threads).

    python -m tools.proofs.gpu.graphs [--schedules NAME ...]

Three steps in float64, the first without graphs, the others by `captured.Pool` in place of a GPU.
Exit status 1 if anything differs or a pass was not replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from megapipe.flags import stop
from megapipe.flags.parse import parse
from megapipe.pipeline_parallel.graphs.graphed import Graphs
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import SCHEDULES, Kind
from tools.proofs.equivalence import Outcome, Training, differing_bits, train
from tools.proofs.equivalence_case import Case, table
from tools.proofs.gpu.captured import Pool

CHUNKS = {"zb-auto": 1, "hanayo": 2} | dict.fromkeys(
    ("interleaved", "interleaved-zb", "breadth-first", "group-interleaved"), 2
)


def case_of(schedule: str, pp: int, **settings: object) -> Case:
    """A layer on each stage, and nothing drawn."""
    case = Case(
        schedule,
        pp,
        2 * pp,
        (),
        chunks=CHUNKS.get(schedule),
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    layers = (1,) * table(case).placement.chain
    return replace(case, layers=layers, **settings)  # type: ignore[arg-type]


def with_graphs(case: Case, said: list[str]) -> tuple[list[Outcome], int]:
    """Run a case with graphs after its first step: return every rank's outcome, and the number of
    replayed passes.
    """
    replays = list[int]()

    def capture(training: Training) -> None:
        training.pipeline.engine.wrap = Graphs(partial(Pool, replays.append), 1, said.append)

    ranks = run_threads(
        lambda mesh: train(mesh, case, capture), pp=case.pp, dp=case.dp, timeout_s=60
    )
    return ranks, len(replays)


def without(case: Case) -> list[Outcome]:
    """The same, launched one by one."""
    return run_threads(lambda mesh: train(mesh, case), pp=case.pp, dp=case.dp, timeout_s=60)


def passes(case: Case) -> int:
    """Graphs that a step should replay: F and B of every stage and microbatch, and W where the
    stage has any.
    """
    all_passes = [x for row in table(case).ranks for step in row for x in step]
    apart = {x.stage for x in all_passes if x.kind is Kind.W}
    return sum(2 + (x.stage in apart) for x in all_passes if x.kind is Kind.F)


@dataclass(frozen=True)
class Flags:
    """Compare passes as CUDA graphs with passes that are launched one by one."""

    schedules: tuple[str, ...] = tuple(SCHEDULES)
    """Which; all by default."""


def main(argv: Sequence[str]) -> int:
    """Compare the schedules, and return the status to end with."""
    options = parse(Flags, argv)
    torch.set_num_threads(1)
    wrong = 0
    for pp in (2, 4):
        for name in options.schedules:
            case = case_of(name, pp)
            ranks, replays = with_graphs(case, [])
            found = differing_bits(ranks, without(case))
            wrong += bool(found) or replays != 2 * passes(case)
            print(
                f"{name}, {pp} ranks: {replays} passes of 2 steps replayed, of {2 * passes(case)};",
                end=" ",
            )
            print("\n  ".join(found) or "the same bits", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    stop.run(main)
