"""Run every legal combination of two or three choices, and compare each case with one process.

    python -m tools.proofs.cover --strength 2 --results pairs.jsonl
    python -m tools.proofs.cover --strength 3 --results triples.jsonl
    python -m tools.proofs.cover --case '{"pp": "2", "schedule": "zb-v"}'

A case is a whole run of `pretrain` in processes over gloo. What it computes must be what one
process computes: in float64 all losses, gradient norms, evaluations, weights and optimizer states
to 1e-7 of the largest. Which values go together is asked of the checks of a launch; a combination
without a legal case is counted as refused, with the sentence that refuses it. Results are appended
to a file, so that a run that was cut off goes on where it stood.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from math import comb
from pathlib import Path
from typing import Any, Literal

import torch

from megapipe.flags.parse import parse, run
from tools.proofs.cover.array import Array, Row
from tools.proofs.cover.choices import (
    CHOICES,
    FEW,
    MOST,
    PLAIN,
    choices_named,
    problems,
    world_size,
)
from tools.proofs.cover.judge import SECONDS, Runs, Verdict, warm
from tools.proofs.jobs import in_forks, keep, kept


def array(
    strength: int, seed: int, begun: dict[str, Any] | None = None, at: Path | None = None
) -> Array:
    """Return the array of a strength, whose first rows are the arrays of smaller strengths.

    Args:
        begun: an array to begin with, as it stands in its file.
        at: file of the array. Rows that are made so far stand in one with ".part": --begin-with
            takes it.
    """

    @cache
    def asked(values: tuple[str, ...], most: int) -> tuple[str, ...]:
        return problems(dict(zip(CHOICES, values, strict=True)), most)

    def said(row: Row, fixed: Row) -> tuple[str, ...]:
        most = min(MOST, max(FEW, world_size(PLAIN | fixed)))
        return asked(tuple(row[name] for name in CHOICES), most)

    def said_of_many(row: Row, fixed: Row) -> tuple[str, ...]:
        return asked(tuple(row[name] for name in CHOICES), MOST)

    made = Array(CHOICES, (said, said_of_many), choices_named, seed)
    if begun is not None:
        refused = {
            tuple(_pair(part) for part in key.split(" x ")): why
            for key, why in begun["refused"].items()
        }
        made.take([PLAIN | row for row in begun["rows"]], refused)
        print(f"{len(made.rows)} of {len(begun['rows'])} cases that are kept are legal", flush=True)

    def say(text: str) -> None:
        print(text, flush=True)
        _write(made, part)

    part = at and at.with_suffix(".part")
    made.extend(strength, say)
    _write(made, at)
    return made


def _write(made: Array, at: Path | None) -> None:
    if at is not None:
        rows = [json.loads(short(row)) for row in made.rows]
        whole = at.with_suffix(".new")
        whole.write_text(json.dumps({"rows": rows, "refused": _named(made)}))
        whole.replace(at)


def _named(made: Array) -> dict[str, str]:
    return {
        " x ".join(f"{name} {value}" for name, value in key): why
        for key, why in made.refused.items()
    }


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition(" ")
    return name, value


def _judged(row: Row, runs: Runs) -> dict[str, Any]:
    try:
        return asdict(runs.judge(row))
    except Exception:
        return asdict(Verdict("crashes", (traceback.format_exc(),)))


def short(row: Row) -> str:
    """Return the text after --case that runs a row again: its unusual values."""
    return json.dumps({name: value for name, value in row.items() if value != PLAIN[name]})


@dataclass(frozen=True)
class Flags:
    """Run every legal combination of two or three choices, and compare each with one process."""

    strength: Literal[2, 3] = 2
    """Choices that are combined."""
    seed: int = 0
    """Of the array."""
    jobs: int = 2
    """Cases at a time."""
    results: str | None = None
    """A line for each case, appended."""
    array: str | None = None
    """Where the rows are kept between starts."""
    begin_with: str | None = None
    """An array of fewer choices or values, to which rows are added."""
    case: str | None = None
    """Run this one case, as printed."""
    shrink: bool = False
    """Make the case that differs as small as it goes."""
    first: bool = False
    """Stop at the first case that is not as one process."""
    seconds: float = SECONDS
    """Limit of each start of a case."""
    folder: str | None = None
    """Keep here what runs leave, among it those of one process."""
    references: str | None = None
    """A --folder whose runs of one process are trusted if a case agrees."""


def main(argv: Sequence[str]) -> int:
    """Make the array, run it, and report the findings. Returns the exit status."""
    options = parse(Flags, argv)
    torch.set_num_threads(1)
    warm()
    with tempfile.TemporaryDirectory(prefix="cover-") as folder:
        references = Path(options.references) if options.references else None
        runs = Runs(Path(options.folder or folder), options.seconds, references)
        if options.case:
            return _one(PLAIN | json.loads(options.case), runs, shrink=options.shrink)
        return _all(options, runs)


def _smallest(row: Row, runs: Runs) -> Row:
    """Return a case with the fewest unusual values that is still not as one process."""
    again = True
    while again:
        again = False
        for name in [name for name, value in row.items() if value != PLAIN[name]]:
            smaller = row | {name: PLAIN[name]}
            if not problems(smaller) and (verdict := runs.judge(smaller)).result != "same":
                row, again = smaller, True
                print(
                    verdict.result,
                    *verdict.found[:2],
                    f"--case '{short(row)}'",
                    sep="\n  ",
                    flush=True,
                )
    return row


def _one(row: Row, runs: Runs, *, shrink: bool) -> int:
    if found := problems(row):
        print("refused:", *found, sep="\n")
        return 2
    verdict = runs.judge(row)
    print(verdict.result, *verdict.found, f"{verdict.seconds:.1f} s", sep="\n")
    if shrink and verdict.result != "same":
        print(f"--case '{short(_smallest(row, runs))}'")
    return int(verdict.result != "same")


def _all(options: Flags, runs: Runs) -> int:
    begun = time.monotonic()
    made, refused = _rows(options)
    print(f"{len(made)} cases, made in {time.monotonic() - begun:.0f} s", flush=True)
    known = {short(PLAIN | found.pop("case")): Verdict(**found) for found in kept(options.results)}
    left = [row for row in made if short(row) not in known]
    for row, answer in in_forks(left, partial(_judged, runs=runs), options.jobs):
        known[short(row)] = verdict = Verdict(**answer)
        keep(options.results, {"case": json.loads(short(row)), **answer})
        if verdict.result != "same":
            print(verdict.result, *verdict.found, f"--case '{short(row)}'", sep="\n  ", flush=True)
            if options.first:
                os._exit(1)
        elif len(known) % 20 == 0:
            print(
                f"{len(known)} of {len(made)} cases, {time.monotonic() - begun:.0f} s", flush=True
            )
    verdicts = [known[short(row)] for row in made]
    _report(options.strength, made, verdicts, refused)
    return int(any(verdict.result != "same" for verdict in verdicts))


def _rows(options: Flags) -> tuple[list[Row], dict[str, str]]:
    """Return the rows of the array, and the refused combinations with the sentences that refuse
    them.
    """
    at = Path(options.array) if options.array else None
    if at and at.exists():
        there = json.loads(at.read_text())
        return [PLAIN | row for row in there["rows"]], there["refused"]
    begun = json.loads(Path(options.begin_with).read_text()) if options.begin_with else None
    made = array(options.strength, options.seed, begun, at)
    return made.rows, _named(made)


def _report(
    strength: int, rows: Sequence[Row], verdicts: Sequence[Verdict], refused: dict[str, str]
) -> None:
    values = sum(map(len, CHOICES.values()))
    covered = Array(CHOICES, (lambda row, fixed: (),), lambda text: set())
    covered.rows = [
        row for row, verdict in zip(rows, verdicts, strict=True) if verdict.result == "same"
    ]
    counts = Counter(verdict.result for verdict in verdicts)
    said = Counter(why.partition("\n")[0] for why in refused.values())
    print("\nrefused combinations, by what is said:")
    for why, count in said.most_common():
        print(f"  {count:4} {why[:160]}")
    silent = [key for key, why in refused.items() if "--" not in why]
    print(
        f"\n{len(CHOICES)} choices, {values} values; {comb(len(CHOICES), strength)} sets of "
        f"{strength} choices\n"
        f"{covered.legal(strength)} legal combinations of {strength} values in {len(rows)} cases, "
        f"{len(refused)} refused, {len(silent)} of them without a flag's name\n"
        f"same {counts['same']}, differ {counts['differs']}, crash {counts['crashes']}, hang "
        f"{counts['hangs']}"
    )


if __name__ == "__main__":
    run(main)
