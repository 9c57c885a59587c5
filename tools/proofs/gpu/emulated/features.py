"""Trainings that have every stream, copy and collective, on emulated devices.

    python -m tools.proofs.gpu.emulated.features [--only NAME,NAME] [--suite]

Each is judged as check.py judges drawn ones: by its numbers, by what a GPU would refuse, and by the
order of streams. The suite runs those of SUITE.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import process_time

import torch
import torch._dynamo  # a capture imports it, and it cannot be imported where torch.cuda is emulated

from megapipe.distributed.device import graph_pool
from megapipe.flags import stop
from megapipe.flags.parse import parse
from megapipe.pipeline_parallel.graphs.graphed import Graphs
from tools.proofs.equivalence import Training
from tools.proofs.equivalence_case import Case
from tools.proofs.gpu.emulated.ahead import loads_ahead
from tools.proofs.gpu.emulated.check import judged, on_devices

PLAIN = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "steps": 2}
ALL_TO_ALL = {"experts": "softmax", "ep": 2, "etp": 1, "dispatcher": "alltoall"}


def _case(schedule: str, pp: int, microbatches: int, **settings: object) -> Case:
    layers = settings.pop("layers", (1,) * pp)
    return Case(schedule, pp, microbatches, layers, **{**PLAIN, **settings})  # type: ignore[arg-type]


FEATURES: dict[str, Case] = {
    "messages": _case("1f1b", 2, 3),
    "messages in batches": _case("1f1b", 2, 3, p2p="batched"),
    "messages around a ring": _case("zb-h1", 3, 3, p2p="ring"),
    "a V": _case("zb-v", 2, 4, layers=(1, 0, 0, 1)),
    "lengths that vary": _case("1f1b", 2, 3, variable=True),
    "copies": _case("1f1b", 2, 4, memory="out"),
    "copies beside zero bubbles": _case("zb-h1", 2, 4, memory="some", dp=2),
    "sums and gathers beside passes": _case(
        "1f1b", 2, 2, dp=2, overlap=True, distributed=True, buckets=2
    ),
    "loads ahead": _case(f"{loads_ahead.__module__}:loads_ahead", 2, 4),
    "sums of several layers": _case("1f1b", 1, 2, layers=(4,), dp=2, overlap=True, buckets=2),
    "sums in full": _case("1f1b", 1, 2, layers=(2,), dp=2, overlap=True, buckets=2),
    "shards of weights": _case("1f1b", 2, 2, dp=2, sharding="weights", distributed=True),
    "shards of gradients": _case("1f1b", 2, 2, dp=2, sharding="grads", distributed=True),
    "tensors in pieces": _case("1f1b", 2, 2, tp=2, sequence_parallel=True),
    "a ring of keys": _case("1f1b", 1, 2, layers=(2,), cp=2),
    "keys by heads": _case("1f1b", 1, 2, layers=(1,), cp=2, way="a2a"),
    "keys gathered": _case("1f1b", 1, 2, layers=(1,), cp=2, way="all_gather"),
    "experts": _case("1f1b", 1, 2, layers=(1,), dp=2, **ALL_TO_ALL),
    "experts in pairs": _case("dualpipe-v", 2, 4, layers=(1, 0, 0, 1), dp=2, **ALL_TO_ALL),
    "a vocabulary": _case("1f1b", 2, 3, vocabulary=True),
    "a vocabulary of four": _case("1f1b", 4, 4, vocabulary=True, layers=(1, 0, 0, 1)),
    "depths": _case("1f1b", 2, 2, depths=(1,)),
    "slices": _case("1f1b", 2, 2, slices=(4, 4), memory="out"),
    "graphs": _case("zb-h1", 2, 4),
    "graphs beside messages": _case("1f1b", 2, 4),
    "graphs of one stage": _case("1f1b", 1, 2, layers=(1,), steps=3),
    "graphs whose output is kept": _case("1f1b", 1, 3, layers=(1,), metrics="first"),
}
GRAPHS = {name for name in FEATURES if name.startswith("graphs")}
SUITE = ("copies", "sums and gathers beside passes", "graphs beside messages")
"""What the suite runs."""


def capture(training: Training) -> None:
    """Run the passes of a training as graphs, after its first step."""
    pool = partial(graph_pool, training.mesh.device)
    training.pipeline.engine.wrap = Graphs(pool, 1, lambda text: None)


def run(name: str, *, late: bool = True, timeout_s: float = 60.0) -> list[str]:
    """The differences and faults of a training; one that fails has its error."""
    case = FEATURES[name]
    change: Callable[[Training], None] | None = capture if name in GRAPHS else None
    ranks, found = on_devices(case, late=late, change=change, timeout_s=timeout_s)
    return found + judged(case, ranks) if ranks else found


@dataclass(frozen=True)
class Flags:
    """Train with every stream, copy and collective, on emulated devices."""

    only: tuple[str, ...] = tuple(FEATURES)
    """Names of trainings."""
    suite: bool = False
    """Those of the suite."""
    early: bool = False
    """Copies run at once, and not as late as events allow."""


def main(argv: Sequence[str]) -> None:
    options = parse(Flags, argv)
    torch.set_num_threads(1)
    failed = 0
    names = SUITE if options.suite else options.only
    for name in names:
        begun = process_time()
        found = run(name, late=not options.early)
        failed += bool(found)
        seconds = process_time() - begun
        print(f"{name}: {found[0] if found else 'the same'} [{seconds:.1f} s of CPU]", flush=True)
        for text in found[1:4]:
            print("   ", text)
    print(f"{len(names)} trainings, {failed} fail", flush=True)
    sys.stdout.flush()
    with suppress(OSError):
        os._exit(failed > 0)  # threads may wait for a rank that failed


if __name__ == "__main__":
    stop.run(main)
