"""No flag of a command is ignored in silence: what has nothing to act on is refused, or named as without effect."""

from __future__ import annotations

import pytest

from megapipe.commands.main import command
from megapipe.errors import UserError

RUN = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 127 --pipeline-model-parallel-size 2"
)
CHAOS = "-- torchrun pretrain_gpt.py --save-interval 5"
REFUSED = {
    "schedules show 1f1b --pp 2 --microbatches 4 --shard 0.3,0.3 --step 2,0.5": (
        "--shard sums gradients after runs of passes, --step once a step"
    ),
    "schedules compare --pp 2 --microbatches 4 --copied-chunks 1": "--copied-chunks is of --copies.",
    "schedules compare --pp 2 --microbatches 4 --copies fits": (
        "--copies fits and needed choose within a limit. Add --memory 4."
    ),
    "schedules show zb-auto --pp 2 --microbatches 4 --depths 4": (
        "a depth of multi-token prediction is to be on rank 4, and there are 2 ranks, from 0. Use --depths 1."
    ),
    f"schedules show zb-auto --pp {2**63 - 1} --microbatches 4 --placement v": "tables have at most 4,000,000",
    "check --check": "--check: the command check checks, with or without it. Leave it out.",
    "check --no-check": "--no-check: the command check checks, with or without it. Leave it out.",
    f"plan {RUN} --search-jobs 2": "--search-jobs 2 is of --search. Add that, or leave it out.",
    "gpu-check --device cpu --only no-such": "--only no-such is none of the cases: ",
    "gpu-check --device cpu --minutes nan": "--minutes nan must be above 0",
    f"chaos --minutes nan {CHAOS}": "--minutes nan must be above 0",
    f"chaos --every 0 {CHAOS}": "--every 0 must be above 0",
    f"chaos --kinds kill,melt {CHAOS}": "--kinds kill,melt: melt is none of kill, stop",
    f"tokenizer --input x --output y --vocab-size {10**20}": "must be at most 1073741824",
    "tokenizer --input x --output y --sample-mb nan": "--sample-mb nan must be a number above 0",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_flag_that_would_be_ignored_is_refused(line, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    name, *words = line.split()
    with pytest.raises(UserError) as caught:
        command(name)(words)
    assert REFUSED[line] in str(caught.value)
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_a_plan_names_the_flags_of_its_run_that_have_nothing_to_act_on(capsys):
    command("plan")([*RUN.split(), "--moe-router-topk", "4"])
    block = capsys.readouterr().out.partition("stage  rank")[0]
    assert "accepted, and what holds instead:" in block
    assert "--moe-router-topk 4" in block


def test_a_comparison_without_a_search_says_that_its_effort_is_without_effect(capsys):
    line = "compare --pp 2 --microbatches 4 --effort 0.1 --only"
    command("schedules")([*line.split(), "zb-h1"])
    assert "--effort 0.1 is without effect: none of these schedules is searched for" in capsys.readouterr().out
    command("schedules")([*line.split(), "zb-auto"])
    assert "without effect" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--copied-chunks 1", "--copied-chunks 1 has no effect: a rank has 1 stage(s)"),
        ("--switch 1", "--switch 1 has no effect: each rank has its own way to the host"),
    ],
)
def test_flags_of_copies_that_change_nothing_are_named(flags, said, capsys):
    line = f"show 1f1b --pp 2 --microbatches 4 --copy-ratio 0.5 {flags}"
    command("schedules")(line.split())
    assert said in capsys.readouterr().out.splitlines()


def test_a_comparison_says_which_parts_each_schedule_has(capsys):
    line = "compare --pp 2 --microbatches 4 --only zb-h1 --shard-gradients --copies fits --memory 3"
    command("schedules")(line.split())
    said, table = capsys.readouterr().out.split("\n", 1)
    assert said == "each schedule with --copies fits --shard-gradients"
    assert table.startswith("schedule  makespan")


@pytest.mark.parametrize("names, idle", [("zb-h1", True), ("dualpipe", False)])
def test_a_comparison_without_pairs_says_that_a_share_of_communication_is_without_effect(names, idle, capsys):
    line = f"compare --pp 4 --microbatches 8 --comm-share 0.5 --only {names}"
    command("schedules")(line.split())
    said = "--comm-share 0.5 is without effect: none of these runs passes together. Add --pairs."
    assert (said in capsys.readouterr().out) == idle


def test_processes_of_one_machine_are_said_to_count_for_nothing_next_to_those_of_the_run(capsys):
    command("check")([*RUN.split(), "--nproc", "4", "--world-size", "2"])
    out = capsys.readouterr().out
    assert out.startswith("--nproc 4 is without effect: --world-size 2 says how many processes run\n")
    assert "2 processes = 1 tensor x 2 pipeline" in out
