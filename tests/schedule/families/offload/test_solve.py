"""The solver: never worse than what one does by hand, as good as every choice there is, and it says what it chose."""

from __future__ import annotations

from random import Random

import pytest

from megapipe.commands import schedules
from megapipe.schedule import Costs, ScheduleError, build, from_json, simulate, verify
from megapipe.schedule.families.offload import weigh
from megapipe.schedule.families.offload.copies import with_offload, with_recompute
from megapipe.schedule.families.offload.solve import solve, tables
from megapipe.schedule.families.offload.weigh import Verb, applied, scales
from megapipe.schedule.search.offloaded import searched
from tools.proofs.tables import solved

ONE = Costs(o=1, l=1)


def test_half_of_1f1bs_memory_costs_less_than_v_min() -> None:
    plain = [build(name, 8, 16) for name in ("1f1b", "v-min", "interleaved-zb")]
    found = solve(plain, ONE, 4.0, tries=5)
    assert max(found.peak) <= 4
    assert found.makespan == 55.5
    assert simulate(build("v-min", 8, 16), ONE).makespan == 60.5


def test_an_order_that_leaves_room_for_what_cannot_be_moved_is_near_the_ideal() -> None:
    few = Costs(mem_w=0.9, o=1, l=1)
    ideal = 9 * 3
    found = solve(list(searched(3, 9, few, 1.5, effort=0.02)), few, 1.5)
    assert max(found.peak) <= 1.5
    assert found.makespan < ideal * 1.02
    by_hand = [with_recompute(table, few) for table in tables(3, 9, few)]
    by_hand += [with_offload(table, few) for table in tables(3, 9, few)]
    assert min(time.makespan for x in by_hand if max((time := simulate(x, few)).peak) <= 1.5) > ideal * 1.07


def test_it_is_as_good_as_every_choice_there_is() -> None:
    dice = Random(2)
    costs, table = solved.drawn_costs(dice, 1.0), build("1f1b", 2, 3)
    every = [{(0, m): list(Verb)[n // 3**m % 3] for m in range(3)} for n in range(3**3)]
    best = solved.fitting([applied(table, choices, costs) for choices in every], costs, 1.0)
    assert solve([table], costs, 1.0).makespan == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("name, p, m", [("1f1b", 4, 9), ("interleaved", 2, 4), ("v-half", 3, 7), ("zb-h1", 5, 10)])
def test_what_is_weighed_without_making_it_is_what_the_clock_says(name: str, p: int, m: int) -> None:
    dice = Random(7)
    drawn = {key: dice.uniform(0.3, 2) for key in ("f", "b", "w", "o", "l", "mem_w")}
    costs = Costs(**drawn, comm=0.1, mem_o=0.75, mem_r=0.125, overhead=0.05)
    table = build(name, p, m, chunks=2 if name == "interleaved" else None)
    places = sorted({x[1:3] for row in table.ranks for step in row for x in step})
    choices = {place: dice.choice(list(Verb)[1:]) for place in places if dice.random() < 0.7}
    weight, time = scales(table, costs, 2.0)(choices), simulate(applied(table, choices, costs), costs)
    assert (weight.makespan, tuple(weight.peak)) == (time.makespan, time.peak)
    assert tuple(weight.over) == tuple(
        next((at for at, held in curve if held > 2.0), float("inf")) for curve in time.curves
    )


def test_what_fits_as_it_is_stays_so() -> None:
    found = solve([build("1f1b", 4, 8)], ONE, 4.0)
    assert (found.choices, found.schedule) == ({}, build("1f1b", 4, 8))


def test_no_choice_that_fits_is_said() -> None:
    with pytest.raises(ScheduleError, match=r"computing again fits a memory of 0\.5\. Allow more, or take"):
        solve([build("1f1b", 2, 4)], ONE, 0.5)


def shown(capsys: pytest.CaptureFixture[str], line: str) -> list[str]:
    schedules.main(line.split())
    return capsys.readouterr().out.splitlines()


def test_show_prints_what_was_chosen_and_writes_it(capsys, tmp_path) -> None:
    path = tmp_path / "solved.json"
    line = f"show 1f1b --pp 4 --microbatches 8 --copy-ratio 2 --memory 1 --solve --json {path}"
    printed = shown(capsys, line)
    told = "of 32 activations of a stage and microbatch 21 computed again; without,"
    assert any(line.startswith(told) for line in printed)
    assert printed[-5].split() == [
        "rank",
        "held",
        "copied",
        "again",
        "peak",
        "without",
        "copies",
        "take",
        "again",
        "takes",
    ]
    assert printed[-4].split() == ["0", "1", "0", "7", "1", "4", "0", "7"]
    assert max(simulate(from_json(path.read_text()), Costs(o=2, l=2)).peak) == 1


@pytest.mark.parametrize(
    "flags, told",
    [
        ("--solve", "--solve is about copies: add --copy-ratio 0.5"),
        ("--switch 2", "--switch is about copies: add --copy-ratio 0.5"),
        ("--copy-ratio 1 --solve", "--solve chooses at a memory limit: add --memory 4"),
        ("--copy-ratio 1 --solve --memory 2 --switch 2", "--solve knows no streams that ranks share yet"),
        ("--copy-ratio 1 --memory 1", "over the memory limit of 1; the rank holds up to 2"),
    ],
)
def test_flags_that_need_others_say_so(flags: str, told: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        schedules.main(f"show 1f1b --pp 4 --microbatches 8 {flags}".split())
    assert told in str(caught.value)


def test_copies_on_shared_lanes_are_shown(capsys) -> None:
    printed = shown(capsys, "show 1f1b --pp 4 --microbatches 8 --copy-ratio 0.5 --switch 2 --memory 3")
    assert "activation: peak 2 of 3; by rank 2 2 2 1" in printed
    assert printed[-4].split() == ["0", "0", "8", "0", "2", "4", "8", "0"]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", ["dualpipe", "chimera"])
def test_of_two_copies_of_the_model_each_has_its_own_microbatches(
    name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places of the other copy's microbatches ended it in a KeyError."""
    if not compiled:
        monkeypatch.setattr(weigh, "library", lambda: None)
    table = build(name, 2, 4)
    forwards = {x[1:3] for row in table.ranks for step in row for x in step if x.kind.is_forward}
    assert set(weigh.places(table)) == forwards
    costs = Costs(o=0.5, l=0.5)
    found = solve([table], costs, 1.5, tries=5)
    verify(found.schedule, memory=1.5, costs=costs)
    assert found.makespan == simulate(found.schedule, costs).makespan


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_copy_is_back_before_a_backward_that_takes_no_time(share: float) -> None:
    """It stood behind the backward that waits for it: an AssertionError, or a table that its own rules refuse."""
    none = Costs(f=1, b=0, w=0, o=1e-20, l=1e-20)
    table = build("1f1b", 4, 8)
    verify(with_offload(table, none, share=share))
    weigh_it = scales(table, none, 4.0)
    choices = dict.fromkeys(weigh.places(table), Verb.OFFLOAD)
    time = simulate(applied(table, choices, none), none)
    assert (weigh_it(choices).makespan, tuple(weigh_it(choices).peak)) == (time.makespan, time.peak)
    assert max(solve([table], none, 2.0, tries=5).peak) <= 2


def test_solve_of_any_order_refuses_what_names_one(capsys) -> None:
    line = "show zb-auto --pp 2 --microbatches 4 --copy-ratio 0.5 --memory 2 --solve"
    with pytest.raises(ScheduleError) as caught:
        schedules.main(f"{line} --chunks 1 --placement loop --objective period --effort 1".split())
    assert "leave out --chunks, --placement, --objective, --effort, or solve a schedule by its name" in str(
        caught.value
    )
    assert shown(capsys, line)
