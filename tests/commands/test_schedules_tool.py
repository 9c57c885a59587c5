"""tools/schedules.py as a user meets it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from megapipe.commands import progress, schedules
from megapipe.commands.main import command
from megapipe.flags.parse import run
from megapipe.schedule import SCHEDULES, build
from megapipe.schedule.patterns import SLICED
from megapipe.schedule.text import from_csv, from_json

ROOT = Path(__file__).resolve().parents[2]


def tool(*args: str | Path, columns: int = 100) -> subprocess.CompletedProcess[str]:
    """What the program does, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        patch.object(sys, "argv", ["schedules.py", *map(str, args)]),
        patch.dict(os.environ, COLUMNS=str(columns)),
    ):
        try:
            status = run(schedules.main) or 0
        except SystemExit as stop:
            status = stop.code
    return subprocess.CompletedProcess(args, status, out.getvalue(), err.getvalue())


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


SIZE = ("--pp", "4", "--microbatches", "8")


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


def compared(tmp_path, **costs) -> str:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(costs))
    done = tool("compare", *SIZE, "--costs", path, "--only", "zb-v", "v-half", "hanayo")
    assert not done.stderr, done.stderr
    return " ".join(done.stdout.split("\n\n")[1].split())


def test_costs_of_stages_compare_the_schedules_that_have_so_many(tmp_path):
    """1f1b, the measure of others, has four; it ended in StopIteration, and without any row in a ValueError."""
    eight = {"f": [1] * 8, "b": [1] * 8, "w": [1] * 8}
    # Neighbours are merged for 1f1b, (8 + 3) x 3 x 2, unless each has a share of attention of its own.
    assert "Take zb-v: makespan 51, 22.7% less than 1f1b (66)" in compared(tmp_path, **eight)
    alone = compared(tmp_path, **eight, attention_f=[0.5] * 8)
    assert "Stay with zb-v (makespan 51): none that" in alone
    assert "schedules are missing" not in alone
    assert (
        compared(tmp_path, f=[1] * 5, b=[1] * 5, w=[1] * 5) == "No schedule takes these numbers; the reasons are above."
    )


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


def test_compare_takes_several_points_and_curves_need_a_file(tmp_path):
    done = tool("compare", "--pp", "2", "4", "--microbatches", "4", "--schedules", "zb-h1", "--csv", tmp_path / "a.csv")
    heads = [line for line in done.stdout.splitlines() if line.startswith("p = ")]
    assert heads == [f"p = {p}, m = 4, F:B:W = 1:1:1" for p in (2, 4)]
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 5
    refused = tool("show", "zb-v", *SIZE, "--curves")
    assert refused.returncode == 2
    assert refused.stderr == (
        "schedules.py: error: --curves is a figure and needs a file: --svg FILE, --png FILE or --pdf FILE\n"
    )


STEP = ("--pp", "8", "--microbatches", "16")


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


def test_pairs_in_a_file_price_copies_say_what_to_leave_out(tmp_path):
    path = tmp_path / "copied.json"
    assert tool("show", "1f1b", *STEP, "--copy-ratio", "0.5", "--json", path).returncode == 0
    said = tool("show", path, "--pairs", "--comm-share", "0.3").stderr
    assert "has L, O, and pairs are made of F, B, W and BW alone. Give the table without them" in said


@pytest.mark.parametrize(
    "given",
    ["--placement v", "--objective period", "--option a=1", "--no-pairs", "--curves", "--chunks 2", "--json a"],
)
def test_compare_names_the_flag_that_only_show_has(given: str):
    """It said `argument FILE: unknown schedule 0.5`."""
    flag = given.split()[0]
    refused = tool("compare", *SIZE, *given.split())
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == (
        f"schedules.py compare: error: compare has no {flag}. Leave it out, or draw one schedule: show NAME {flag}\n"
    )
    assert flag not in tool("compare", "--help").stdout


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


def test_compare_adds_the_parts_that_show_adds():
    """Copies, a shared vocabulary and the rest of the step: the makespan of a row is that of `show`."""
    parts = ["--vocabulary", "0.5,0.25", "--copy-ratio", "0.5", "--step", "2,1"]
    rows = tool("compare", *SIZE, "--only", "zb-h1", *parts).stdout
    shown = tool("show", "zb-h1", *SIZE, *parts).stdout
    makespan = re.search(r"makespan ([\d.]+)", shown).group(1)
    assert re.search(rf"^zb-h1 +{re.escape(makespan)} ", rows, re.M)


def test_costs_that_a_plan_wrote_are_compared_in_teraflops_and_gib_for_all_schedules(tmp_path):
    """A table in numbers such as 2920539793770000 had 14 of 23 schedules refused, and advice from the rest."""
    file = tmp_path / "costs.json"
    stages = {"f": [2e12] * 4, "b": [2e12] * 4, "w": [2e12] * 4, "mem_b": [2.0**30] * 4, "mem_w": [2.0**30] * 4}
    file.write_text(json.dumps(stages))
    said = tool("compare", *SIZE, "--costs", file, "--memory", 5 * 2**30, "--only", "zb-v").stdout
    assert said.startswith("times in TFLOPs: ")
    # 1F1B of 4 ranks and 8 microbatches takes (8 + 3) (F + B + W) and holds 4 microbatches.
    assert re.search(r"^1f1b +66 .* 66 +18 +27.3 +4 ", said, re.MULTILINE)
    assert re.search(r"^zb-v .* in 8 stages$", said, re.MULTILINE)
    assert "the costs name 4 stages. For schedules of 8 stages each is divided equally" in said
    sizes = ("--pp", "8", "--microbatches", "8")
    part = tool("compare", *sizes, "--costs", file, "--only", "zb-v").stdout
    assert "in 16 stages" in part
    sizes = ("--pp", "3", "--microbatches", "8")
    none = tool("compare", *sizes, "--costs", file, "--only", "zb-v").stdout
    assert "No schedule takes these numbers; the reasons are above." in none


def test_a_plan_and_a_comparison_of_its_costs_say_one_number(tmp_path):
    """A comparison said -4.8% of zb-v, and the plan itself -2.7%: it had spread the head over two parts of a stage."""
    file = tmp_path / "costs.json"
    line = (
        "--num-layers 32 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 "
        "--mock-data --lr 1 --train-iters 9 --tokenizer-type NullTokenizer --vocab-size 7999 --bf16 "
        "--micro-batch-size 1 --global-batch-size 32 --world-size 4 --pipeline-model-parallel-size 4"
    )
    spans = {}
    for name in ("interleaved --num-virtual-stages-per-pipeline-rank 2", "1f1b"):
        command("plan")(f"{line} --pipeline-schedule {name} --save-costs {file} --json {file}n".split())
        spans[name] = json.loads(Path(f"{file}n").read_text())["step"]["time"]
    divided, plain = spans.values()
    gain = f"{100 * (divided / plain - 1):+.1f} %"
    said = tool("compare", "--pp", "4", "--microbatches", "32", "--costs", file, "--only", "interleaved").stdout
    assert re.search(rf"^interleaved v=2 +\S+ +{re.escape(gain)} ", said, re.MULTILINE)
    assert "an embedding and the memory of a head" in said
    # A file without the head, as a rehearsal writes it, spreads it.
    known = json.loads(file.read_text())
    assert {"head_f", "head_b", "head_w"} < known.keys()
    file.write_text(json.dumps({name: x for name, x in known.items() if not name.startswith("head_")}))
    spread = tool("compare", "--pp", "4", "--microbatches", "32", "--costs", file, "--only", "interleaved").stdout
    assert gain not in spread
    assert "a head or embedding" in spread


def test_the_recipe_of_a_run_is_shown_without_the_limit_that_it_does_not_have():
    """A check printed a line with --copies needed, and show refused it: "Add --memory 4"."""
    line = "hanayo --pp 1 --microbatches 8 --chunks 4 --as-published --copies needed --shard"
    done = tool("show", *line.split())
    assert done.returncode == 0
    assert "--copies needed copies nothing without a limit: --memory gives one" in done.stdout
    for when in ("fits", "needed"):
        refused = tool("compare", *SIZE, "--copies", when)
        assert "choose within a limit" in refused.stderr
