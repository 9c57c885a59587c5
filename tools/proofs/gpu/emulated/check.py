"""Draw trainings as tools/proofs/fuzz_equivalence.py does, and run them on emulated devices.

    python -m tools.proofs.gpu.emulated.check --cases 300 --seed 0

Every rank is a thread with a device of its own. A case must have the numbers of one process with
one device, to the bit where nothing is summed in another order, and those of one process on a CPU,
whose kernels are others, within rounding. It fails too if a GPU would have refused something, if
two streams touch the same bytes without an order, or if somebody reads what is not there yet.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from time import process_time
from typing import Any
from unittest import mock

import torch

from megapipe.distributed.mesh import ProcessMesh
from megapipe.flags import stop
from megapipe.flags.parse import parse
from megapipe.plan import sharing
from tools.proofs import equivalence
from tools.proofs.equivalence import Outcome, Training, differences, train
from tools.proofs.equivalence_case import Case, table
from tools.proofs.fuzz_equivalence import command, draw, read
from tools.proofs.gpu.emulated.ranks import devices, run_ranks
from tools.proofs.noise import Recorder, Run, is_noise

MOST = 16
"""Ranks times microbatches of a drawn case: a rank's operations take three times a CPU's time."""


def drawn(seed: int, count: int) -> list[Case]:
    """Cases of the fuzzer that are not compiled, and small."""
    rng, cases = random.Random(seed), list[Case]()
    while len(cases) < count:
        case = replace(draw(rng), compile=False)
        if case.tp * case.cp * case.dp * case.pp * case.microbatches <= MOST:
            cases.append(case)
    return cases


def on_devices(
    case: Case,
    *,
    late: bool = True,
    change: Callable[[Training], None] | None = None,
    timeout_s: float = 60.0,
    places: bool = False,
) -> tuple[list[Outcome], list[str]]:
    """Train a case, a device for each rank.

    Args:
        change: called before the first step of each.
        places: faults say where memory was allocated. That is slow.
    Returns: what the ranks have, and the faults.
    """
    axes = ("tp", "cp", "dp", "pp", "ep", "etp")
    sizes: dict[str, Any] = {axis: getattr(case, axis) for axis in axes}
    shares = sharing(table(case).placement, tied=case.tied)
    with devices(late=late) as lib:
        if places:
            lib.name_blocks()
        extra = int(case.vocabulary)
        body = partial(train, case=case)
        if change is not None:
            body = partial(body, change=change)
        try:
            ranks = run_ranks(body, **sizes, shares=shares, timeout_s=timeout_s, extra_links=extra)
        except Exception as error:
            # What a GPU would have refused comes first: it may be why.
            return [], [*lib.faults(), "".join(traceback.format_exception(error))]
        return ranks, lib.faults()


@cache
def alone_on_device(case: Case) -> Outcome:
    """A case of one process that has one device."""
    with devices():
        torch.cuda.set_device(0)
        return train(ProcessMesh.single(torch.device("cuda", 0)), case)


def run(
    case: Case, *, late: bool = True, timeout_s: float = 60.0, places: bool = False
) -> list[str]:
    """The differences and faults of a case; a case that fails has its error."""
    ranks, found = on_devices(case, late=late, timeout_s=timeout_s, places=places)
    if not ranks:
        return found
    differ = judged(case, ranks)
    if not found and case.dtype == "float64" and any(map(_weight, differ)):
        differ = without_noise(case, ranks, differ, late=late, timeout_s=timeout_s)
    return found + differ


def _weight(said: str) -> tuple[str, int, str] | None:
    """Return who has another weight, the rank and the weight's name; None for other differences."""
    found = re.match(r"(a CPU|one device): rank (\d+): weights of (\S+) differ by", said)
    return (found[1], int(found[2]), found[3]) if found else None


def without_noise(
    case: Case, ranks: Sequence[Outcome], differ: Sequence[str], *, late: bool, timeout_s: float
) -> list[str]:
    """Train again with the gradients of all steps, and leave out the weights that are noise.

    The weights of the first run are judged. One that was wrong in the first run alone stays.
    """
    watched = Recorder()
    _, faults = on_devices(case, late=late, change=watched.watch, timeout_s=timeout_s)
    if faults:
        return [*differ, *faults]
    runs, left = watched.runs(ranks), []
    for said in differ:
        which = _weight(said)
        # Nothing is rounded otherwise where one device has the same bits.
        if which is None or (which[0] == "one device" and case.same_bits):
            left.append(said)
            continue
        one = recorded(case.whole, which[0])
        if not is_noise(case, which[2], which[1], runs, one):
            left.append(said)
    return left


@cache
def recorded(case: Case, where: str) -> Run:
    """Train a case of one process on "a CPU" or "one device", and keep all its gradients."""
    watched = Recorder()
    if where == "a CPU":
        train(ProcessMesh.single(), case, watched.watch)
        return watched.runs([equivalence.alone(case)])[0]
    with devices():
        torch.cuda.set_device(0)
        train(ProcessMesh.single(torch.device("cuda", 0)), case, watched.watch)
    return watched.runs([alone_on_device(case)])[0]


def judged(case: Case, ranks: Sequence[Outcome]) -> list[str]:
    """The differences of what ranks have from one process; a case that fails has its error."""
    # A GPU's kernel of a sum and its norm rounds gradients once. A norm that is computed again is
    # not part of it, which shows in 16 bits.
    alike = not (case.recompute == "modules" and case.dtype in ("bfloat16", "float16"))
    try:
        with (
            mock.patch.object(equivalence, "alone", alone_on_device),
            mock.patch.object(Case, "same_bits", case.same_bits and alike),
        ):
            one = differences(case, ranks)
        with mock.patch.object(Case, "same_bits", False):
            others = differences(case, ranks)
        # Of close scores another rounding takes the other expert.
        found = [f"one device: {x}" for x in one if alike or "experts have" not in x]
        rounded = case.dtype != "float64"
        found += [f"a CPU: {x}" for x in others if not (rounded and "experts have" in x)]
        return found
    except Exception as error:
        return ["".join(traceback.format_exception(error))]


@dataclass(frozen=True)
class Flags:
    """Draw trainings, run them on emulated devices, and compare them with one process."""

    seed: int = 0
    """Of the draws."""
    cases: int = 10
    """How many."""
    case: str | None = None
    """Run this one case, as printed."""
    early: bool = False
    """Copies run at once, and not as late as events allow."""
    timeout: float = 300.0
    """Seconds that a rank waits for another."""
    places: bool = False
    """Faults say where memory was allocated. That is slow."""
    results: Path | None = None
    """A file with a line for each case that has run; those are not run again."""
    part: tuple[int, int] = (0, 1)
    """I N: every Nth case from case I on, for several processes."""


def run_as(options: Flags, case: Case) -> list[str]:
    """The differences and faults of a case, as the flags ask."""
    late = not options.early
    return run(case, late=late, timeout_s=options.timeout, places=options.places)


def known(results: Path | None) -> dict[int, list[str]]:
    """The differences of the cases that have run, by number."""
    if results is None or not results.exists():
        return {}
    return {row["number"]: row["found"] for row in map(json.loads, results.open())}


def main(argv: list[str]) -> None:
    options = parse(Flags, argv)
    torch.set_num_threads(1)
    cases = [read(options.case)] if options.case else drawn(options.seed, options.cases)
    first, step = options.part
    before, failed = known(options.results), 0
    for n in range(first, len(cases), step):
        case = cases[n]
        found = before[n] if n in before else run_as(options, case)
        failed += bool(found)
        if found:
            print(f"case {n}:", *found[:6], command(case), sep="\n", flush=True)
        if options.results is not None and n not in before:
            row = {"number": n, "found": found[:6], "case": command(case)}
            with options.results.open("a") as out:
                print(json.dumps(row), file=out)
        if n % 20 == 19:
            print(f"{n + 1} cases, {failed} fail; {process_time():.0f} s of CPU", flush=True)
    ran = len(range(first, len(cases), step))
    print(f"{ran} cases, seed {options.seed}: {failed} fail", flush=True)
    sys.stdout.flush()
    os._exit(failed > 0)


if __name__ == "__main__":
    stop.run(main)
