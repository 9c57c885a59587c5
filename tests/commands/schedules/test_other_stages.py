"""`schedules show` with costs that name other stages than the schedule has."""

from __future__ import annotations

import json
import re

import pytest

from tests.commands.schedules.program import SIZE, tool

HEAD = {"head_f": 1, "head_b": 1, "head_w": 1}


@pytest.mark.parametrize("head", [{}, HEAD])
@pytest.mark.parametrize("name", ["zb-v", "hanayo", "1f1b"])
def test_show_divides_the_costs_of_other_stages_as_compare_does(name, head, tmp_path):
    """`show zb-v` refused with "Costs.f names 2 stages" what `compare` had ranked."""
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"f": [1, 1, 1, 2], "b": [1, 1, 1, 2], "w": [1, 1, 1, 2]} | head))
    shown = tool("show", name, *SIZE, "--costs", file, "--json", tmp_path / "table.json")
    makespan = re.search(r": makespan ([\d.]+), ", shown.stdout)[1]
    rows = tool("compare", *SIZE, "--costs", file, "--only", name).stdout
    found = re.search(rf"^{name}(?: v=4)? +{re.escape(makespan)} .*?(?: in (\d+) stages)?$", rows, re.MULTILINE)
    stages = found[1] or "4"
    said = " ".join(shown.stdout.split())
    assert (f"For schedules of {stages} stages each is divided equally" in said) == (name != "1f1b")
    costs = json.loads((tmp_path / "table.json").read_text())["costs"]
    assert len(costs["f"]) == int(stages)
    assert sum(costs["f"]) == pytest.approx(5)
    # A file of the table has the divided costs, and is shown as it was.
    again = tool("show", tmp_path / "table.json", "--costs", tmp_path / "table.json").stdout
    assert f": makespan {makespan}, " in again


def test_costs_that_cannot_be_divided_are_refused_with_the_command_that_writes_others(tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"f": [1] * 3, "b": [1] * 3, "w": [1] * 3}))
    refused = tool("show", "zb-v", *SIZE, "--costs", file)
    assert refused.returncode == 2
    assert refused.stderr == (
        "schedules.py: error: --costs: f names 3 stages, but the model is cut in 8. Give one number for all stages, or "
        "write the costs of yours: python tools/plan.py <flags> --pipeline-schedule NAME --save-costs FILE\n"
    )


def test_a_file_in_place_of_the_drawing_is_named(tmp_path):
    """With --svg nothing was drawn in the terminal, and no line said why."""
    file = tmp_path / "a.svg"
    said = tool("show", "zb-v", *SIZE, "--svg", file).stdout
    assert said.startswith(f"written, and not drawn here: {file}\nzb-v: makespan ")
    assert "not drawn here" not in tool("show", "zb-v", *SIZE).stdout
