"""Tables of one training step as files: JSON has all of a table, CSV one row per rank of its steps.

    {"name": "1f1b", "pp": 1, "microbatches": 1, "rank_of": [0], "chain": 1,
     "ranks": [[["0F0"], ["0BW0"]]]}

Given costs, `to_json` also writes the costs, the makespan and the start of each step, so that
another clock can check this one. A reader of the table ignores these. CSV has two dialects,
recognised by their letters. F, B, W, BW is ours; F, I, W, B are the same passes in
torch.distributed.pipelining. In both an overlapped pair is (0F3;0BW1)OVERLAP_F_B, and empty cells
are skipped. Every table that is read is verified.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import Costs
from megapipe.schedule.costs_file import by_field
from megapipe.schedule.kinds import COPIES, Lane
from megapipe.schedule.passes import Kind, Pass, Placement, Schedule, Shared, Step
from megapipe.schedule.placement import placement_problems
from megapipe.schedule.simulate import simulate
from megapipe.schedule.verify import verify

_LANE = "lane"  # a stream, in files
_OURS = {kind.value: kind for kind in Kind}
_TORCH = {"F": Kind.F, "I": Kind.B, "W": Kind.W, "B": Kind.BW}
_PASS = re.compile(r"(\d{1,9})([A-Z]+)(\d{1,9})(?:\.(\d{1,4}))?", re.ASCII)
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
# Torch's runtime adds these to its tables. Here lowering and the optimizer decide them.
_NOT_A_PASS = re.compile(r"\d+((SEND|RECV)_[FB]\d+|UNSHARD|RESHARD|REDUCE_GRAD)", re.ASCII)


def load(path: str | Path) -> Schedule:
    """Read a table from a .json or .csv file and verify it.

    Raises: ScheduleError naming the file and every problem with its rank, line, step and pass.
    """
    path = Path(path)
    # By its name and not its content: a damaged JSON file must not be read as CSV.
    read = {".json": from_json, ".csv": from_csv}.get(path.suffix.lower())
    if read is None:
        raise ScheduleError(f"{path}: a schedule file ends in .json or .csv.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ScheduleError(f"{path}: {reason}.") from None
    return read(text, str(path))


def to_json(schedule: Schedule, costs: Costs | None = None, recipe: str | None = None) -> str:
    """Return the table as JSON, one line for each rank.

    Args:
        costs: also write these costs, the makespan and each step's start; None for the order alone.
        recipe: also write this text, the arguments of `schedules show` for this table, if not None.
    """
    place = schedule.placement
    head: dict[str, Any] = {
        "name": schedule.name,
        "pp": place.num_ranks,
        "microbatches": schedule.num_microbatches,
        "rank_of": list(place.rank_of),
        "chain": place.chain,
    }
    optional = {
        "vocabulary": place.vocabulary,
        "depths": place.depths,
        "cuts": list(schedule.cuts),
        "documents": list(map(list, schedule.documents)),
        "shared": [
            {_LANE: x.lane.value, "ranks": list(x.ranks), "order": [*map(str, x.order)]}
            for x in schedule.shared
        ],
    }
    head |= {name: value for name, value in optional.items() if value}
    ranks = _lines([[*map(str, step)] for step in row] for row in schedule.ranks)
    more = ""
    if costs is not None:
        time = simulate(schedule, costs)
        start = _lines([time.start[step[0]] for step in row] for row in schedule.ranks)
        more += f',\n"costs": {json.dumps(by_field(costs))}'
        more += f',\n"makespan": {json.dumps(time.makespan)}, "start": {start}'
    if recipe:
        more += f',\n"recipe": {json.dumps(recipe)}'
    return f'{json.dumps(head)[:-1]}, "ranks": {ranks}{more}}}\n'


def _lines(rows: Iterable[object]) -> str:
    """Return a JSON list with one item on each line."""
    return "[\n  " + ",\n  ".join(map(json.dumps, rows)) + "\n]"


def from_json(text: str, source: str = "schedule.json") -> Schedule:
    """Return the verified table of a `to_json` text; `source` names the text in ScheduleErrors."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScheduleError(f"{source}: not JSON: {error}") from None
    _refuse(source, _shape_problems(data))
    rows: list[tuple[Step, ...]] = []
    problems = []
    for rank, row in enumerate(data["ranks"]):
        steps: list[Step] = []
        for i, cell in enumerate(row):
            step = _step(cell, _OURS)
            if isinstance(step, str):
                problems.append(f"rank {rank}, step {i}: {', '.join(cell)}: {step}")
            else:
                steps.append(step)
        rows.append(tuple(steps))
    _refuse(source, problems)
    shared = []
    for lane in data.get("shared", ()):
        order = _step(lane["order"], _OURS)
        if isinstance(order, str):
            ranks = ", ".join(map(str, lane["ranks"]))
            problems.append(f"the {lane[_LANE]} stream that ranks {ranks} share: {order}")
        else:
            shared.append(Shared(Lane(lane[_LANE]), tuple(lane["ranks"]), order))
    _refuse(source, problems)
    vocabulary = data.get("vocabulary", False)
    depths = data.get("depths", 0)
    placement = Placement(tuple(data["rank_of"]), data["chain"], vocabulary, depths)
    schedule = Schedule(
        data["name"],
        placement,
        data["microbatches"],
        tuple(rows),
        cuts=tuple(data.get("cuts", ())),
        documents=tuple(map(tuple, data.get("documents", ()))),
        shared=tuple(shared),
    )
    verify(replace(schedule, name=source))
    return schedule


def to_csv(schedule: Schedule, *, torch: bool = False) -> str:
    """Return the table as CSV: one row per rank, filled up with empty cells to one length.

    Args:
        torch: use the names of passes of torch.distributed.pipelining, not this package's.
    Raises: ScheduleError for a table that CSV, or torch's names, cannot express.
    """
    letters = {kind: letter for letter, kind in (_TORCH if torch else _OURS).items()}
    # Torch's runtime updates by itself, and gathers and sums over data parallelism.
    by_torch = {kind for kind in Kind if kind.traits.per_stage or kind.traits.lane is Lane.DP}
    lost = sorted(schedule.kinds - letters.keys() - by_torch)
    of_torch = "and torch.distributed.pipelining has"
    # Equal shares of a sequence may differ in their last bits.
    cuts = {round(cut / sum(schedule.cuts), 9) for cut in schedule.cuts}
    place = schedule.placement
    cannot = {
        f"cuts microbatches in slices, {of_torch} none. Write our own letters.": torch and cuts,
        f"has passes {', '.join(lost)}, {of_torch} none. Write our own letters.": lost,
        f"has two copies of the model, {of_torch} one.": torch and place.num_chains > 1,
        "says in which order ranks share a stream, which CSV cannot. Write JSON.": schedule.shared,
        "says where documents begin, which CSV cannot. Write JSON.": schedule.documents,
        "has multi-token prediction, which CSV cannot. Write JSON.": place.depths,
        "has uneven slices, which CSV cannot say. Write JSON, or use --cuts equal.": len(cuts) > 1,
    }
    for reason, there in cannot.items():
        if there:
            raise ScheduleError(f"{schedule.name} {reason}")
    table = schedule.without(schedule.kinds - letters.keys())
    rows = [[_cell(step, letters) for step in row] for row in table.ranks]
    width = max(map(len, rows))
    lines = (",".join(row + [""] * (width - len(row))) for row in rows)
    return "".join(f"{line}\n" for line in lines)


def _cell(step: Step, letters: Mapping[Kind, str]) -> str:
    texts = ";".join(f"{x.stage}{letters[x.kind]}{x.of}" for x in step)
    return texts if len(step) == 1 else f"({texts})OVERLAP_F_B"


def from_csv(text: str, source: str = "schedule.csv") -> Schedule:
    """Read a table from CSV text and verify it.

    Names of passes may be this package's or torch.distributed.pipelining's. Placement and number of
    microbatches follow from the passes. Torch's cells for sends, receives and shards are skipped.

    Args:
        source: file name, for errors. Without its folder it becomes the schedule's name.
    """
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text))]
    except csv.Error as error:
        raise ScheduleError(f"{source}: not CSV: {error}") from None
    while rows and not any(rows[-1]):
        rows.pop()
    letters = _TORCH if _is_torch(rows) else _OURS
    steps: list[list[Step]] = []
    problems = [] if rows else ["the file is empty"]
    for r, row in enumerate(rows):
        steps.append([])
        count = 0  # as `verify` counts steps: from 0, without empty cells
        for cell in row:
            if not cell or _NOT_A_PASS.fullmatch(cell):
                continue
            pair = _PAIR.fullmatch(cell)
            step = _step(list(pair.groups()) if pair else [cell], letters)
            if isinstance(step, str):
                short = cell if len(cell) <= 40 else f"{cell[:36]} ..."
                problems.append(f"rank {r} (line {r + 1}), step {count}: {short}: {step}")
            else:
                steps[-1].append(step)
            count += 1
        if not any(row):
            problems.append(f"rank {r} (line {r + 1}) is empty; each line is one rank")
    _refuse(source, problems)
    placement, microbatches = _infer(steps, source)
    numbers = [x.slice for row in steps for step in row for x in step if x.slice is not None]
    # A row of passes does not give the lengths of slices, so they are equal.
    cuts = (1.0,) * (1 + max(numbers, default=-1))
    ranks = tuple(map(tuple, steps))
    schedule = Schedule(Path(source).name, placement, microbatches, ranks, cuts=cuts)
    try:
        verify(replace(schedule, name=source))
    except ScheduleError as error:
        hints = "".join(f"\n  {line}" for line in _cut_off(schedule))
        raise ScheduleError(str(error) + hints) from None
    return schedule


def _cut_off(schedule: Schedule) -> Iterator[str]:
    """Yield a hint for each rank whose row lacks passes only at its end, as if the line was cut."""
    place = schedule.placement
    m = schedule.num_microbatches
    for rank, row in enumerate(schedule.ranks):
        passes = [x for step in row for x in step if x.kind.is_forward or x.kind.is_backward]
        have = {(x.stage, x.kind.is_forward, x.microbatch) for x in passes}
        last = {(stage, forward): microbatch for stage, forward, microbatch in sorted(have)}
        # A huge number of microbatches is another mistake, which `verify` has reported.
        if m > len(passes):
            continue
        of_rank = product(place.stages_on(rank), (True, False), range(m))
        lacking = [
            (stage, forward, microbatch)
            for stage, forward, microbatch in of_rank
            if schedule.chain_of(microbatch) == stage // place.chain
            and (stage, forward, microbatch) not in have
        ]
        # An editor or a full disk cuts the end of a line, so what it lacks comes last.
        at_end = all(number > last.get((stage, forward), -1) for stage, forward, number in lacking)
        if lacking and at_end:
            where = f"rank {rank} (line {rank + 1})"
            yield f"{where} ends early, after {len(row)} steps; is the line cut off?"


def _is_torch(rows: list[list[str]]) -> bool:
    """Return whether rows of CSV use torch's names of passes: I for B, and B for BW."""
    found = {match[2] for row in rows for cell in row for match in _PASS.finditer(cell)}
    return "I" in found or ("B" in found and not found & {"W", "BW"})


def _step(texts: list[str], letters: dict[str, Kind]) -> Step | str:
    """Return the step of a cell's texts, with kinds named by `letters`; or an error's sentence."""
    step = []
    for text in texts:
        match = _PASS.fullmatch(text.strip())
        if match is None and all(_PASS.fullmatch(x.strip()) for x in text.split(";") if x):
            return "separate passes by commas, not semicolons"
        if match is None:
            rule = "a pass is stage, kind, microbatch, such as 2F0, or 2F0.1 of its slice 1"
            return f"not a pass; {rule}"
        if match[2] not in letters:
            return f"unknown letter {match[2]}; there are {', '.join(letters)}"
        piece = None if match[4] is None else int(match[4])
        step.append(Pass(letters[match[2]], int(match[1]), int(match[3]), piece))
    return tuple(step)


def _infer(rows: list[list[Step]], source: str) -> tuple[Placement, int]:
    """Return (placement, number of microbatches) of rows; `source` names them in errors."""
    rank_of: dict[int, int] = {}
    through: dict[int, set[int]] = {}
    twice: dict[tuple[int, int], str] = {}
    for rank, row in enumerate(rows):
        for i, item in ((i, x) for i, step in enumerate(row) for x in step):
            home = rank_of.setdefault(item.stage, rank)
            if not item.kind.traits.per_stage:
                through.setdefault(item.microbatch, set()).add(item.stage)
            if home != rank:
                where = f"rank {rank} (line {rank + 1}), step {i}, {item}"
                also = f"stage {item.stage} is on rank {home} (line {home + 1}) too"
                twice.setdefault((item.stage, rank), f"{where}: {also}; a stage has one rank")
    _refuse(source, twice.values())
    stages = len(rank_of)
    if not stages:
        raise ScheduleError(f"{source}: the file has no pass.")
    top = max(rank_of)
    if top >= stages:
        gap = next(s for s in range(stages + 1) if s not in rank_of)
        raise ScheduleError(f"{source}: no rank runs stage {gap}, but there is a stage {top}.")
    if not through:
        first = next(x for row in rows for step in row for x in step)
        raise ScheduleError(
            f"{source}: {first} is of a stage as a whole, "
            "and the file has no pass of a microbatch, such as 0F0."
        )
    # In DualPipe the first and the last microbatch run through different copies of the model.
    half = set(range(stages // 2))
    ends = through[min(through)], through[max(through)]
    two = stages % 2 == 0 and ends == (half, set(rank_of) - half)
    shared = any(item.kind.traits.at for row in rows for step in row for item in step)
    ranks = tuple(rank_of[stage] for stage in range(stages))
    return Placement(ranks, stages // 2 if two else stages, shared), max(through) + 1


def _is_list(x: object, fits: Callable[[Any], bool]) -> bool:
    return isinstance(x, list) and all(map(fits, x))


def _is_rank(x: object) -> bool:
    return type(x) is int and x >= 0


def _is_text(x: object) -> bool:
    return isinstance(x, str)


def _is_cell(step: object) -> bool:
    return bool(step) and _is_list(step, _is_text)


_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "name": ("a string", _is_text),
    "pp": ("a number from 1", lambda x: _is_rank(x) and x > 0),
    "microbatches": ("a number from 1", lambda x: _is_rank(x) and x > 0),
    "rank_of": ("the rank of each stage", lambda x: _is_list(x, _is_rank)),
    "chain": ("a number from 1", lambda x: _is_rank(x) and x > 0),
    "ranks": (
        "a list for each rank of steps, each a list of passes",
        lambda x: _is_list(x, lambda row: _is_list(row, _is_cell)),
    ),
    "shared": (
        f"a list of objects with {_LANE} ({' or '.join(sorted(COPIES))}), ranks and order, "
        "a list of passes",
        lambda x: _is_list(x, _is_lane),
    ),
    "vocabulary": ("true or false", lambda x: isinstance(x, bool)),
    "documents": (
        "a list for each microbatch, or one for all, of the slices that begin a document",
        lambda x: _is_list(x, lambda row: _is_list(row, lambda n: type(n) is int)),
    ),
}
_OPTIONAL = {"shared", "vocabulary", "documents"}


def _shape_problems(data: Any) -> Iterator[str]:
    """Yield a sentence for each part of parsed JSON that differs from the format of `to_json`."""
    if not isinstance(data, dict):
        needed = ", ".join(key for key in _FIELDS if key not in _OPTIONAL)
        yield f"an object with {needed} is needed"
        return
    bad = False
    for key, (rule, fits) in _FIELDS.items():
        if not fits(data[key]) if key in data else key not in _OPTIONAL:
            bad = True
            yield f"{key} must be {rule}"
    if bad:
        return
    if len(data["ranks"]) != data["pp"]:
        yield f"ranks has {len(data['ranks'])} lists, pp is {data['pp']}"
        return
    if not _is_list(data.get("cuts", []), lambda x: type(x) in (int, float) and 0 < x < 1e9):
        yield "cuts must be the lengths of a microbatch's slices, each above 0"
    depths = data.get("depths", 0)
    if not (type(depths) is int and 0 <= depths < data["chain"]):
        yield f"depths, the last stages of a chain, must be a number from 0 to {data['chain'] - 1}"
    yield from placement_problems(data["rank_of"], data["chain"], data["pp"])


def _refuse(source: str, problems: Iterable[str]) -> None:
    found = list(problems)
    if found:
        lines = "".join(f"\n  {problem}" for problem in found)
        raise ScheduleError(f"{source} cannot be read:{lines}")


def _is_lane(lane: object) -> bool:
    """Return whether a value of parsed JSON is a shared stream, in the form of `to_json`."""
    return (
        isinstance(lane, dict)
        and {_LANE, "ranks", "order"} <= lane.keys()
        and lane[_LANE] in list(COPIES)
        and _is_list(lane["ranks"], _is_rank)
        and _is_list(lane["order"], _is_text)
    )
