"""All schedules as one HTML page that simulates and verifies in the browser, without a server.

The page has the orders of passes for a grid of ranks and microbatches. It has a port of the clock,
of the fit of W to costs, of slices, and of `verify` for a pasted table. test_page.py compares the
port with this library, in node and in a real browser.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from megapipe.errors import ScheduleError
from megapipe.schedule.catalogue import SCHEDULES
from megapipe.schedule.kinds import LAYERS, Kind
from megapipe.schedule.passes import Schedule
from megapipe.schedule.views.scene import chunks

RANKS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
MICROBATCHES = (*range(1, 17), 18, 20, 24, 28, 32, 40, 48, 64)
MOST_RANKS = 64
MOST_MICROBATCHES = 256
"""Limits of one table, so that a browser loads the page quickly."""
CHUNKS = (2, 3, 4)
SLICES = (1, 2, 3, 4, 6, 8)
"""Stages of a rank where the schedule leaves a choice, and slices of a microbatch."""


class Case(NamedTuple):
    """One table of the HTML page.

    Attributes:
        name: the schedule's name.
        chunks: stages on each rank.
        ranks, microbatches: size of the table.
    """

    name: str
    chunks: int
    ranks: int
    microbatches: int


def grid(ranks: Iterable[int] = RANKS, microbatches: Iterable[int] = MICROBATCHES) -> list[Case]:
    """Return the cases of the HTML page: every schedule without a search, in many sizes.

    Raises: ScheduleError for a size above MOST_RANKS or MOST_MICROBATCHES.
    """
    sizes = [(p, m) for p in ranks for m in microbatches]
    if any(p > MOST_RANKS or m > MOST_MICROBATCHES for p, m in sizes):
        most = f"--pp {MOST_RANKS} and --microbatches {MOST_MICROBATCHES}"
        raise ScheduleError(
            f"a page has every table, of at most {most}; `compare` and `show` take more."
        )
    cases = []
    for name, entry in SCHEDULES.items():
        # A search depends on costs, which a reader of the page chooses later.
        if entry.searched:
            continue
        counts = (entry.chunks,) if entry.chunks else CHUNKS
        cases += [Case(name, v, p, m) for v in counts for p, m in sizes]
    return cases


def to_page(
    cases: list[Case], progress: Callable[[float, str], None] = lambda share, doing: None
) -> str:
    """Return an HTML document in which a reader chooses among the tables of these cases.

    Args:
        progress: called with the fraction of the work done, 0 to 1, and the name of the next
            schedule.
    """
    # A line for each case begins with its key, by which the browser finds it.
    lines = []
    for i, case in enumerate(cases):
        progress(i / len(cases), case.name)
        lines.append(f"{case.name} {case.chunks} {case.ranks} {case.microbatches} {_packed(case)}")
    progress(1.0, "")
    data = {
        "kinds": [[kind.value, kind.traits.meaning, kind.traits.colour] for kind in LAYERS],
        "letters": [kind.value for kind in Kind],
        "entries": {
            name: {"about": entry.about, "chunks": entry.chunks}
            for name, entry in SCHEDULES.items()
        },
        "p": sorted({case.ranks for case in cases}),
        "m": sorted({case.microbatches for case in cases}),
        "v": CHUNKS,
        "n": SLICES,
        # Rows repeat themselves, and browsers unpack gzip. No time, so that equal pages are equal.
        "tables": b64encode(gzip.compress("\n".join(lines).encode(), mtime=0)).decode(),
    }
    # `null` makes the template valid JavaScript by itself, for editors and tests.
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return template.replace("/*DATA*/null", json.dumps(data))


def _packed(case: Case) -> str:
    """Return a case as text: memory limit, stages per copy of the model, rank of each stage, rows.

    If the best of several tables depends on the reader's costs, the text has the rows of all of
    them. The page moves W passes into idle times as far as the memory limit allows; the limit 0
    stands for no moves. If there is no table, the text is "!" and the reason.
    """
    name, v, p, m = case
    entry = SCHEDULES[name]
    options = {}
    if not entry.chunks:
        options["chunks"] = v
    memory = 0
    try:
        # The browser puts W of these into waits under the reader's costs, within this memory.
        if entry.choices is not None:
            patterns, memory = entry.choices(p, m)
        else:
            patterns = [entry.generate(p, m, **options)]
    except ScheduleError as error:
        # A case is one line of the page's text, and the reader sees this in place of the picture.
        return "!" + str(error).replace("\n ", ";")
    place = patterns[0].placement
    tables = [",".join(_rows(pattern)) for pattern in patterns]
    return " ".join([str(memory), str(place.chain), ",".join(map(str, place.rank_of)), *tables])


def _rows(schedule: Schedule) -> Iterator[str]:
    """Yield each rank's row as text: one letter for each pass, and & before an overlapped pair.

    A letter gives the kind of pass and the stage: A B C D for F B W BW of the rank's first stage,
    E F G H for its second, and so on. Microbatches are left out, because forwards and backwards of
    a stage run in order, and W run in the order of their B:

        0F0 0F1 0B0 0W0 0F2&0B1  ->  AABC&AB
    """
    place = schedule.placement
    each = schedule.num_microbatches // place.num_chains
    chunk_of = chunks(place)
    for rank, row in enumerate(schedule.ranks):
        # The microbatches still to come, which prove that the page can number them again.
        due: dict[tuple[str, int], deque[int]] = {}
        for stage in place.stages_on(rank):
            first = stage // place.chain * each
            due["F", stage] = deque(range(first, first + each))
            due["B", stage] = due["F", stage].copy()
            due["W", stage] = deque()
        text = ""
        for step in row:
            text += "&" * (len(step) > 1)
            for kind, stage, microbatch, _ in step:
                letter = kind.value
                if kind is Kind.BW:
                    letter = "B"
                assert due[letter, stage].popleft() == microbatch
                if kind is Kind.B:
                    due["W", stage].append(microbatch)
                text += chr(65 + 4 * chunk_of[stage] + LAYERS.index(kind))
        yield text
