"""The JSON of `show`: what another clock needs to check ours, and costs that `show` reads again."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from megapipe.schedule import build
from megapipe.schedule.text import to_json
from tests.commands.schedules.program import SIZE, tool


def starts_by_hand(data: dict[str, Any]) -> list[list[float]]:
    """When each pass of a table of F, B, W and BW, one a step, starts: from what the file says alone."""
    costs, home, chain = data["costs"], data["rank_of"], data["chain"]
    share = data["pp"] / chain
    takes = {kind: share * sum(costs[x.lower()] for x in kind) + costs["overhead"] for kind in ("F", "B", "W", "BW")}
    found: list[list[float]] = [[] for _ in home[: data["pp"]]]
    free, ready = [0.0] * data["pp"], {}

    def comes(stage: int, kind: str, microbatch: int, rank: int) -> float | None:
        before = {"F": ("F", stage - 1), "B": ("B", stage + 1), "W": ("B", stage)}[kind]
        if before[1] in (-1, chain):
            return ready.get(("F", stage, microbatch)) if kind == "B" else 0.0
        at = ready.get((*before, microbatch))
        return None if at is None else at + costs["comm"] * (home[before[1]] != rank)

    rows = [[re.fullmatch(r"(\d+)([A-Z]+)(\d+)", one).groups() for (one,) in row] for row in data["ranks"]]
    for _ in range(sum(map(len, rows))):
        for rank, row in enumerate(rows):
            for stage, kind, number in row[len(found[rank]) :]:
                at = comes(int(stage), kind[0], int(number), rank)
                if at is None:
                    break
                found[rank].append(max(at, free[rank]))
                free[rank] = ready[kind[0], int(stage), int(number)] = found[rank][-1] + takes[kind]
    return found


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "v-half"])
def test_the_json_of_show_has_what_another_clock_needs_and_its_costs_are_read_again(tmp_path, name):
    path = tmp_path / "mine.json"
    written = tool("show", name, *SIZE, "--costs", "10,11,8,0.5,0.25", "--json", path).stdout
    data = json.loads(path.read_text())
    assert list(data)[:6] == ["name", "pp", "microbatches", "rank_of", "chain", "ranks"]
    for row, by_hand in zip(data["start"], starts_by_hand(data), strict=True):
        assert row == pytest.approx(by_hand)
    again = tool("show", path, "--costs", path)
    named, _, facts = written.partition("\n")
    assert named == f"written, and not drawn here: {path}"
    assert again.stdout.endswith(facts), again.stderr
    assert f"makespan {data['makespan']:g}, " in written


def test_a_schedule_that_says_no_costs_is_not_taken_for_a_costs_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(to_json(build("1f1b", 4, 8)))
    assert f"{path} is a schedule without costs. Give costs, or what `show --json`" in (
        tool("show", "1f1b", *SIZE, "--costs", path).stderr
    )
