"""Every schedule on emulated devices, with what has streams: races, poison, waits of the host.

    python -m tools.proofs.gpu.emulated.schedules [--pp 2 3] [--schedules NAME ...] [--results FILE]
    python -m tools.proofs.gpu.emulated.schedules --in-turn --pp 5 6 7    # one feature each

A row of the table is a schedule, a size of the pipeline and a feature. It says `sound` if no two
streams touch the same bytes without an order, all losses are numbers (who reads what is not there
yet reads NaN), and in each step the host waits for the device as often as docs/log/performance.md
says: once.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # a capture imports it, and it cannot be imported where torch.cuda is emulated

from megapipe.flags import stop
from megapipe.flags.parse import parse
from megapipe.plan import sharing
from megapipe.schedule import SCHEDULES, ScheduleError
from tools.proofs.equivalence import Outcome, Training, train
from tools.proofs.equivalence_case import VOCAB, Case, table
from tools.proofs.gpu.emulated.features import capture
from tools.proofs.gpu.emulated.ranks import devices, run_ranks
from tools.proofs.gpu.graphs import case_of

FEATURES: dict[str, dict[str, Any]] = {
    "messages": {},
    "batches": {"p2p": "batched"},
    "copies": {"memory": "some"},
    "sums": {"dp": 2, "overlap": True, "distributed": True, "buckets": 2},
    "shards": {"dp": 2, "sharding": "weights", "distributed": True},
    "vocabulary": {"vocabulary": True},
    "graphs": {},
}
STEPS = 2
Key = tuple[str, int, str]
"""A row: its schedule, the size of the pipeline and the feature."""


@dataclass
class Waits:
    """Waits of the host within steps, by the rank's device and what it waits for.

    A pass of a pair runs in a second thread of its rank, on the same device.
    """

    inside: set[int] = field(default_factory=set)
    counts: dict[int, Counter[str]] = field(default_factory=dict)

    def hear(self, why: str) -> None:
        """Count one, if the rank of the calling thread is in a step."""
        device = torch.cuda.current_device()
        if device in self.inside:
            lines = traceback.extract_stack()
            own = [line for line in lines if "/megapipe/" in line.filename]
            # Beneath torch's own operations of a backward pass there may be no line of ours.
            where = "torch"
            if own:
                where = f"{own[-1].filename.rpartition('/megapipe/')[2]}:{own[-1].lineno}"
            self.counts.setdefault(device, Counter())[f"{why} at {where}"] += 1

    def watch(self, training: Training) -> None:
        """Count in the steps of a training."""
        step = training.step

        def counted(number: int) -> Any:
            if number > 0:  # the first also agrees on the names of the losses
                self.inside.add(torch.cuda.current_device())
            try:
                return step(number)
            finally:
                self.inside.discard(torch.cuda.current_device())

        training.step = counted  # type: ignore[method-assign]

    def problems(self) -> list[str]:
        """What the busiest rank waits for, where that is more than once a step."""
        most = max(self.counts.values(), key=lambda own: own.total(), default=Counter[str]())
        return [f"waits: {dict(most)}"] if most.total() > STEPS - 1 else []


def check(case: Case, *, graphs: bool, timeout_s: float) -> list[str]:
    """What is wrong with a case on devices. timeout_s: how long a rank waits for another."""
    waits = Waits()

    def change(training: Training) -> None:
        waits.watch(training)
        if graphs:
            capture(training)

    sizes = {axis: getattr(case, axis) for axis in ("tp", "cp", "dp", "pp", "ep", "etp")}
    shares = sharing(table(case).placement, tied=case.tied)
    with devices(waits=waits.hear) as lib:
        body = partial(train, case=case, change=change)
        links = int(case.vocabulary)
        try:
            ranks = run_ranks(body, **sizes, shares=shares, timeout_s=timeout_s, extra_links=links)
        except Exception as error:
            return [*lib.faults(), f"{type(error).__name__}: {error}"]
        return [*lib.faults(), *_not_numbers(ranks), *waits.problems()]


def _not_numbers(ranks: Sequence[Outcome]) -> list[str]:
    bad = [n for n, own in enumerate(ranks) if not all(map(math.isfinite, own.losses))]
    return [f"rank {n}: losses {ranks[n].losses}" for n in bad]


@dataclass(frozen=True)
class Flags:
    """Run every schedule on emulated devices."""

    pp: tuple[int, ...] = (2, 3, 4, 8)
    """Sizes of the pipeline."""
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    """Names."""
    features: tuple[str, ...] = tuple(FEATURES)
    """Names of what has streams."""
    in_turn: bool = False
    """One feature for each schedule at each size, and another one at the next size."""
    timeout: float = 300.0
    """Seconds that a rank waits for another."""
    results: Path | None = None
    """A file with a line for each row; those that it has are not run again."""


def _known(results: Path | None) -> dict[Key, list[str]]:
    if results is None or not results.exists():
        return {}
    rows = map(json.loads, results.open())
    return {(row["schedule"], row["pp"], row["feature"]): row["found"] for row in rows}


def _fits(pp: int, feature: str) -> bool:
    """Return whether there are devices enough, and rows of the vocabulary that divide by ranks."""
    settings = FEATURES[feature]
    divides = not settings.get("vocabulary") or VOCAB % pp == 0
    return divides and pp * settings.get("dp", 1) <= 8


def keys(flags: Flags) -> Iterator[list[Key]]:
    """Yield lists of rows. Of each list, the first row that can be is wanted."""
    for pp in flags.pp:
        features = [feature for feature in flags.features if _fits(pp, feature)]
        if not flags.in_turn:
            for feature in features:
                for name in flags.schedules:
                    yield [(name, pp, feature)]
            continue
        for number, name in enumerate(flags.schedules):
            first = (number + pp) % len(features)
            yield [(name, pp, feature) for feature in features[first:] + features[:first]]


def _row(name: str, pp: int, feature: str, timeout_s: float) -> list[str] | None:
    """What is wrong in one row; None for what the schedule cannot have."""
    try:
        case = case_of(name, pp, steps=STEPS, **FEATURES[feature])
        return check(case, graphs=feature == "graphs", timeout_s=timeout_s)
    except ScheduleError:
        return None


def main(argv: Sequence[str]) -> None:
    flags = parse(Flags, argv)
    torch.set_num_threads(1)
    known, bad, count = _known(flags.results), 0, 0
    for choices in keys(flags):
        for key in choices:
            found = known[key] if key in known else _row(*key, flags.timeout)
            if found is not None:
                break
        else:
            continue
        name, pp, feature = key
        if flags.results is not None and key not in known:
            row = {"schedule": name, "pp": pp, "feature": feature, "found": found[:4]}
            with flags.results.open("a") as out:
                print(json.dumps(row), file=out)
        bad, count = bad + bool(found), count + 1
        print(f"{name}, pp {pp}, {feature}: {found[0] if found else 'sound'}", flush=True)
    print(f"{count} rows, {bad} with faults", flush=True)
    sys.stdout.flush()
    os._exit(bad > 0)


if __name__ == "__main__":
    stop.run(main)
