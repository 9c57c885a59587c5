"""Runs with two passes together, and the same runs one pass after the other, drawn: every number
has the same bits.

    python -m tools.proofs.tables.together --cases 100 --seed 1

Cases are those of tools/proofs/fuzz_equivalence.py whose ranks have communication to hide; pairs
are those of the transform, and neighbours in a row joined by dice, of any two kinds. Losses, norms,
gradients, weights and what routers saw are compared. Ends with how often passes took turns, and
what the cases had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import torch

from megapipe.flags import stop
from megapipe.flags.parse import parse
from megapipe.pipeline_parallel.shapes.pairs import pairs, together
from megapipe.pipeline_parallel.shapes.pairs.together import How
from megapipe.pipeline_parallel.threads import run_threads
from tools.proofs import fuzz_equivalence
from tools.proofs.equivalence import Outcome, Part, train
from tools.proofs.equivalence_case import Case, table
from tools.proofs.shrink import Draws, Fuzzer


def draw(dice: Random) -> Case | None:
    """A case whose passes have something to hide, with pairs."""
    joined = dice.choice((None, dice.randrange(10**6)))
    paired = joined is None or dice.random() < 0.5
    any_case = fuzz_equivalence.draw(dice)
    case = replace(any_case, vocabulary=False, compile=False, joined=joined, paired=paired)
    has_pairs = any(len(step) == 2 for row in table(case).ranks for step in row)
    return case if max(case.tp, case.cp, case.ep) > 1 and has_pairs else None


def run(case: Case, *, apart: bool = False) -> list[Outcome]:
    """Run ranks as threads, and return the results of each at the end.

    Args:
        apart: pairs run one pass after the other.
    """
    sizes = {axis: getattr(case, axis) for axis in ("tp", "cp", "dp", "pp", "ep", "etp")}
    names = vars(pairs)
    how, names["how"] = names["how"], (lambda *_: How.APART) if apart else names["how"]
    try:
        return run_threads(partial(train, case=case), **sizes)
    finally:
        names["how"] = how


def differences(case: Case) -> list[str]:
    """Return the numbers that are not bitwise equal with pairs and without.

    A table of the catalogue is compared with the table without any pair. A drawn one, whose
    gradients may add in any order, is compared with its own passes one after the other.
    """
    found = []
    same_table = case.drawn is not None
    plain = case if same_table else replace(case, paired=False, joined=None)
    for rank, (mine, other) in enumerate(zip(run(case), run(plain, apart=same_table), strict=True)):
        for kind, value in mine._asdict().items():
            if not same(value, getattr(other, kind)):
                found.append(
                    f"rank {rank}: {kind} {value} with pairs, {getattr(other, kind)} without"
                )
    return found


def same(a: object, b: object) -> bool:
    """Return whether all bits are the same.

    Text tells -0.0 from 0.0, which == does not, and has nan equal to itself.
    """
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, Part) and isinstance(b, Part):
        return (
            torch.equal(a.tensor.nan_to_num(nan=7.0), b.tensor.nan_to_num(nan=7.0))
            and a.pieces == b.pieces
        )
    return repr(a) == repr(b)


def features(case: Case) -> list[str]:
    """Return what a case has, for the count at the end."""
    passes = (x for row in table(case).ranks for step in row for x in step)
    has = {
        "experts": case.experts != "none",
        "expert parallel": case.ep > 1,
        "tp": case.tp > 1,
        "cp": case.cp > 1,
        "recomputation": case.recompute != "none",
        "dropout": max(case.hidden_dropout, case.attention_dropout) > 0,
        "16 bits": case.dtype.endswith("16"),
        "split backwards": any(x.kind.is_split for x in passes),
    }
    return [what for what, there in has.items() if there]


@dataclass(frozen=True)
class Flags(Draws):
    """Compare runs with two passes together with the same passes one after the other."""

    cases: float = 100
    """Number of runs."""


def main(argv: Sequence[str]) -> None:
    """Draw and compare."""
    torch.set_num_threads(1)
    turns, seen = Counter[str](), Counter[str]()
    give = together.Shared.to_second

    def counted(pair: together.Shared) -> None:
        turns["turns"] += 1
        give(pair)

    def compare(case: Case) -> list[str]:
        seen.update(features(case))
        return differences(case)

    together.Shared.to_second = counted  # type: ignore[method-assign, assignment]
    flags, fuzzer = parse(Flags, argv), Fuzzer("together", draw, compare)
    fuzzer.prove(flags, fuzz_equivalence.command)
    print(
        f"{fuzzer.count} cases, seed {flags.seed}: the same bits; passes took turns "
        f"{turns['turns']} times"
    )
    print(", ".join(f"{n} with {what}" for what, n in seen.most_common()))


if __name__ == "__main__":
    stop.run(main)
