"""P copies the state of a stage to a peer once a step: where it stands, what waits for it, what it costs."""

from dataclasses import replace

import pytest

from megapipe.errors import ScheduleError
from megapipe.schedule import SCHEDULES, Costs, Kind, Pass, build, forward_only, simulate, verify
from megapipe.schedule.families.replicas import with_replicas
from megapipe.schedule.recipe import Recipe
from megapipe.schedule.recipe_line import to_line

WHOLE = Costs(g=1.0, u=0.5, a=0.5, v=0.1, p=2.0)


def whole(name, *, barrier=True, **more):
    """A complete step with copies, by its recipe."""
    from megapipe.schedule.families.step.asked import StepPasses

    step = StepPasses.whole(WHOLE, barrier=barrier)
    return Recipe(name, 4, 8, step=step, replicas=True, **more).whole(WHOLE)


@pytest.mark.parametrize("barrier", [True, False])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "zb-v", "dualpipe", "seq1f1b"])
def test_every_stage_has_one_and_the_table_is_sound(name, barrier):
    table = whole(name, barrier=barrier)
    verify(table)
    for rank, row in enumerate(table.ranks):
        copied = [x.stage for step in row for x in step if x.kind is Kind.P]
        assert sorted(copied) == sorted(table.placement.stages_on(rank))


def test_the_update_waits_for_the_copy_and_the_copy_for_the_validation():
    table = whole("zb-h1", barrier=False)
    time = simulate(table, replace(WHOLE, p=1000.0))
    for stage in range(4):
        assert time.start[Pass(Kind.P, stage, 0)] >= time.end[Pass(Kind.V, stage, 0)]
        assert time.start[Pass(Kind.U, stage, 0)] >= time.end[Pass(Kind.P, stage, 0)]


@pytest.mark.parametrize("p", [0.0, 4.0, 20.0, 40.0])
def test_a_copy_in_the_gaps_costs_nothing_and_a_longer_one_what_does_not_fit(p):
    """1F1B's link of data parallelism is free from a rank's first forward to the reduction of its gradients."""
    table = whole("1f1b")
    time = simulate(table, replace(WHOLE, p=p))
    ready = [max(time.end[Pass(Kind.F, r, 0)] + p, time.end[Pass(Kind.BW, r, 7)]) for r in range(4)]
    # All updates wait for the last reduction, by the norm.
    assert time.makespan == max(ready) + WHOLE.g + WHOLE.u


def test_a_copy_after_an_update_is_refused():
    table = whole("1f1b")
    rows = []
    for row in table.ranks:
        copies = [step for step in row if step[0].kind is Kind.P]
        rows.append((*(step for step in row if step not in copies), *copies))
    with pytest.raises(ScheduleError, match=r"0P0: stands after an update of its rank"):
        verify(replace(table, ranks=tuple(rows)))


def test_an_evaluation_copies_nothing_and_a_table_gets_its_copies_once():
    table = whole("1f1b")
    assert Kind.P not in forward_only(table).kinds
    assert with_replicas(table) is table


def test_a_recipe_says_that_it_has_them():
    assert to_line(Recipe("1f1b", 4, 8, replicas=True)) == "1f1b --pp 4 --microbatches 8 --replicas"
    assert {"1f1b", "zb-v"} <= set(SCHEDULES)
    assert with_replicas(build("1f1b", 2, 2)).kinds == {Kind.F, Kind.BW, Kind.P}
