"""Tables and costs that `schedules show` writes to files, and reads from them."""

from __future__ import annotations

import json
import re

import pytest

from megapipe.schedule import build
from megapipe.schedule.text import from_csv, from_json
from tests.commands.schedules.program import SIZE, STEP, tool


def test_show_writes_files_that_hold_the_schedule_and_reads_them_back(tmp_path):
    files = {kind: tmp_path / f"a.{kind}" for kind in ("json", "csv", "svg", "perfetto")}
    asked = [text for kind, path in files.items() for text in (f"--{kind}", path)]
    assert tool("show", "dualpipe", "--pp", "4", "--microbatches", "8", *asked).returncode == 0
    ranks = build("dualpipe", 4, 8).ranks
    assert from_json(files["json"].read_text()).ranks == ranks
    assert from_csv(files["csv"].read_text()).ranks == ranks
    assert files["svg"].read_text().startswith("<svg")
    assert json.loads(files["perfetto"].read_text())["traceEvents"]
    for kind in ("json", "csv"):
        assert "bubble 2 " in tool("show", files[kind]).stdout  # (p/2-1)(F&B + BW - 3W)


def test_what_a_table_has_of_its_step_is_not_added_again(tmp_path):
    """The file that was written was refused when it was read: 0G0 runs twice."""
    path = tmp_path / "whole.json"
    assert tool("show", "1f1b", *SIZE, "--step", "2,1", "--json", path).returncode == 0
    assert "whole.json has G already" not in tool("show", path).stderr
    refused = tool("show", path, "--step", "2,1", "--post-validation").stderr
    assert "1f1b has U already, and each stage has one a step" in refused
    assert "whole.json has G, U: --step states what they take" in tool("show", path, "--step", "2,1").stdout


@pytest.mark.parametrize(
    ("flags", "costs", "step"),
    [
        # 1F1B of 8 ranks and 16 microbatches takes (16 + 7) (F + B + W).
        (["--slices", "4"], ["--attention-share", "0.6"], 16 * 3 + 7 * 3 / 4),
        ([], ["--copy-ratio", "0.5"], 23 * 3),
        ([], ["--shard", "0.1,0.2"], 23 * 3 + 0.1 + 0.2),
        ([], ["--step", "2,1"], 23 * 3 + 2 + 1),
        ([], ["--vocabulary", "0.5,0.25"], None),
    ],
)
def test_a_written_table_is_shown_again_with_the_costs_that_it_was_written_with(tmp_path, flags, costs, step):
    """Of the file the flags were to add the passes once more, and without them its passes took no time."""
    path = tmp_path / "mine.json"
    written = tool("show", "1f1b", "--pp", "8", "--microbatches", "16", *flags, *costs, "--json", path)
    shown = tool("show", path, *costs)
    assert shown.returncode == 0, shown.stderr
    first, again = (float(re.search(r"makespan ([\d.]+)", done.stdout)[1]) for done in (written, shown))
    assert again == first
    if step is not None:
        assert again == pytest.approx(step)


def test_csv_is_refused_for_slices_of_several_lengths(tmp_path):
    """It was read back as one of equal slices, whose step and memory are others."""
    cut = ("--slices", "4", "--attention-share", "0.6", "--csv", tmp_path / "a.csv")
    refused = tool("show", "1f1b", *SIZE, *cut)
    assert "uneven slices, which CSV cannot say. Write JSON, or use --cuts equal." in refused.stderr
    equal = tool("show", "1f1b", *SIZE, *cut, "--cuts", "equal").stdout
    again = tool("show", tmp_path / "a.csv", "--attention-share", "0.6").stdout
    first, second = (re.search(r"makespan ([\d.]+)", said)[1] for said in (equal, again))
    assert first == second


def test_a_costs_file_must_give_some_pass_a_time(tmp_path):
    """Every rank of a run divided by 0."""
    path = tmp_path / "costs.json"
    for costs in ({"f": 0, "b": 0, "w": 0}, {"f": [0, 0], "b": 0, "w": [0, 0], "g": 1}):
        path.write_text(json.dumps(costs))
        said = tool("show", "1f1b", *SIZE, "--costs", path).stderr
        assert f"{path}: f, b and w are all 0, and no step can be predicted of that." in said


def test_a_wrong_file_is_refused_with_every_problem(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0X0\n1F0,1BW7x\n")
    done = tool("show", path)
    assert done.returncode == 2
    assert "rank 0 (line 1), step 1: 0X0: unknown letter X" in done.stderr
    assert "rank 1 (line 2), step 1: 1BW7x: not a pass" in done.stderr
    assert "Traceback" not in done.stderr


def test_pairs_in_a_file_price_copies_say_what_to_leave_out(tmp_path):
    path = tmp_path / "copied.json"
    assert tool("show", "1f1b", *STEP, "--copy-ratio", "0.5", "--json", path).returncode == 0
    said = tool("show", path, "--pairs", "--comm-share", "0.3").stderr
    assert "has L, O, and pairs are made of F, B, W and BW alone. Give the table without them" in said


def test_several_problems_of_a_function_stand_one_a_line_as_those_of_a_file(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F1,0BW0,0BW1\n1F1,1BW0,1BW1\n")
    (tmp_path / "mine.py").write_text(
        f"from megapipe.schedule import Kind, Pass, Schedule, loop\n\n\ndef make(ranks, microbatches):\n"
        f"    cells = [line.split(',') for line in open({str(path)!r}).read().split()]\n"
        "    rows = [[(Pass(Kind(c[1:-1]), int(c[0]), int(c[-1])),) for c in row] for row in cells]\n"
        "    return Schedule('mine', loop(ranks), microbatches, rows)\n"
    )
    of_file = tool("show", path).stderr.splitlines()
    of_function = tool("show", f"{tmp_path}/mine.py:make", "--pp", "2", "--microbatches", "2").stderr.splitlines()
    assert of_function[1:] == of_file[1:]
    assert of_file[1:] == ["  rank 0: 0F0 is missing", "  rank 1: 1F0 is missing"]
