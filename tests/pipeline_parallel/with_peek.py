"""A program in which there is one kind of pass more: Q, of a microbatch, on a lane of its own, beside F and before B.

It is added as anyone would add one: a row in `schedule/kinds.py`, here put into its text before the package is loaded,
a transform, an entry in PASSES. What becomes of it is printed as JSON; test_made_up_kind.py says what it should be.
"""

import importlib.util
import json
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

ROWS = [
    ('    DP = "dp"\n', '    DP = "dp"\n    SIDE = "side"\n'),
    ('    REDUCED = "reduced gradient"\n', '    REDUCED = "reduced gradient"\n    PEEKED = "what was seen"\n'),
    ("    Need(Made.GRADIENT, Where.NEXT),\n", "    Need(Made.GRADIENT, Where.NEXT),\n    _PEEK,\n"),
    ("_LOSS = ", "_PEEK = Need(Made.PEEKED, Where.OWN, optional=True)\n_LOSS = "),
    (
        '    G = "G", ',
        '    Q = "Q", Traits("peek", "#123456", "e", (Need(Made.OUTPUT, Where.OWN),), (Made.PEEKED,), lane=Lane.SIDE)\n'
        '    G = "G", ',
    ),
]


class Kinds:
    """Finds `megapipe.schedule.kinds` in a file that has the rows."""

    def __init__(self, folder):
        text = Path(importlib.util.find_spec("megapipe").origin).with_name("schedule").joinpath("kinds.py").read_text()
        for old, new in ROWS:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        self.path = Path(folder) / "kinds.py"
        self.path.write_text(text)

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, self.path) if name == "megapipe.schedule.kinds" else None


sys.meta_path.insert(0, Kinds(tempfile.mkdtemp()))

import torch  # noqa: E402

from megapipe.errors import ScheduleError  # noqa: E402
from megapipe.pipeline_parallel.execute import execute  # noqa: E402
from megapipe.pipeline_parallel.families import PASSES  # noqa: E402
from megapipe.pipeline_parallel.messages.messenger import Messenger  # noqa: E402
from megapipe.pipeline_parallel.passes.begin import Begun  # noqa: E402
from megapipe.pipeline_parallel.stopwatch import Stopwatch, ran_by_all  # noqa: E402
from megapipe.pipeline_parallel.threads import run_threads  # noqa: E402
from megapipe.schedule import Costs, Kind, Pass, build, lower, simulate, verify  # noqa: E402
from megapipe.schedule.views.draw import to_svg  # noqa: E402
from megapipe.schedule.views.perfetto import to_perfetto  # noqa: E402
from megapipe.schedule.views.terminal import to_terminal  # noqa: E402
from tests.pipeline_parallel.relay import RelayStage  # noqa: E402

M = 4


def with_peek(schedule, last=0, only=range(M)):
    """The transform: Q right behind every F of the microbatches `only`, the last `last` of each row at its end."""
    rows = []
    for row in schedule.ranks:
        new = [
            s
            for step in row
            for s in (step, *((x._replace(kind=Kind.Q),) for x in step if x.kind is Kind.F and x.microbatch in only))
        ]
        late = [new.pop(max(i for i, s in enumerate(new) if s[0].kind is Kind.Q)) for _ in range(last)]
        rows.append((*new, *late))
    return replace(schedule, ranks=tuple(rows))


PASSES[Kind.Q] = lambda stage, microbatch, _: stage.peek(microbatch)


class Stage(RelayStage):
    """A peek of a microbatch ends only when the forward of the next has begun: in line it would never end."""

    def __init__(self, number, placement):
        super().__init__(number, placement, lambda microbatch: 2)
        self.side = ThreadPoolExecutor(1)
        self.begun = [threading.Event() for _ in range(M)]
        self.peeked = []

    def forward(self, microbatch, x):
        self.begun[microbatch].set()
        return super().forward(microbatch, x)

    def peek(self, microbatch):
        def look():
            assert microbatch == M - 1 or self.begun[microbatch + 1].wait(20)
            self.peeked.append(microbatch)

        return Begun(self.side.submit(look).result)

    def backward(self, microbatch, grad, *, weights):
        assert microbatch in self.peeked, "its row needs it"
        return super().backward(microbatch, grad, weights=weights)


def main():
    plain = build("gpipe", 2, M)
    table = with_peek(plain)
    verify(table)
    try:
        verify(with_peek(plain, last=1))
        late = "nothing"
    except ScheduleError as error:
        late = str(error)
    verify(with_peek(plain, only=[1, 3]))
    costs = Costs(e=0.5)
    times = [simulate(x, costs) for x in (plain, table)]
    q = Pass(Kind.Q, 0, 1)

    def body(mesh):
        stages = {s: Stage(s, table.placement) for s in table.placement.stages_on(mesh.pp.rank)}
        watch = Stopwatch(torch.device("cpu"), table)
        comm = Messenger(mesh.pp, (2, 1, 3), torch.float32)
        execute(lower(table)[mesh.pp.rank], table.placement, stages, comm, watch=watch)
        ((*ran,),) = ran_by_all([watch], mesh.pp)
        return [stages[mesh.pp.rank].peeked, [[str(x.item) for x in row] for row in ran]]

    told = {
        "late": late,
        "makespans": [time.makespan for time in times],
        "busy": [time.busy for time in times],
        "of a peek": [times[1].start[q] - times[1].end[q._replace(kind=Kind.F)], times[1].end[q] - times[1].start[q]],
        "terminal": to_terminal(table, costs),
        "svg": to_svg(table, costs),
        "perfetto": sorted({x["cat"] for x in json.loads(to_perfetto(table))["traceEvents"] if x["ph"] == "X"}),
        "ran": run_threads(body, pp=2),
        "passes": [[str(x) for (x,) in row] for row in plain.ranks],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
