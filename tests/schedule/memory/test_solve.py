"""The solver: never worse than what one does by hand, as good as every choice there is, and it says what it chose."""

from __future__ import annotations

from random import Random

import pytest

from megapipe.commands import schedules
from megapipe.schedule import Costs, ScheduleError, build, from_json, simulate
from megapipe.schedule.memory.solve import Verb, applied, solve
from tools.proofs.tables import solved

ONE = Costs(o=1, l=1)


def test_half_of_1f1bs_memory_costs_less_than_v_min() -> None:
    plain = [build(name, 8, 16) for name in ("1f1b", "v-min", "interleaved-zb")]
    found = solve(plain, ONE, 4.0, tries=5)
    assert max(found.time.peak) <= 4
    assert found.makespan == 55.5
    assert simulate(build("v-min", 8, 16), ONE).makespan == 60.5


def test_it_is_as_good_as_every_choice_there_is() -> None:
    dice = Random(2)
    costs, table = solved.drawn_costs(dice, 1.0), build("1f1b", 2, 3)
    best = min(
        one.makespan
        for n in range(3**3)
        if (one := applied(table, {(0, m): list(Verb)[n // 3**m % 3] for m in range(3)}, costs)).fits(1.0)
    )
    assert solve([table], costs, 1.0).makespan == pytest.approx(best, rel=1e-9)


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
    told = "of 32 activations of a stage and microbatch 2 copied to the host and back and 21 computed again; without,"
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
    assert printed[-4].split() == ["0", "0", "1", "7", "1", "4", "4", "7"]
    assert max(simulate(from_json(path.read_text()), Costs(o=2, l=2)).peak) == 1


@pytest.mark.parametrize(
    "flags, told",
    [
        ("--solve", "--solve is about copies: add --copy-ratio 0.5"),
        ("--switch 2", "--switch is about copies: add --copy-ratio 0.5"),
        ("--copy-ratio 1 --solve", "--solve chooses at a memory limit: add --memory 4"),
        ("--copy-ratio 1 --solve --memory 2 --switch 2", "--solve knows no lanes that ranks share yet"),
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
