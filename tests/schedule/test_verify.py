"""Every mistake in a table is refused in a sentence that names it."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from megapipe.schedule import (
    SCHEDULES,
    Costs,
    Exchange,
    Kind,
    Message,
    Pass,
    Placement,
    Program,
    Recorder,
    Schedule,
    ScheduleError,
    Step,
    build,
    forward_only,
    loop,
    lower,
    simulate,
    vee,
    verify,
    verify_programs,
)
from megapipe.schedule.families.vocabulary.shares import with_vocabulary

Rows = list[list[Step]]


def edited(name: str, edit: Callable[[Rows], object], p: int = 2, m: int = 4) -> Schedule:
    """A valid schedule with one mistake made by `edit`."""
    schedule = build(name, p, m)
    rows = [list(row) for row in schedule.ranks]
    edit(rows)
    return replace(schedule, name="mine", ranks=tuple(tuple(row) for row in rows))


def at(rows: Rows, text: str) -> tuple[int, int]:
    return next((r, i) for r, row in enumerate(rows) for i, step in enumerate(row) if text in map(str, step))


def remove(rows: Rows, text: str) -> Step:
    rank, i = at(rows, text)
    return rows[rank].pop(i)


def swap(rows: Rows, one: str, two: str) -> None:
    (r, i), (q, j) = at(rows, one), at(rows, two)
    rows[r][i], rows[q][j] = rows[q][j], rows[r][i]


def sentence(schedule: Schedule, memory: float | None = None) -> str:
    with pytest.raises(ScheduleError) as caught:
        verify(schedule, memory=memory)
    return str(caught.value)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "zb-auto"])
def test_every_schedule_is_valid(name: str) -> None:
    verify(build(name, 4, 8))


THREE = [tuple(Pass(Kind.F, 0, i) for i in range(3))]
SPOILT = {
    "a missing F": ("zb-h1", lambda rows: remove(rows, "1F2"), ["rank 1: 1F2 is missing"]),
    "a missing W": ("zb-h1", lambda rows: remove(rows, "0W3"), ["rank 0: 0W3 is missing"]),
    "a missing BW": ("1f1b", lambda rows: remove(rows, "0BW3"), ["rank 0: 0BW3 is missing (or 0B3 and 0W3)"]),
    "a doubled pass": (
        *("zb-h1", lambda rows: rows[0].append(rows[0][0])),
        ["rank 0, step 12, 0F0: runs twice, first at step 0"],
    ),
    "a backward done whole and in parts": (
        *("zb-h1", lambda rows: rows[1].append((Pass(Kind.BW, 1, 0),))),
        ["rank 1, step 1, 1B0: 1BW0 at step 12 does it too"],
    ),
    "B before F": (
        *("zb-h1", lambda rows: swap(rows, "1F0", "1B0")),
        ["rank 1, step 0, 1B0: runs before 1F0 at step 1"],
    ),
    "W before B": ("zb-h1", lambda rows: swap(rows, "0W0", "0B0"), ["0W0: runs before 0B0"]),
    "a pass on the wrong rank": (
        *("zb-h1", lambda rows: rows[0].append(remove(rows, "1W3"))),
        ["rank 0, step 12, 1W3: stage 1 is on rank 1", "rank 1: 1W3 is missing"],
    ),
    "no such stage or microbatch": (
        *("1f1b", lambda rows: rows[0].extend([(Pass(Kind.F, 7, 0),), (Pass(Kind.F, 0, 9),)])),
        [
            "rank 0, step 8, 7F0: there is no stage 7, only 0 to 1",
            "rank 0, step 9, 0F9: there is no microbatch 9, only 0 to 3",
        ],
    ),
    "a microbatch on both copies of the model": (
        *("dualpipe", lambda rows: rows[0].append((Pass(Kind.F, 3, 0),))),
        ["3F0: microbatch 0 runs through chain 0, this stage is in another"],
    ),
    "a rank too few": ("1f1b", lambda rows: rows.pop(), ["the table has 1 ranks, its placement 2"]),
    "a step that is no pair": (
        *("gpipe", lambda rows: rows[0].__setitem__(slice(0, 3), THREE)),
        ["rank 0, step 0, 0F0 0F1 0F2: a step is one pass, or two of F, B, W and BW"],
    ),
}


@pytest.mark.parametrize("what", SPOILT)
def test_what_is_wrong_with_a_table_is_said_with_its_place(what: str) -> None:
    name, spoil, said = SPOILT[what]
    text = sentence(edited(name, spoil))
    assert all(part in text for part in said)


def test_ranks_that_wait_for_each_other() -> None:
    def turn(rows: Rows) -> None:
        swap(rows, "1BW0", "1F1")
        remove(rows, "0F1")
        rows[0].insert(2, (Pass(Kind.F, 0, 1),))

    assert sentence(edited("1f1b", turn, 2, 2)) == (
        "mine cannot proceed:\n  rank 0 waits at step 1, 0BW0, for 1BW0\n  rank 1 waits at step 1, 1F1, for 0F1"
    )


def test_a_memory_limit_exceeded() -> None:
    schedule = build("1f1b", 4, 8)
    verify(schedule, memory=4)
    assert sentence(schedule, memory=3) == (
        "1f1b is not valid:\n  rank 0, step 3, 0F3: over the memory limit of 3; the rank holds up to 4"
    )


@pytest.mark.parametrize(
    ("costs", "shares", "first", "other"),
    [
        (
            Costs(mem_b=1, mem_w=2),
            False,
            "rank 0, step 1, 0F1",
            "rank 1, step 1, 1B0",
        ),  # the end of a B takes more than it gives
        (Costs(s=0.5, t=0.5, mem_b=0.1, mem_w=0.1, mem_s=4), True, "rank 0, step 4, 0S0", "rank 1, step 3, 1S0"),
    ],
)
def test_a_limit_exceeded_by_another_pass_than_a_forward(costs: Costs, shares: bool, first: str, other: str) -> None:
    """It ended in StopIteration."""
    table = edited("zb-h1", lambda rows: None, 2, 2)
    table = with_vocabulary(table, costs) if shares else table
    with pytest.raises(ScheduleError) as caught:
        verify(table, memory=1.5, costs=costs)
    for place in (first, other):
        assert f"\n  {place}: over the memory limit of 1.5; the rank holds up to " in str(caught.value)


def test_a_rank_without_passes_holds_nothing() -> None:
    rows = (((Pass(Kind.F, 0, 0),), (Pass(Kind.BW, 0, 0),)), ())
    verify(Schedule("one", Placement((0, 1), 1), 1, rows), memory=2)


def test_two_passes_run_together_need_nothing_of_each_other() -> None:
    own = (Pass(Kind.F, 1, 0), Pass(Kind.BW, 1, 0))
    text = sentence(edited("1f1b", lambda rows: rows[1].__setitem__(slice(0, 2), [own])))
    assert "rank 1, step 0, 1BW0: runs before 1F0 at step 0" in text
    fold = tuple(Pass(Kind.F, s, 0) for s in (0, 1))
    rest = tuple((x,) for x in (Pass(Kind.BW, 1, 0), Pass(Kind.BW, 0, 0)))
    with pytest.raises(ScheduleError, match="rank 0 waits at step 0, 1F0, for 0F0"):
        verify(Schedule("fold", vee(1), 1, ((fold, *rest),)))


def test_more_microbatches_than_passes_is_one_problem() -> None:
    schedule = replace(build("1f1b", 2, 2), num_microbatches=10**9)
    assert "there are 1000000000 microbatches, but only 8 passes" in sentence(schedule)


def test_all_problems_are_told_at_once() -> None:
    def ruin(rows: Rows) -> None:
        remove(rows, "0F0")
        remove(rows, "1B2")
        rows[1].append(rows[1][0])

    assert len(sentence(edited("zb-h1", ruin)).splitlines()) == 1 + 3


def exchanges(programs: tuple[Program, ...], rank: int) -> list[int]:
    return [i for i, item in enumerate(programs[rank]) if isinstance(item, Exchange)]


def programs_error(schedule: Schedule, programs: list[Program]) -> str:
    with pytest.raises(ScheduleError) as caught:
        verify_programs(schedule, programs)
    return str(caught.value)


def test_a_program_that_sends_in_another_order_than_its_peer_receives() -> None:
    schedule = build("gpipe", 2, 2)
    first, second = lower(schedule)
    i, j = exchanges((first, second), 1)[:2]
    turned = list(second)
    turned[i], turned[j] = turned[j], turned[i]
    text = programs_error(schedule, [first, tuple(turned)])
    assert "message 0 from rank 0 to rank 1 is 0F0, received is 0F1" in text
    assert "rank 0 waits at item 1, 0F0:0->1" in text


def test_a_program_without_a_receive() -> None:
    schedule = build("gpipe", 2, 1)
    first, second = lower(schedule)
    text = programs_error(schedule, [first, tuple(item for item in second if item != Exchange((MESSAGE,)))])
    assert "rank 0 sends 1 messages to rank 1, which receives 0" in text
    assert "rank 1, item 0, 1F0: its input has not arrived" in text


MESSAGE = Message(Pass(Kind.F, 0, 0), 0, 1)


def test_forwards_alone_can_run() -> None:
    for name in ("1f1b", "zb-v", "dualpipe", "v-half", "interleaved"):
        schedule = forward_only(build(name, 4, 8))
        kinds = {item.kind for row in schedule.ranks for step in row for item in step}
        assert kinds == {Kind.F}
        verify_programs(schedule, lower(schedule))


def test_a_users_own_ten_lines() -> None:
    """1F1B whose cool-down splits the backward, on three ranks."""
    rows = []
    for rank in range(3):
        rec = Recorder()
        for _ in range(3 - rank):
            rec.f(rank)
        for _ in range(5 - (3 - rank)):
            rec.bw(rank)
            rec.f(rank)
        for _ in range(3 - rank):
            rec.b(rank)
            rec.w()
        rows.append(tuple(rec.steps))
    mine = Schedule("mine", loop(3), 5, tuple(rows))
    verify(mine, memory=3)
    assert simulate(mine).makespan < simulate(build("1f1b", 3, 5)).makespan
