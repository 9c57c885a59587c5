"""Weights and gradients that are whole for a run of passes: when, how much a rank holds, and what is refused."""

from __future__ import annotations

import pytest
from refusals import refusal

from megapipe.schedule import (
    Costs,
    Kind,
    Pass,
    Schedule,
    build,
    from_csv,
    from_json,
    simulate,
    to_csv,
    to_json,
    verify,
)
from megapipe.schedule.dependencies import Dependencies
from megapipe.schedule.families.sharding.runs import runs, sums
from megapipe.schedule.families.sharding.sharded import with_sharded_weights
from megapipe.schedule.families.vocabulary.shares import with_vocabulary
from megapipe.schedule.lower import forward_only
from megapipe.schedule.passes import Placement

WHOLE = "0AF0 0F0 0F1 1AF0 1F0 1F1 1BW1 1BW0 1RS0 0AB1 0BW1 0BW0 0RS0"
"""Two stages on one rank, two microbatches: stage 1 stays whole from its forwards to its backwards."""


def one_rank(steps: str, m: int = 2) -> Schedule:
    kinds = sorted((kind.value for kind in Kind), key=len, reverse=True)
    row = []
    for text in steps.split():
        kind = next(k for k in kinds if text[1:].startswith(k))
        row.append((Pass(Kind(kind), int(text[0]), int(text[1 + len(kind) :])),))
    return Schedule("mine", Placement((0, 0), 2), m, (tuple(row),))


def test_weights_are_whole_from_their_gather_to_the_last_use_and_gradients_until_someone_waits_for_their_sum() -> None:
    table = one_rank(WHOLE)
    verify(table)
    # Passes of half a share take 0.5, BW 1; AF 0.5, RS 1. compute: 0F 0.5-1.5, 1F 2-3 (its gather stands behind 0F1),
    # 1BW 3-5, 0BW 6.5-8.5: their gather follows the reduction of stage 1 on the lane, 5-6 and 6-6.5.
    time = simulate(table, Costs(mem_b=0, a=1, g=2, mem_a=2, mem_g=20))
    assert (time.start[Pass(Kind.AB, 0, 1)], time.makespan) == (6, 9.5)
    # Stage 1's gradients, summed by 6, go where someone waits for that: where stage 0's begin to be summed, at 8.5.
    assert [x for x in time.curves[0] if x[0] > 5] == [(6.5, 21), (7.5, 21), (8.5, 21), (8.5, 20), (8.5, 10), (9.5, 0)]
    assert [str(run.dropped) for run in runs(table, 0)] == ["0F1", "1BW0", "0BW0"]
    assert [[str(x) for x in one.passes] for one in sums(table, 0)] == [["1BW1", "1BW0"], ["0BW1", "0BW0"]]


def test_who_reads_the_weights_waits_for_their_gather_and_w_for_none() -> None:
    needs = Dependencies(one_rank("0AF0 0F0 1AF0 1F0 1B0 1W0 1RS0 0AB0 0B0 0W0 0RS0", m=1))
    assert Pass(Kind.AB, 0, 0) in needs.of(Pass(Kind.B, 0, 0))
    assert needs.of(Pass(Kind.W, 0, 0)) == [Pass(Kind.B, 0, 0)]
    assert needs.of(Pass(Kind.RS, 0, 0)) == [Pass(Kind.W, 0, 0)]


@pytest.mark.parametrize(
    "old, new, line",
    [
        ("0AF0 0F0", "0F0 0AF0", "step 0, 0F0: reads weights that nothing has gathered; 0AF0 is missing before it"),
        (
            "0AF0 0F0",
            "0F0 0AF0",
            "step 1, 0AF0: 0F0, at step 0, is not in its run, which begins with 0F1; this is 0AF1",
        ),
        ("0AB1 0BW1", "0BW1 0AB1", "step 10, 0AB1: 0BW1, at step 9, is not in its run, which begins with 0BW0"),
        ("0BW1 0BW0", "0BW0 0BW1", "step 9, 0AB1: its run begins with 0BW0 at step 10, before 0BW1; this is 0AB0"),
        (
            "0F0 0F1 1AF0",
            "0F0 1AF0 0F1 0AF1",
            "step 4, 0AF1: nothing reads the weights before they are dropped; 0F1 stands before it",
        ),
        ("0AB1 0BW1 0BW0", "0AB1 0AB0 0BW1 0BW0", "step 9, 0AB1: nothing reads the weights before they are dropped"),
        ("1BW0 1RS0", "1RS0 1BW0", "step 7, 1RS0: stands before 1BW0 at step 8, whose gradient it sums"),
        ("1BW0 1RS0", "1RS0 1BW0", "step 8, 1BW0: nothing sums its gradient; 1RS0 is missing after it"),
        ("1RS0 ", "1RS1 ", "step 8, 1RS1: 1BW0 at step 7, after 1BW1, leaves a gradient too; this is 1RS0"),
        ("1RS0 ", "1RS0 1RS1 ", "step 9, 1RS1: 1BW1 at step 6 has been summed before"),
        ("0RS0", "", "step 11, 0BW0: nothing sums its gradient; 0RS0 is missing after it"),
        ("0AF0", "", "step 0, 0F0: reads weights that nothing has gathered; 0AF0 is missing before it"),
        ("0RS0", "0RS0 0G0 1G0", "step 13, 0G0: does not go with weights that are shares between runs"),
    ],
)
def test_a_gather_or_a_sum_out_of_place_is_refused_by_the_line(old: str, new: str, line: str) -> None:
    assert f"rank 0, {line}" in refusal(one_rank(WHOLE.replace(old, new)))


def test_a_file_of_either_form_keeps_them_and_an_evaluation_gathers_for_its_forwards() -> None:
    table = one_rank(WHOLE)
    assert from_json(to_json(table)) == table
    assert from_csv(to_csv(table)).ranks == table.ranks
    assert [str(x) for (x,) in forward_only(table).ranks[0]] == ["0AF0", "0F0", "0F1", "1AF0", "1F0", "1F1"]


def test_the_rows_of_a_vocabulary_are_not_gathered() -> None:
    """Each rank's first stage has them, and looks tokens up before the gather of its run's first F."""
    table = with_sharded_weights(with_vocabulary(build("1f1b", 2, 4)))
    verify(table)
    row = [x for step in table.ranks[1] for x in step]
    assert row.index(Pass(Kind.E, 1, 0)) < row.index(Pass(Kind.AF, 1, 0)) < row.index(Pass(Kind.F, 1, 0))
    assert {x.kind for one in runs(table, 1) for x in one.passes} <= {Kind.F, Kind.B, Kind.BW}
