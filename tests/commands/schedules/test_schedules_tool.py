"""tools/schedules.py as a user meets it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from programs import ROOT

from megapipe.commands import progress
from megapipe.schedule import SCHEDULES
from megapipe.schedule.patterns import SLICED
from tests.commands.schedules.program import SIZE, STEP, tool


def test_list_has_every_schedule_in_one_line_and_the_program_starts():
    program = [sys.executable, ROOT / "tools" / "schedules.py", "list"]
    said = subprocess.run(program, capture_output=True, text=True, timeout=120, check=True).stdout
    assert said == tool("list").stdout
    lines = said.splitlines()
    assert [line.split()[0] for line in lines] == ["name", *SCHEDULES, *SLICED]


def test_show_draws_ascii_within_the_width_and_states_the_formulas():
    done = tool("show", "ZB-H1", "--pp", "4", "--microbatches", "8", "--costs", "10,11,8", columns=70)
    assert done.returncode == 0
    assert not done.stderr
    assert done.stdout.isascii()
    assert max(len(line) for line in done.stdout.splitlines()[:4]) <= 70
    assert f"bubble {3 * (10 + 11 - 8)} " in done.stdout  # (p-1)(F+B-W)
    assert "peak 4; by rank 4 4 4 4" in done.stdout
    assert f"communication: {2 * 3 * 8} tensors; sent by rank 8 16 16 8" in done.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "required: list|show|compare|site"),
        (("draw",), "invalid choice: 'draw'"),
        (("show", "zb-h1"), "needs --pp and --microbatches, such as --pp 4 --microbatches 8"),
        (("show", "zbv", *SIZE), "did you mean zb-v?"),
        (("show", "zb-auto", *SIZE, "--effort", "1e20"), "--effort: a number above 0 and at most 86400"),
        (("site", "x", "--pp", "65", "--microbatches", "4"), "a page has every table, of at most --pp 64"),
        (("show", "1f1b", "--pp", "0", "--microbatches", "8"), "--pp: a whole number of at least 1 is needed, got '0'"),
        (("show", "1f1b", *SIZE, "--costs", "1,2"), "such as 10,11,8 or 1,1,1,0.1, got '1,2'"),
        (("show", "1f1b", *SIZE, "--costs", "1,1,nan"), "got '1,1,nan'"),
        (("show", "1f1b", *SIZE, "--memory", "no"), "--memory: a number above 0 and at most 1e+100 is needed"),
        (("show", "1f1b", *SIZE, "--memory", "3"), "0F3: over the memory limit of 3"),
        (("show", "1f1b", *SIZE, "--memory", "3"), "`compare` with the same --memory shows what fits"),
        (("show", "1f1b", *SIZE, "--chunks", "2"), "1f1b has 1 chunk(s) per rank, not 2"),
        (("show", "1f1b", *SIZE, "--placement", "v"), "only zb-auto takes --placement"),
        (("show", "zb-auto", *SIZE, "--memory", "0.5"), "Use --memory 1."),
        (("show", "dualpipe", "--pp", "3", "--microbatches", "8"), "the nearest is 4"),
        (("show", "no/such.json"), "no/such.json: No such file or directory"),
        (("show", "mine.csv", "--pp", "4"), "mine.csv says these itself; leave out --pp"),
        (("show", "1f1b", *SIZE, "--micro", "3"), "unrecognized arguments: --micro 3"),
        (("show", "1f1b", *SIZE, "--costs", "1,1,1e308"), "got '1,1,1e308'"),
        (
            ("show", "naive", "--pp", "1000000", "--microbatches", "8"),
            "table of 8,000,000 forwards in 1,000,000 stages",
        ),
        (("show", "interleaved", *SIZE, "--chunks", "100000000"), "tables have at most 4,000,000 in 10,000"),
        (("show", "zb-auto", "--pp", "1000000", "--microbatches", "8"), "tables have at most 4,000,000 in 10,000"),
        (("compare", "--pp", "4"), "required: --microbatches"),
        (
            ["show", "1f1b", "--pp", "2", "--microbatches", "4", "--png=--"],
            "argument --png: a value is needed, got '--'",
        ),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_status_2(args, says):
    done = tool(*args)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout


def test_progress_is_silent_for_a_second_and_leaves_a_clean_line(monkeypatch, capsys):
    clock = iter([0.0, 0.5, 4.0, 5.0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    bar = progress.Progress()
    bar(1 / 3, "zb-v")
    assert capsys.readouterr().err == ""
    bar(2 / 3, "zb-auto")
    assert capsys.readouterr().err == f"\r[{'#' * 16}{'.' * 8}]  67% zb-auto, 2 s left"
    bar(1.0)
    assert capsys.readouterr().err.strip() == ""


def test_vocabulary_passes_are_drawn_and_a_wrong_number_of_costs_is_named():
    done = tool("show", "1f1b", "--pp", "2", "--microbatches", "2", "--vocabulary", "1,0.5")
    assert "S vocabulary share; C combine shares" in done.stdout
    limited = tool("show", "1f1b", *SIZE, "--vocabulary", "0.5,0.25", "--memory", "4")
    assert (limited.returncode, "0F4: over the memory limit of 4; the rank holds" in limited.stderr) == (2, True)
    assert "S,T or S,T,E is needed" in tool("show", "1f1b", *SIZE, "--vocabulary", "1").stderr


def test_a_search_prints_its_bound_and_keeps_to_the_memory():
    done = tool("show", "zb-auto", *SIZE, "--costs", "10,14,7", "--memory", "3", "--placement", "v", "--effort", "0.5")
    assert done.returncode == 0
    assert "peak 3 of 3" in done.stdout
    bound = float(re.search(r"lower bound: ([\d.]+); [\d.]+% above it", done.stdout)[1])
    assert bound == pytest.approx(282.5)
    assert bound <= float(re.search(r"makespan ([\d.]+)", done.stdout)[1]) <= 296.5  # V-Half, which fits too


def said_of_the_step(*flags: str) -> tuple[float, float]:
    """Makespan and peak that `show 1f1b` prints for 8 ranks and 16 microbatches."""
    done = tool("show", "1f1b", *STEP, *flags)
    assert done.returncode == 0, done.stderr
    made = re.search(r"makespan ([\d.]+)", done.stdout)[1]
    return float(made), float(re.search(r"peak ([\d.]+)", done.stdout)[1])


SHARED = ("--vocabulary", "0.5,0.25")


def test_copies_of_a_table_with_a_shared_vocabulary_are_in_time_for_its_passes():
    shared, held = said_of_the_step(*SHARED)
    assert held == 9  # a microbatch more than 1F1B's 8
    # All copies are in time: the step takes no longer, and a rank holds what it computes and what comes back.
    assert said_of_the_step(*SHARED, "--copy-ratio", "0.5") == (shared, 2)
    done = tool("show", "1f1b", *STEP, *SHARED, "--copy-ratio", "0.5")
    assert f"; without, {shared:g} at a memory of 9" in done.stdout
    assert said_of_the_step(*SHARED, "--copy-ratio", "0.5", "--solve", "--memory", "4") == (shared, 4)


def test_a_gather_and_a_reduction_lengthen_the_step_of_a_shared_vocabulary_by_themselves():
    shared, _ = said_of_the_step(*SHARED)
    done = tool("show", "1f1b", *STEP, *SHARED, "--shard", "0.1,0.1")
    assert said_of_the_step(*SHARED, "--shard", "0.1,0.1")[0] == pytest.approx(shared + 0.2)
    assert f"the step takes {shared + 0.2:g}, where each rank keeps them {shared:g}" in done.stdout


@pytest.mark.parametrize("memory", [4, 5, 8, 9])
def test_the_solver_leaves_room_for_gathered_weights(memory: int):
    flags = ("--copy-ratio", "0.5", "--solve", "--memory", str(memory), "--shard", "0.1,0.1,1,1")
    # (m + p - 1) (F + B + W), and the gather before the first pass and the reduction after the last.
    assert said_of_the_step(*flags) == (pytest.approx((16 + 8 - 1) * 3 + 0.1 + 0.1), memory)


def test_copies_are_added_to_a_table_of_pairs():
    paired = said_of_the_step("--pairs", "--comm-share", "0.3")
    moved = said_of_the_step("--pairs", "--comm-share", "0.3", "--copy-ratio", "0.5")
    assert moved[0] == paired[0] < (16 + 8 - 1) * 3
    assert moved[1] < paired[1]


@pytest.mark.parametrize(
    "flags",
    [
        ("zb-v", "--memory", "4"),
        ("zb-v", "--memory", "4", "--costs", "10,14,7"),
        ("1f1b", "--vocabulary", "0.5,0.25", "--memory", "8"),
        ("1f1b", "--copy-ratio", "3", "--memory", "1"),
    ],
)
def test_a_memory_limit_that_is_too_low_is_answered_with_one_that_is_enough(flags):
    refused = tool("show", flags[0], *STEP, *flags[1:]).stderr
    enough = re.search(r"--memory (\d+) is enough for it", refused)[1]
    more = [enough if text == flags[flags.index("--memory") + 1] else text for text in flags[1:]]
    assert tool("show", flags[0], *STEP, *more).returncode == 0


def test_the_recipe_of_a_run_is_shown_without_the_limit_that_it_does_not_have():
    """A check printed a line with --copies needed, and show refused it: "Add --memory 4"."""
    line = "hanayo --pp 1 --microbatches 8 --chunks 4 --as-published --copies needed --shard"
    done = tool("show", *line.split())
    assert done.returncode == 0
    assert "--copies needed copies nothing without a limit: --memory gives one" in done.stdout
    for when in ("fits", "needed"):
        refused = tool("compare", *SIZE, "--copies", when)
        assert "choose within a limit" in refused.stderr
