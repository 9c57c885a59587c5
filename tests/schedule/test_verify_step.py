"""Every mistake in what a step has beside its F, B and W: shares of the vocabulary, reduction, update, gathering, V."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from megapipe.schedule import Kind, Pass, Placement, Schedule, ScheduleError, build, verify
from megapipe.schedule.families.step.optimizer import with_gather, with_optimizer
from megapipe.schedule.families.step.reduction import with_reduction
from megapipe.schedule.families.vocabulary.shares import with_vocabulary
from megapipe.schedule.passes import Last, repeated


def one(text: str) -> Pass:
    """`2F0` as it is printed."""
    kind = text.strip("0123456789-")
    stage, microbatch = text.split(kind)
    return Pass(Kind(kind), int(stage), int(microbatch))


def problems(schedule: Schedule) -> list[str]:
    with pytest.raises(ScheduleError) as caught:
        verify(schedule)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def without(schedule: Schedule, text: str) -> Schedule:
    rows = (tuple(step for step in row if step != (one(text),)) for row in schedule.ranks)
    return replace(schedule, ranks=tuple(rows))


def also(schedule: Schedule, rank: int, *texts: str) -> Schedule:
    """With passes more at the end of a rank's row."""
    rows = list(schedule.ranks)
    rows[rank] = (*rows[rank], *((one(text),) for text in texts))
    return replace(schedule, ranks=tuple(rows))


def swapped(schedule: Schedule, *texts: str) -> Schedule:
    """Each two of the same row in each other's place."""
    to = dict(zip(map(one, texts), map(one, reversed(texts)), strict=True))
    rows = (tuple(tuple(to.get(x, x) for x in step) for step in row) for row in schedule.ranks)
    return replace(schedule, ranks=tuple(rows))


PLAIN = build("1f1b", 2, 2)
SHARED = with_vocabulary(build("1f1b-v", 2, 2))  # stages 0 and 3 on rank 0, 1 and 2 on rank 1
WHOLE = with_optimizer(with_reduction(PLAIN), barrier=False, gather="ahead")
TWINS = with_reduction(build("dualpipe", 2, 4))  # stages 0 and 3, 1 and 2, 2 and 1, 3 and 0 are replicas


@pytest.mark.parametrize("text", ["", "0F0 0G0", "0U0 0BW0", "0F0 0BW0 0BW1"])
def test_a_step_is_one_pass_or_two_of_a_microbatch_each(text: str) -> None:
    odd = replace(PLAIN, ranks=((tuple(map(one, text.split())),), PLAIN.ranks[1]))
    assert problems(odd)[0] == f"rank 0, step 0, {text}: a step is one pass, or two of F, B, W and BW"


def test_no_pass_runs_beside_the_one_it_needs() -> None:
    pair = Schedule("mine", Placement((0,), 1), 1, (((one("0F0"), one("0BW0")),),))
    assert problems(pair) == ["rank 0, step 0, 0BW0: runs before 0F0 at step 0"]


def test_numbers_begin_at_0_and_end_before_their_number() -> None:
    wrong = also(PLAIN, 0, "-1F0", "2F0", "0F-1", "0F2")
    assert problems(wrong) == [
        "rank 0, step 4, -1F0: there is no stage -1, only 0 to 1",
        "rank 0, step 5, 2F0: there is no stage 2, only 0 to 1",
        "rank 0, step 6, 0F-1: there is no microbatch -1, only 0 to 1",
        "rank 0, step 7, 0F2: there is no microbatch 2, only 0 to 1",
    ]
    assert problems(replace(PLAIN, num_microbatches=0)) == ["there are 0 microbatches, but only 8 passes"]
    full = Schedule("mine", Placement((0,), 1), 2, (((one("0F0"),), (one("0F1"),)),))
    assert problems(full) == [f"rank 0: 0BW{n} is missing (or 0B{n} and 0W{n})" for n in (0, 1)]


def test_steps_are_counted_and_the_weights_behind_the_last_may_be_gathered() -> None:
    verify(also(also(WHOLE, 0, "0A1"), 1, "1A1"))
    wrong = also(also(also(WHOLE, 0, "0A1", "0A2", "0G1", "0G-1"), 1, "1A1", "0G0"), 0, "2G0")
    end = len(WHOLE.ranks[0])
    assert problems(wrong) == [
        f"rank 0, step {end + 1}, 0A2: there is no step 2, only 0 to 1",
        f"rank 0, step {end + 2}, 0G1: there is no step 1, only 0 to 0",
        f"rank 0, step {end + 3}, 0G-1: there is no step -1, only 0 to 0",
        f"rank 0, step {end + 4}, 2G0: there is no stage 2, only 0 to 1",
        f"rank 1, step {len(WHOLE.ranks[1]) + 1}, 0G0: stage 0 is on rank 0",
    ]


@pytest.mark.parametrize("name", ["0A0", "1G0", "0U0", "1V0"])
def test_what_is_done_to_one_stage_is_done_to_all(name: str) -> None:
    assert problems(without(WHOLE, name))[0] == f"rank {name[0]}: {name} is missing"


@pytest.mark.parametrize("name", ["0E1", "1E0", "0S1", "1S0", "3C0", "3C1", "0T1", "1T0", "0EW1", "1EW0"])
def test_every_share_of_the_vocabulary_is_used_once_for_each_microbatch(name: str) -> None:
    rank = {"0": 0, "1": 1, "3": 0}[name[0]]
    assert f"rank {rank}: {name} is missing" in problems(without(SHARED, name))


@pytest.mark.parametrize("name", ["2S2", "0E1", "1C0", "3C2", "2T3", "0EW0"])
def test_each_copy_of_the_model_has_shares_of_its_own(name: str) -> None:
    table = with_vocabulary(build("dualpipe", 2, 4))
    assert f"rank {table.placement.rank_of[int(name[0])]}: {name} is missing" in problems(without(table, name))


def test_shares_are_where_the_placement_has_them() -> None:
    end = len(SHARED.ranks[1])
    assert problems(also(SHARED, 1, "2S0", "1C0")) == [
        f"rank 1, step {end}, 2S0: the vocabulary is shared by others: [0, 1]",
        f"rank 1, step {end + 1}, 1C0: the vocabulary is shared by others: [3]",
    ]
    assert problems(also(PLAIN, 1, "1E0", "1C0")) == [
        f"rank 1, step {n}, {name}: the vocabulary is not shared in this placement"
        for n, name in ((4, "1E0"), (5, "1C0"))
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_every_share_looks_up_in_the_order_in_which_the_first_stage_runs(rank: int) -> None:
    assert problems(swapped(SHARED, f"{rank}E0", f"{rank}E1")) == [
        f"rank {rank}, step 0, {rank}E1: stage 0 reads microbatch 0 at this place, and both ends of a chain read their "
        "microbatches in one order"
    ]


def test_the_loss_reads_in_the_order_of_the_first_stage_and_the_middle_in_any() -> None:
    gpipe = build("gpipe", 3, 2)
    verify(swapped(gpipe, "1F0", "1F1"))
    assert problems(swapped(gpipe, "2F0", "2F1")) == [
        "rank 2, step 0, 2F1: stage 0 reads microbatch 0 at this place, and both ends of a chain read their "
        "microbatches in one order"
    ]


def test_the_last_microbatch_of_a_stage_is_read_from_its_row() -> None:
    """Backwards in another order than forwards, as GPipe is often drawn; and a W behind those of later backwards."""
    assert swapped(build("gpipe", 2, 2), "1BW0", "1BW1").last == {0: Last(1, 1), 1: Last(0, 0)}
    split = build("zb-h1", 2, 2)
    assert swapped(split, "0W0", "0W1").last == {0: Last(1, 0), 1: Last(1, 1)}


def test_replicas_are_gathered_in_one_order_and_updated_in_any() -> None:
    verify(swapped(with_optimizer(TWINS), "0U0", "3U0"))
    wrong = swapped(with_gather(build("dualpipe", 2, 4)), "0A0", "3A0")
    assert problems(wrong) == ["ranks 0 and 1 run A of the replicas they share in different orders"]


def test_before_v_stands_only_what_all_ranks_can_run_again() -> None:
    rows = [list(row) for row in WHOLE.ranks]
    at = [next(i for i, step in enumerate(row) if step[0].kind is Kind.V) for row in rows]
    rows[0].insert(at[0] + 2, rows[0].pop(at[0]))  # V behind BW0 and what follows it
    late = replace(WHOLE, ranks=tuple(map(tuple, rows)))
    behind = [f"rank 0, step {at[0] + n}, 0BW{n}" for n in range(2)]
    assert problems(late) == [f"{x}: stands before V, where only passes that can run again may stand" for x in behind]
    verify(repeated(WHOLE, 3))


def test_the_programs_that_a_run_executes_are_played_through(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = sys.modules[verify.__module__]
    real = verifier.lower_timed
    monkeypatch.setattr(verifier, "lower_timed", lambda *given: (real(*given)[0], real(*given)[1][:-1]))
    with pytest.raises(ScheduleError, match="1f1b, as lowered:\n  rank 1 sends 1 messages to rank 0, which receives 2"):
        verify(PLAIN)
