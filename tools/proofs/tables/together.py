"""Runs with two passes together, and the same runs one pass after the other, drawn: every number
has the same bits.

    python tools/proofs/tables/together.py --cases 100 --seed 1

Cases are those of tools/proofs/fuzz_equivalence.py whose ranks have communication to hide; pairs
are those of the transform, and neighbours in a row joined by dice, of any two kinds. Losses, norms,
gradients, weights and what routers saw are compared. Ends with how often passes took turns, and
what the cases had.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from time import monotonic

# A fresh clone runs it before anything is installed.
sys.path.insert(0, str(Path(__file__).parents[3]))

import torch

from megapipe.pipeline_parallel.shapes.pairs import pairs, together
from megapipe.pipeline_parallel.shapes.pairs.together import How
from megapipe.pipeline_parallel.threads import run_threads
from tools.proofs.equivalence import Outcome, Part, train
from tools.proofs.equivalence_case import Case, table
from tools.proofs.fuzz_equivalence import command, draw


def cases(seed: int) -> Iterator[Case]:
    """Cases whose passes have something to hide, with pairs."""
    dice = Random(seed)
    while True:
        case = draw(dice)
        case = replace(
            case, vocabulary=False, compile=False, joined=dice.choice((None, dice.randrange(10**6)))
        )
        case = replace(case, paired=case.joined is None or dice.random() < 0.5)
        if max(case.tp, case.cp, case.ep) > 1 and any(
            len(step) == 2 for row in table(case).ranks for step in row
        ):
            yield case


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


def main() -> None:
    """Draw and compare."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    turns, seen, said = Counter[str](), Counter[str](), monotonic()
    give = together.Shared.to_second

    def counted(pair: together.Shared) -> None:
        turns["turns"] += 1
        give(pair)

    together.Shared.to_second = counted  # type: ignore[method-assign, assignment]
    for number, case in zip(range(args.cases), cases(args.seed), strict=False):
        if found := differences(case):
            print(f"case {number + 1}:", *found[:10], command(case), sep="\n")
            sys.exit(1)
        seen.update(
            what
            for what, has in {
                "experts": case.experts != "none",
                "expert parallel": case.ep > 1,
                "tp": case.tp > 1,
                "cp": case.cp > 1,
                "recomputation": case.recompute != "none",
                "dropout": max(case.hidden_dropout, case.attention_dropout) > 0,
                "16 bits": case.dtype.endswith("16"),
                "split backwards": any(
                    x.kind.is_split for row in table(case).ranks for step in row for x in step
                ),
            }.items()
            if has
        )
        if monotonic() - said > 10:
            said = monotonic()
            print(f"{number + 1} cases, no difference", flush=True)
    print(
        f"{args.cases} cases, seed {args.seed}: the same bits; passes took turns {turns['turns']} "
        "times"
    )
    print(", ".join(f"{n} with {what}" for what, n in seen.most_common()))


if __name__ == "__main__":
    main()
