"""Bytes that graphs keep on a device while a table moves them: counted as a run goes, and predicted
from its table.

    python -m tools.proofs.tables.counted --cases 40 --seed 1

Each case trains a tiny GPT for a step under a drawn table with O, L and R; half of them in slices.
The prediction is the simulator's peak for what one microbatch of each stage saves, or each of its
slices, keys and values in it; the count is of storages, each once, as autograd's hooks see them
come and go. They are the same to the byte. The gradients of keys, which no graph saves, are in
neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import torch

from megapipe.distributed.mesh import ProcessMesh
from megapipe.flags.parse import parse, run
from megapipe.pipeline_parallel.families.offload.host import Sizes
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import SCHEDULES, Costs, Kind, ScheduleError, simulate
from megapipe.schedule.passes import Part
from tools.proofs.equivalence import Training
from tools.proofs.equivalence_case import Case, table
from tools.proofs.families.styles import STYLES
from tools.proofs.shrink import Draws, Fuzzer
from tools.proofs.tables.moved import MODULES, MOVED

Counted = tuple[int, dict[int, list[Sizes]], int]
"""A rank's peak, the sizes of its stages, and bytes of its buffers on the host."""


@dataclass(frozen=True)
class Flags(Draws):
    """Compare the counted bytes of drawn runs with the predicted ones."""

    cases: float = 40
    """Number of runs."""


def main(argv: Sequence[str]) -> None:
    """Draw as many cases as are asked for."""
    torch.set_num_threads(1)
    fuzzer = Fuzzer("counted", draw, compare)
    fuzzer.prove(parse(Flags, argv))
    print(f"{fuzzer.count} tables: the peak of each rank as predicted, to the byte")


def compare(case: Case) -> list[str]:
    """Return the difference of a case, if there is one."""
    counted, predicted = both(case)
    return [] if counted == predicted else [f"counted {counted}, predicted {predicted}"]


def draw(dice: Random) -> Case | None:
    """A case whose table has no pair: what two passes that run together hold depends on how their
    layers take turns.
    """
    names = [name for name, entry in SCHEDULES.items() if not (entry.searched or entry.pairs)]
    name, pp = dice.choice(names), dice.choice((1, 2, 2, 4))
    case = Case(
        name,
        pp,
        dice.choice((pp, 2 * pp, 3 * pp)),
        (),
        chunks=2 if SCHEDULES[name].chunks is None else None,
        style=dice.choice(list(STYLES)),
        memory=dice.choice([x for x in MOVED if x != "none"]),
        modules=dice.choice([(), *MODULES]),
        experts=dice.choice(("none", "softmax")),
        batch=dice.choice((1, 2)),
        dtype=dice.choice(("float32", "float64")),
        steps=1,
        slices=dice.choice(((), (), (4, 4), (3, 3, 2), (5, 1, 1, 1))),
    )
    try:
        made = table(case)
    except ScheduleError:
        return None
    # A small table may have none of the chosen passes.
    if not made.kinds & {Kind.O, Kind.R}:
        return None
    return replace(case, layers=tuple(dice.choice((1, 1, 2)) for _ in range(made.placement.chain)))


def both(case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Peaks of all ranks: counted, and predicted."""
    ranks = run_threads(partial(_counted, case=case), pp=case.pp, timeout_s=60)
    sizes = {stage: one for _, own, _ in ranks for stage, one in own.items()}
    made = table(case)
    of_slices = [
        [sizes[stage][n] for stage in range(made.placement.chain)] for n in range(len(made.slices))
    ]
    whole, *_ = measured = [_costs(own, last=own is of_slices[-1]) for own in of_slices]
    costs = Sliced(**vars(whole), measured=tuple(measured))
    return tuple(peak for peak, *_ in ranks), tuple(
        round(peak) for peak in simulate(made, costs).peak
    )


@dataclass(frozen=True)
class Sliced(Costs):
    """Costs of slices as they were measured, each for itself."""

    measured: tuple[Costs, ...] = ()

    def __post_init__(self) -> None:
        """Nothing: each has been checked."""

    def of_slice(self, cuts: Sequence[float], of: Part | None) -> Costs:
        """Return the costs of this slice."""
        return self if of is None else self.measured[of[0]]


def _costs(stages: Sequence[Sizes], *, last: bool) -> Costs:
    """Costs of a microbatch or slice; of the last one nobody is to read the keys."""
    return Costs(
        mem_b=tuple(float(x.saved + x.keys) for x in stages),
        mem_w=0.0,
        mem_o=tuple(float(x.copied) for x in stages),
        mem_r=tuple(float(x.input + (0 if last else x.keys)) for x in stages),
    )


def _counted(mesh: ProcessMesh, case: Case) -> Counted:
    training = Training(mesh, case)
    training.step(0)
    host = training.pipeline.engine.kept["offload"]
    return host.held.peak, host.sizes, host.bytes


if __name__ == "__main__":
    run(main)
