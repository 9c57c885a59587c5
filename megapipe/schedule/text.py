"""Schedules as files: JSON, which holds everything, and CSV, one row per rank and one cell per step.

    {"name": "1f1b", "pp": 1, "microbatches": 1, "rank_of": [0], "chain": 1, "ranks": [[["0F0"], ["0BW0"]]]}

`to_json` of a table with costs adds these, as a costs file has them, the makespan under them, and the start of each
step, so that another clock can check this one. A reader of the table does without.
CSV comes in two dialects, told apart by their letters: F, B, W, BW is ours, F, I, W, B are the same passes in
torch.distributed.pipelining. In both an overlapped pair is (0F3;0BW1)OVERLAP_F_B, and empty cells mean nothing.
What is read is verified.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import Costs
from megapipe.schedule.costs_file import by_field
from megapipe.schedule.kinds import COPIES, Lane
from megapipe.schedule.own import placement_problems
from megapipe.schedule.passes import Kind, Pass, Placement, Schedule, Shared, Step
from megapipe.schedule.simulate import simulate
from megapipe.schedule.verify import verify

_OURS = {kind.value: kind for kind in Kind}
_TORCH = {"F": Kind.F, "I": Kind.B, "W": Kind.W, "B": Kind.BW}
_PASS = re.compile(r"(\d{1,9})([A-Z]+)(\d{1,9})(?:\.(\d{1,4}))?", re.ASCII)
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
# What torch's runtime adds to its own tables; lowering and the optimizer decide these here.
_NOT_A_PASS = re.compile(r"\d+((SEND|RECV)_[FB]\d+|UNSHARD|RESHARD|REDUCE_GRAD)", re.ASCII)


def load(path: str | Path) -> Schedule:
    """Read and verify a .json or .csv file.

    Raises: ScheduleError naming the file and every problem with its rank, line, step and pass.
    """
    path = Path(path)
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
    """Return the table as JSON, one line for each rank, and with costs when each step starts under them.

    Args:
        recipe: the line that `show` takes to make the table again.
    """
    place = schedule.placement
    head = {
        "name": schedule.name,
        "pp": place.num_ranks,
        "microbatches": schedule.num_microbatches,
        "rank_of": list(place.rank_of),
        "chain": place.chain,
        **({"vocabulary": True} if place.vocabulary else {}),
        **({"depths": place.depths} if place.depths else {}),
        **({"cuts": list(schedule.cuts)} if schedule.cuts else {}),
        **({"documents": list(map(list, schedule.documents))} if schedule.documents else {}),
        **({"shared": [_lane_to_json(lane) for lane in schedule.shared]} if schedule.shared else {}),
    }
    ranks = _lines(map(_texts, schedule.ranks))
    times = "" if costs is None else _times(schedule, costs)
    times += f',\n"recipe": {json.dumps(recipe)}' if recipe else ""
    return f'{json.dumps(head)[:-1]}, "ranks": {ranks}{times}}}\n'


def _times(schedule: Schedule, costs: Costs) -> str:
    """Costs, the makespan, and by rank when each of its steps starts."""
    time = simulate(schedule, costs)
    start = _lines([time.start[step[0]] for step in row] for row in schedule.ranks)
    given = json.dumps(by_field(costs))
    return f',\n"costs": {given},\n"makespan": {json.dumps(time.makespan)}, "start": {start}'


def _texts(row: Iterable[Step]) -> list[list[str]]:
    return [[*map(str, step)] for step in row]


def _lines(rows: Iterable[object]) -> str:
    """A JSON list with a line for each row."""
    text = ",\n  ".join(map(json.dumps, rows))
    return f"[\n  {text}\n]"


def from_json(text: str, source: str = "schedule.json") -> Schedule:
    """Read and verify what `to_json` writes. `source` names the text in errors."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScheduleError(f"{source}: not JSON: {error}") from None
    _refuse(source, _shape_problems(data))
    cells = [[_step(step, _OURS) for step in row] for row in data["ranks"]]
    _refuse(
        source,
        (
            f"rank {r}, step {i}: {', '.join(data['ranks'][r][i])}: {step}"
            for r, row in enumerate(cells)
            for i, step in enumerate(row)
            if isinstance(step, str)
        ),
    )
    rows = tuple(tuple(step for step in row if not isinstance(step, str)) for row in cells)
    vocabulary, depths = data.get("vocabulary", False), data.get("depths", 0)
    placement = Placement(tuple(data["rank_of"]), data["chain"], vocabulary, depths)
    cuts, lanes = tuple(data.get("cuts", ())), [_shared(lane) for lane in data.get("shared", ())]
    _refuse(source, (lane for lane in lanes if isinstance(lane, str)))
    shared = tuple(lane for lane in lanes if not isinstance(lane, str))
    made = Schedule(data["name"], placement, data["microbatches"], rows, cuts=cuts, shared=shared)
    return _verified(replace(made, documents=tuple(map(tuple, data.get("documents", ())))), source)


def _shared(lane: dict[str, Any]) -> Shared | str:
    order = _step(lane["order"], _OURS)
    if isinstance(order, str):
        return f"the lane {lane['lane']} that ranks {', '.join(map(str, lane['ranks']))} share: {order}"
    return Shared(Lane(lane["lane"]), tuple(lane["ranks"]), order)


def to_csv(schedule: Schedule, *, torch: bool = False) -> str:
    """One row per rank, all of one length. `torch` writes the letters of torch.distributed.pipelining.

    Raises: ScheduleError for a table that those letters cannot say.
    """
    of_torch = "and torch.distributed.pipelining has"
    cannot = {
        f"cuts microbatches in slices, {of_torch} none. Write our own letters.": torch and schedule.cuts,
        f"shares the vocabulary, {of_torch} no passes for that. Write our own letters, or the table without the "
        "shares.": torch and schedule.placement.vocabulary,
        "says in which order ranks share a lane, which CSV cannot. Write JSON.": schedule.shared,
        "says where documents begin, which CSV cannot. Write JSON.": schedule.documents,
    }
    if why := [reason for reason, there in cannot.items() if there]:
        raise ScheduleError(f"{schedule.name} {why[0]}")
    letters = {kind: letter for letter, kind in (_TORCH if torch else _OURS).items()}
    width = max(len(row) for row in schedule.ranks)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in schedule.ranks:
        # Torch's runtime has no passes of a stage as a whole.
        texts = [[f"{x.stage}{letters[x.kind]}{x.of}" for x in s] for s in row if s[0].kind in letters]
        cells = [cell[0] if len(cell) == 1 else f"({';'.join(cell)})OVERLAP_F_B" for cell in texts]
        writer.writerow(cells + [""] * (width - len(row)))
    return out.getvalue()


def from_csv(text: str, source: str = "schedule.csv") -> Schedule:
    """Read and verify a table in either dialect; placement and microbatches follow from the passes.

    Torch's own send, receive and shard cells are skipped: programs are lowered here. `source` names the text in errors,
    its last part the schedule.
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
    slices = 1 + max((x.slice for row in steps for step in row for x in step if x.slice is not None), default=-1)
    # Lengths are not said in a row of passes: equal ones.
    schedule = Schedule(
        Path(source).name, placement, microbatches, tuple(tuple(row) for row in steps), cuts=(1.0,) * slices
    )
    try:
        return _verified(schedule, source)
    except ScheduleError as error:
        raise ScheduleError(str(error) + "".join(f"\n  {line}" for line in _cut_off(schedule))) from None


def _cut_off(schedule: Schedule) -> Iterator[str]:
    """Rows that lack only passes after the last they have of each kind: they end too early."""
    place, m = schedule.placement, schedule.num_microbatches
    for rank, row in enumerate(schedule.ranks):
        passes = [x for step in row for x in step if x.kind.is_forward or x.kind.is_backward]
        have = {(x.stage, x.kind.is_forward, x.microbatch) for x in passes}
        last = {(stage, forward): microbatch for stage, forward, microbatch in sorted(have)}
        lacking = [
            (stage, forward, microbatch)
            for stage in place.stages_on(rank)
            for forward in (True, False)
            for microbatch in range(m if m <= len(passes) else 0)
            if schedule.chain_of(microbatch) == stage // place.chain and (stage, forward, microbatch) not in have
        ]
        if lacking and all(number > last.get((stage, forward), -1) for stage, forward, number in lacking):
            yield f"rank {rank} (line {rank + 1}) ends early, after {len(row)} steps; is the line cut off?"


def _is_torch(rows: list[list[str]]) -> bool:
    """Does B mean the whole backward? It does beside an I, and where no W would complete it."""
    found = {match[2] for row in rows for cell in row for match in _PASS.finditer(cell)}
    return "I" in found or ("B" in found and not found & {"W", "BW"})


def _step(texts: list[str], letters: dict[str, Kind]) -> Step | str:
    """The passes of a step, or what is wrong with them."""
    step = []
    for text in texts:
        match = _PASS.fullmatch(text.strip())
        if match is None and all(_PASS.fullmatch(part.strip()) for part in text.split(";") if part):
            return "separate passes by commas, not semicolons"
        if match is None:
            return "not a pass; a pass is stage, kind, microbatch, such as 2F0, or 2F0.1 of its slice 1"
        if match[2] not in letters:
            return f"unknown letter {match[2]}; there are {', '.join(letters)}"
        step.append(Pass(letters[match[2]], int(match[1]), int(match[3]), None if match[4] is None else int(match[4])))
    return tuple(step)


def _infer(rows: list[list[Step]], source: str) -> tuple[Placement, int]:
    """Placement and number of microbatches of a table."""
    rank_of: dict[int, int] = {}
    through: dict[int, set[int]] = {}
    twice: dict[tuple[int, int], str] = {}
    for rank, row in enumerate(rows):
        for i, item in ((i, x) for i, step in enumerate(row) for x in step):
            home = rank_of.setdefault(item.stage, rank)
            if not item.kind.traits.per_stage:
                through.setdefault(item.microbatch, set()).add(item.stage)
            if home != rank:
                twice.setdefault(
                    (item.stage, rank),
                    f"rank {rank} (line {rank + 1}), step {i}, {item}: stage "
                    f"{item.stage} is on rank {home} (line {home + 1}) too; a stage has one rank",
                )
    _refuse(source, twice.values())
    stages = len(rank_of)
    if not stages:
        raise ScheduleError(f"{source}: the file has no pass.")
    if max(rank_of) >= stages:
        gap = next(s for s in range(stages + 1) if s not in rank_of)
        raise ScheduleError(f"{source}: no rank runs stage {gap}, but there is a stage {max(rank_of)}.")
    if not through:
        first = next(x for row in rows for step in row for x in step)
        raise ScheduleError(
            f"{source}: {first} is of a stage as a whole, and the file has no pass of a microbatch, such as 0F0."
        )
    # DualPipe: the first and the last microbatch run through different copies of the model.
    half = set(range(stages // 2))
    two = stages % 2 == 0 and through[min(through)] == half and through[max(through)] == set(rank_of) - half
    shared = any(item.kind.traits.at for row in rows for step in row for item in step)
    placement = Placement(tuple(rank_of[s] for s in range(stages)), stages // 2 if two else stages, shared)
    return placement, max(through) + 1


_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "name": ("a string", lambda x: isinstance(x, str)),
    "pp": ("a number from 1", lambda x: type(x) is int and x >= 1),
    "microbatches": ("a number from 1", lambda x: type(x) is int and x >= 1),
    "rank_of": ("the rank of each stage", lambda x: isinstance(x, list) and all(type(r) is int and r >= 0 for r in x)),
    "chain": ("a number from 1", lambda x: type(x) is int and x >= 1),
    "ranks": (
        "a list for each rank of steps, each a list of passes",
        lambda x: isinstance(x, list) and all(isinstance(row, list) and all(map(_is_cell, row)) for row in x),
    ),
    "shared": (
        f"a list of objects with lane ({' or '.join(sorted(COPIES))}), ranks and order, a list of passes",
        lambda x: isinstance(x, list) and all(map(_is_lane, x)),
    ),
    "vocabulary": ("true or false", lambda x: isinstance(x, bool)),
    "documents": (
        "a list for each microbatch, or one for all, of the slices that begin a document",
        lambda x: isinstance(x, list) and all(isinstance(row, list) and all(type(n) is int for n in row) for row in x),
    ),
}
_OPTIONAL = {"shared", "vocabulary", "documents"}


def _is_cell(step: object) -> bool:
    return isinstance(step, list) and bool(step) and all(isinstance(text, str) for text in step)


def _shape_problems(data: Any) -> Iterator[str]:
    if not isinstance(data, dict):
        yield f"an object with {', '.join(key for key in _FIELDS if key not in _OPTIONAL)} is needed"
        return
    there = {key: row for key, row in _FIELDS.items() if key in data or key not in _OPTIONAL}
    bad = [f"{key} must be {rule}" for key, (rule, fits) in there.items() if key not in data or not fits(data[key])]
    yield from bad
    if bad:
        return
    if len(data["ranks"]) != data["pp"]:
        yield f"ranks has {len(data['ranks'])} lists, pp is {data['pp']}"
        return
    cuts = data.get("cuts", [])
    if not (isinstance(cuts, list) and all(type(x) in (int, float) and 0 < x < 1e9 for x in cuts)):
        yield "cuts must be the lengths of a microbatch's slices, each above 0"
    depths = data.get("depths", 0)
    if not (type(depths) is int and 0 <= depths < data["chain"]):
        yield f"depths, the last stages of a chain, must be a number from 0 to {data['chain'] - 1}"
    yield from placement_problems(data["rank_of"], data["chain"], data["pp"])


def _refuse(source: str, problems: Iterable[str]) -> None:
    if found := list(problems):
        raise ScheduleError(f"{source} cannot be read:" + "".join(f"\n  {problem}" for problem in found))


def _verified(schedule: Schedule, source: str) -> Schedule:
    verify(replace(schedule, name=source))
    return schedule


def _lane_to_json(lane: Shared) -> dict[str, Any]:
    """The lane, its ranks and the order of its passes."""
    return {"lane": lane.lane.value, "ranks": list(lane.ranks), "order": [str(x) for x in lane.order]}


def _is_lane(lane: object) -> bool:
    """Is it what `_lane_to_json` writes?"""
    if not (isinstance(lane, dict) and {"lane", "ranks", "order"} <= lane.keys() and lane["lane"] in list(COPIES)):
        return False
    ranks = isinstance(lane["ranks"], list) and all(type(r) is int and r >= 0 for r in lane["ranks"])
    return ranks and isinstance(lane["order"], list) and all(isinstance(text, str) for text in lane["order"])
