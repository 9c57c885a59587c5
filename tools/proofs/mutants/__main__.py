"""Change one line of the core at a time, and see whether the tests notice.

    python -m tools.proofs.mutants --draw 400 --seed 0 --results mutants.jsonl

The tests of its room judge a mutant. Rooms that many tests run are judged by all of these, with a
record of which test runs which line, of the same code:

    python -m pytest -n 2 -p tools.proofs.mutants.record --cov=megapipe --cov-context=test \\
        --cov-report= --junitxml=times.xml
    python -m tools.proofs.mutants --draw 400 --rooms models data --lines .coverage \\
        --times times.xml

A mutant has one operator, comparison, constant or condition changed, or one statement of one line
left out. It is made in a copy of the repository, where a fork of this process, which has imported
torch already, runs the room's tests until the first fails. What takes a minute, and four times what
the tests take without a change, was killed too: it hangs. With a record, tests near the line and
fast ones go first, until they take --seconds of CPU; --again judges what survived once more.
Results are appended to a file, so a run that was cut off goes on where it stood.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tools.proofs.jobs import in_forks, keep, kept
from tools.proofs.mutants.copy import Copy, Judging
from tools.proofs.mutants.draw import ROOMS, WHOLE, Mutant, draw
from tools.proofs.mutants.lines import Lines


def report(judged: Sequence[dict[str, object]]) -> str:
    """The survivors, each with its line before and after, and the numbers by room."""
    lines = []
    for x in judged:
        if x["result"] == "survived":
            lines += [
                f"{x['path']}:{x['line']}",
                f"- {str(x['before']).strip()}",
                f"+ {str(x['after']).strip()}",
                "",
            ]
    lines += ["| room | drawn | killed | of these hang | survived |", "|---|---|---|---|---|"]
    for room in [*ROOMS, *WHOLE, "all"]:
        found = Counter(str(x["result"]) for x in judged if room in (x["room"], "all"))
        if total := found.total():
            survived = found["survived"]
            cells = (room, total, total - survived, found["hangs"], survived)
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def read(results: Path) -> dict[Mutant, dict[str, object]]:
    """Return the outcome of each mutant, the last one that was written."""
    known = {}
    for found in kept(results):
        known[Mutant(*(found[name] for name in Mutant._fields))] = found
    return known


def _work(left: Sequence[Mutant], results: Path, judges: Judging) -> None:
    """Judge some mutants in a copy of the repository."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder), judges)
        copy.check(left)
        for mutant in left:
            found = copy.judge(mutant)
            keep(results, found)
            print("{result:8} {seconds:5} s {path}:{line} {by}".format(**found), flush=True)


def main() -> int:
    """The exit status: 1 if fewer than 95% are killed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", type=int, default=100, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="+", choices=[*ROOMS, *WHOLE], default=list(ROOMS))
    parser.add_argument("--lines", type=Path, help="coverage's data: which test runs which line")
    parser.add_argument("--times", type=Path, help="a JUnit report: how long each test takes")
    parser.add_argument(
        "--seconds",
        type=float,
        default=60,
        help="tests of a line are taken until they take so long",
    )
    parser.add_argument(
        "--patience", type=float, default=1, help="what hangs has so many times a minute"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that judge")
    parser.add_argument(
        "--results", type=Path, default=Path("mutants.jsonl"), help="one line each, appended"
    )
    parser.add_argument("--again", action="store_true", help="again those that survived or hang")
    args = parser.parse_args()
    if not args.lines and set(args.rooms) & set(WHOLE):
        parser.error(f"--rooms {' '.join(WHOLE)} need --lines and --times")
    drawn, known = draw(args.rooms, args.seed)[: args.draw], read(args.results)
    left = [m for m in drawn if m not in known or (args.again and known[m]["result"] != "killed")]
    lines = Lines(args.lines, args.times) if args.lines else None
    judging = Judging(lines, args.seconds, args.patience)
    parts = [left[n :: args.jobs] for n in range(args.jobs)]
    for _ in in_forks(parts, partial(_work, results=args.results, judges=judging), args.jobs):
        pass
    known = read(args.results)
    judged = [known[mutant] for mutant in drawn]
    print(report(judged))
    return int(sum(x["result"] != "survived" for x in judged) < 0.95 * len(judged))


if __name__ == "__main__":
    sys.exit(main())
