"""What holds for every schedule, size and cost."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from megapipe.schedule import (
    SCHEDULES,
    Costs,
    Exchange,
    Kind,
    Schedule,
    ScheduleError,
    Step,
    build,
    forward_only,
    from_csv,
    from_json,
    lower,
    simulate,
    to_csv,
    to_json,
    verify,
    verify_programs,
)

NIGHTLY = bool(os.environ.get("MEGAPIPE_NIGHTLY"))  # scripts/nightly.sh draws many
FIXED = [name for name in SCHEDULES if name != "zb-auto"]
amounts = st.one_of(st.integers(0, 20).map(float), st.floats(0.01, 100))


def outcome(make: Callable[[], Schedule]) -> Schedule | str:
    """A schedule, or the sentence that refuses it."""
    try:
        return make()
    except ScheduleError as error:
        return str(error)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(FIXED))
    ranks, microbatches = draw(st.integers(1, 7)), draw(st.integers(1, 16))
    chunks = draw(st.integers(1, 4)) if SCHEDULES[name].chunks is None else None
    made = outcome(lambda: build(name, ranks, microbatches, chunks=chunks))
    if isinstance(made, str):
        assert "the nearest is" in made
        reject()
    return made


@st.composite
def costs_for(draw: st.DrawFn, schedule: Schedule) -> Costs:
    stages = st.lists(amounts, min_size=schedule.placement.chain, max_size=schedule.placement.chain).map(tuple)
    f, b, w = (draw(st.one_of(amounts, stages)) for _ in range(3))
    return Costs(f, b, w, comm=draw(st.one_of(st.just(0.0), amounts)))


def singly(item: Step | Exchange) -> list[Step | Exchange]:
    return [Exchange((message,)) for message in item.messages] if isinstance(item, Exchange) else [item]


@settings(max_examples=2000 if NIGHTLY else 80, deadline=None)
@given(st.data())
def test_every_schedule_is_valid_under_every_cost(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    costs = data.draw(costs_for(schedule))
    verify(schedule, costs=costs)

    clock = simulate(schedule, costs)
    place = schedule.placement
    for rank, row in enumerate(schedule.ranks):
        work = sum(costs.of_step((item,), place) for step in row for item in step)
        assert clock.busy[rank] == pytest.approx(work, abs=1e-9 * (1 + clock.makespan))
        assert clock.curves[rank][-1][1] == pytest.approx(0, abs=1e-9)
        assert clock.idle[rank] >= -1e-9 * (1 + clock.makespan)

    # Also where a library posts the messages of an exchange one by one, each waiting for its peer.
    programs = lower(schedule, costs)
    verify_programs(schedule, [tuple(one for item in program for one in singly(item)) for program in programs])

    # Every output that another rank takes is sent once and received once, whatever the clock says.
    messages = Counter(
        message
        for rank, program in enumerate(programs)
        for item in program
        if isinstance(item, Exchange)
        for message in item.messages
        if message.src == rank
    )
    assert set(messages.values()) <= {1}
    assert len(messages) == sum(clock.sent)


@settings(max_examples=600 if NIGHTLY else 30, deadline=None)
@given(st.data())
def test_stages_run_their_microbatches_in_order(data: st.DataObject) -> None:
    """So gradients are summed in one order, and losses do not depend on the schedule."""
    schedule = data.draw(schedules())
    for row in schedule.ranks:
        runs: dict[tuple[str, int], list[int]] = {}
        for item in (x for step in row for x in step):
            kind = "F" if item.kind is Kind.F else "W" if item.kind in (Kind.W, Kind.BW) else "B"
            runs.setdefault((kind, item.stage), []).append(item.microbatch)
        for key, microbatches in runs.items():
            assert microbatches == sorted(microbatches), key


@settings(max_examples=600 if NIGHTLY else 30, deadline=None)
@given(st.data())
def test_files_hold_the_whole_schedule_and_forwards_alone_can_run(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    assert from_json(to_json(schedule)) == schedule
    for torch in (False, True)[: 3 - schedule.placement.num_chains]:  # torch has one copy of a model
        read = from_csv(to_csv(schedule, torch=torch))
        assert (read.placement, read.ranks) == (schedule.placement, schedule.ranks)
    evaluation = forward_only(schedule)
    verify_programs(evaluation, lower(evaluation, data.draw(costs_for(schedule))))


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet='0123FBWI,;()\n"{}[] :-', max_size=60))
@example("0F0,0BW0\n")
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (from_csv, from_json):
        made = outcome(lambda read=read: read(text))
        assert not isinstance(made, str) or made.startswith("schedule.")


def test_generating_lowering_and_verifying_is_fast() -> None:
    """64 ranks x 1024 microbatches take 10 s on a quiet core, this a sixteenth: not a power more."""
    start = time.process_time()
    schedule = build("zb-h1", 64, 64)
    lower(schedule)
    verify(schedule)
    assert time.process_time() - start < 10


def test_schedules_work_without_torch() -> None:
    program = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocker())
import megapipe.schedule as schedules
for name in ("1f1b", "zb-v", "v-half", "dualpipe"):
    table = schedules.build(name, 4, 8)
    schedules.verify(table)
    schedules.simulate(table)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
