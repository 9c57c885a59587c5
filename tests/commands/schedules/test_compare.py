"""`schedules compare` as a user meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megapipe.commands.main import command
from tests.commands.schedules.program import SIZE, tool


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


@pytest.mark.parametrize("given", [{}, {"mem_b": 3, "mem_w": 3}])
def test_a_comparison_says_the_units_of_its_costs(given, tmp_path):
    """With --costs nothing said what a peak of 4 is. 1F1B of 4 ranks holds 4 microbatches."""
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"f": 10, "b": 11, "w": 8, **given}))
    for costs in ([file], [file, file]):
        first, *others = tool("compare", *SIZE, "--costs", *costs, "--only", "1f1b").stdout.splitlines()
        peak = 3 if given else 1
        assert re.search(rf"^1f1b +319 .* {4 * peak} +1 +16$", "\n".join(others), re.MULTILINE)
        activations = "times in the unit of --costs; peak in activations of a microbatch in 1/p of the model"
        assert first == ("times and peak in the units of --costs" if given else activations)
    assert tool("compare", *SIZE, "--only", "1f1b").stdout.startswith("schedule ")
