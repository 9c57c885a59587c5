"""The plan without the run: tools/plan.py as a user calls it."""

import json
import re
import subprocess
import time
from dataclasses import replace

import pytest
from programs import run

from megapipe.commands.main import command
from megapipe.commands.plan.telling import goes_on, slow
from megapipe.commands.plan.verdict import load_line
from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse
from megapipe.plan import GIB, Plan, make_plan
from megapipe.schedule.costs_file import load_costs
from tests.commands.plan.lines import DENSE, MODEL, told


def plan(flags: str) -> subprocess.CompletedProcess[str]:
    return run(["tools/plan.py", *MODEL.split(), *flags.split()])


def test_the_split_that_it_prints_gives_the_same_plan():
    auto = plan("--pipeline-model-parallel-layout auto")
    assert auto.returncode == 0, auto.stderr
    (text,) = re.findall(r"^--pipeline-model-parallel-layout '(.+)'$", auto.stdout, re.MULTILINE)
    stage = re.compile(r"^ +\d .*$", re.MULTILINE)
    assert stage.findall(plan(f"--pipeline-model-parallel-layout {text}").stdout) == stage.findall(auto.stdout)


def test_the_split_that_it_prints_has_the_depths_where_they_stand(capsys):
    command("plan")([*MODEL.split(), "--mtp-num-layers", "1", "--pipeline-model-parallel-layout", "Ettm|ttttL"])
    assert capsys.readouterr().out.strip().splitlines()[-1] == "--pipeline-model-parallel-layout 'Ettm|t*4L'"


def test_costs_of_a_rehearsal_are_those_of_another_plan(tmp_path):
    file = tmp_path / "costs.json"
    words = f"--world-size 2 --steps 1 --save-costs {file} -- --distributed-backend gloo"
    measured = run(["tools/rehearse.py", *words.split(), *MODEL.split()])
    assert measured.returncode == 0, measured.stderr
    assert f"costs of the stages, in measured seconds: {file}, for --pipeline-costs of a run" in measured.stdout
    costs = load_costs(file)
    assert isinstance(costs.f, tuple)
    assert len(costs.f) == 2  # seconds of two stages, the second with the head
    assert 0 <= costs.overhead < 1
    assert 0 < min(costs.f) <= max(costs.f) < 10
    assert plan(f"--costs {file} --pipeline-schedule zb-auto").returncode == 0
    refused = plan(f"--costs {file} --pipeline-schedule zb-v")
    assert "Costs.f names 2 stages, but the model is cut in 4" in refused.stderr


def test_what_a_run_would_refuse_is_refused():
    refused = plan("--num-layers 7")
    assert refused.returncode == 2
    assert refused.stderr.startswith("plan.py: error: --num-layers 7 does not fill 2 stages: 7 = 2 x 3 + 1.")


def test_a_plan_says_what_busier_experts_need():
    """0.7 GiB of room were called a fit, and an early router deals some rank 1.3 x the mean."""
    experts = MODEL.replace("16", "40") + " --padded-vocab-size 2048 --num-experts 4 --moe-router-topk 2"

    def planned(flags: str) -> tuple[Plan, Config]:
        config = replace(parse(Config, f"{experts} {flags}".split()), world_size=4)
        return make_plan(config), config

    # 40 tokens have 80 rows. Of a row the first product's 128 floats are kept, its weight and three numbers (int64).
    # The last rank, which needs most, holds one microbatch of its three layers.
    more = 0.3 * 80 * (4 * 128 + 4 + 3 * 8) * 3 / GIB
    assert f"with 1.3 x the mean of the tokens a rank needs up to {more:.3g} GiB more" in load_line(
        *planned("--expert-model-parallel-size 2")
    )
    # No expert can be busier than its capacity, or every rank has all experts.
    full = "--expert-model-parallel-size 2 --moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1.0"
    assert [load_line(*planned(flags)) for flags in (full, "--expert-model-parallel-size 1")] == ["", ""]
    # A plan that fits by half of that lacks the other half; of a plan without room the page says so anyway.
    one, config = planned("--expert-model-parallel-size 2")
    peak = max(one.peak_bytes)
    lacks = f". That is {more / 2:.3g} more than it may take"
    assert load_line(one, config, peak + more / 2 * GIB).endswith(lacks)
    assert not any("may take" in load_line(one, config, peak + x * GIB) for x in (2 * more, -more))


def test_a_plan_needs_none_of_the_runs_files(capsys):
    """A script of a cluster was refused on a laptop for the files that it names."""
    there = [*MODEL.replace("--mock-data", "--data-path no/where").split(), "--world-size", "2"]
    command("plan")(there)
    named = capsys.readouterr().out
    command("plan")([*there, "--check-paths", "no"])
    without = capsys.readouterr().out
    command("plan")([*MODEL.split(), "--world-size", "2"])
    assert without.partition("\nstage")[2] == capsys.readouterr().out.partition("\nstage")[2]
    missing = [line for line in named.splitlines() if line not in without.splitlines()]
    assert [line.partition(": ")[0] for line in missing] == ["missing here, and no plan needs it"]
    assert "no/where" in missing[0]


def test_the_number_of_processes_has_one_name_and_counts():
    """Of the optimizer's state under ZeRO-1 each of n replicas has an n-th."""
    peaks = [plan(f"--use-distributed-optimizer --world-size {n}") for n in (2, 8)]
    assert all(done.returncode == 0 for done in peaks), peaks[0].stderr
    assert peaks[0].stdout != peaks[1].stdout
    refused = plan("--world-size 3")
    assert "--world-size 3" in refused.stderr or "3 processes" in refused.stderr
    zero = "plan.py: error: --world-size 0 must be at least 1 and at most 100000"
    assert plan("--world-size 0").stderr.startswith(zero)
    assert "--pipeline-model-parallel-size 0 must be at least 1" in plan("--pipeline-model-parallel-size 0").stderr


@pytest.mark.parametrize("search", ["", "--search"])
def test_every_wrong_flag_of_plan_and_run_is_told_at_once(search):
    with pytest.raises(ConfigError) as caught:
        command("plan")(
            [
                *MODEL.split(),
                *f"{search} --wurld-size 2 --gpus 4 --seed x --split 1,1 --fix tq --num-attention-heads 5".split(),
            ]
        )
    said = "\n".join(caught.value.problems)
    assert "unknown flag --wurld-size; did you mean --world-size?" in said
    assert said.count("--gpus") == 1
    assert "--seed x: expected an integer" in said
    assert "--hidden-size 32 is not divisible by --num-attention-heads 5" in said
    if search:
        assert "--fix tq is no axis" in said
        assert "--search needs --world-size" not in said  # the misspelled flag may be it
    else:
        assert "--fix tq is of --search" in said


def test_a_machine_reads_what_the_table_says(tmp_path, capsys):
    flags = [*MODEL.split(), "--pipeline-model-parallel-size", "3"]
    command("plan")([*flags, "--json", "-"])
    told = json.loads(capsys.readouterr().out)
    command("plan")([*flags, "--json", str(tmp_path / "plan.json")])
    assert json.loads((tmp_path / "plan.json").read_text()) == told
    shown = [line.split() for line in capsys.readouterr().out.splitlines()[1:4]]
    assert [f"{stage['parameters']:,}" for stage in told["stages"]] == [row[-4] for row in shown]
    assert [f"{peak / 2**30:.3g}" for peak in told["peak_bytes"]] == [row[-1] for row in shown]
    assert [stage["layers"] for stage in told["stages"]] == [[0, 1], [2, 3], [4, 5]]


def test_a_plan_whose_experts_exchange_tokens_between_nodes_is_no_sure_one(capsys):
    experts = "--num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall"
    for ranks, far in ((8, False), (16, True)):
        layout = f"--expert-model-parallel-size {ranks} --world-size 16 --use-distributed-optimizer"
        words = [*DENSE.split(), *experts.split(), *layout.split()]
        command("plan")(words)
        said = capsys.readouterr().out
        assert ("its experts exchange tokens between nodes." in said) == far
        # On one pipeline rank this order of ranks is the other one.
        command("plan")([*words, "--use-tp-pp-dp-mapping"])
        assert capsys.readouterr().out.partition("\nstage")[2] == said.partition("stage")[2]


def test_a_plan_that_takes_long_says_that_it_goes_on(capsys):
    """A vocabulary on all ranks within a memory limit took two minutes without a word."""
    own = parse(Config, [*MODEL.split(), "--vocab-parallel-pipeline", "--memory-limit-gib", "1"])
    began = time.monotonic()
    said = ""
    with goes_on(f"making the plan{slow(own)}"):
        while "making" not in said and time.monotonic() < began + 60:
            time.sleep(0.05)
            said += capsys.readouterr().err
    assert re.match(
        r"\d+ s: making the plan; --memory-limit-gib with --vocab-parallel-pipeline may take minutes\n", said
    )
    assert "limit" not in slow(parse(Config, MODEL.split()))


@pytest.mark.parametrize("schedule", ["", "--pipeline-schedule dualpipe-v"])
def test_a_tied_embedding_counts_once_where_one_rank_has_both_ends(schedule, capsys):
    """A model of 3.2e9 parameters was said to have 3.6e9."""
    ranks = 2 if schedule else 1
    line = [*MODEL.split(), "--padded-vocab-size", "2048", "--pipeline-model-parallel-size", str(ranks)]
    line += ["--num-layers", "8", *schedule.split()]
    untied = "--untie-embeddings-and-output-weights"
    tied, apart = (sum(x["parameters"] for x in told(one, capsys)["stages"]) for one in (line, [*line, untied]))
    assert apart - tied == 2048 * 32
    command("plan")(line)
    rows = [x.split() for x in capsys.readouterr().out.splitlines()[1 : 1 + 2 * ranks - (ranks == 1)]]
    assert sum(int(row[-4].replace(",", "")) for row in rows) == tied
