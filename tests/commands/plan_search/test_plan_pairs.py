"""Plans of a search whose passes run in pairs, by their schedule or by a flag."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from small_searches import MODEL, SLOW, run_search

from megapipe.commands.plan.search.final import of_run
from megapipe.commands.plan.search.hiding import without_more_pairs
from megapipe.commands.plan.search.report import summary
from megapipe.config import Config
from megapipe.flags.parse import parse
from megapipe.plan import GIB

FLAG = "--overlap-moe-expert-parallel-comm"
EXPERTS = "--num-experts 4 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"


@pytest.mark.parametrize(("model", "hidden"), [(EXPERTS, "ep=2 tp=1"), ("", "tp=2")])
def test_pairs_of_a_schedule_and_the_few_more_of_a_flag_are_one_plan_of_the_list(model, hidden, capsys, tmp_path):
    """Plans 1 and 7 both had dualpipe-v's pairs, and one of them a flag whose effect was not to be seen."""
    rates = tmp_path / "rates.json"
    rates.write_text(json.dumps({"flops": 1e11, "inside": 1e9, "outside": 1e9, "overhead": 1e-6, "latency": 1e-6}))
    line = f"--global-batch-size 32 --world-size 4 --rates {rates} {model} --fix recompute "
    line += "--without sharding moves vocabulary"
    best, said = run_search(
        f"{line} --among pp=2 micro=1 {hidden} schedule=dualpipe-v,1f1b", capsys, tmp_path, "hanayo"
    )
    steps = {FLAG in x["flags"]: x["step_s"] for x in best if x["schedule"] == "dualpipe-v"}
    assert len(steps) == 1 or steps[True] < 0.99 * steps[False]
    assert "dualpipe-v, recomputes nothing, passes in pairs by the schedule itself" in said.out
    assert f"1f1b, recomputes nothing, passes in pairs by {FLAG}" in said.out
    assert "no GPU measured it\n  plan 1 rests on this" in said.out
    block = said.out.partition("on every page:\n")[2].partition("\ntake ")[0]
    assert max(map(len, block.splitlines())) <= 100


@pytest.mark.parametrize(("schedule", "stays"), [("dualpipe-v", False), ("1f1b", True)])
def test_a_flag_of_pairs_stays_where_it_makes_them(schedule, stays):
    line = f"{EXPERTS} --pipeline-model-parallel-size 2 --pipeline-schedule {schedule} {FLAG}"
    line += " --global-batch-size 64 --padded-vocab-size 1024"
    config = replace(parse(Config, [*MODEL.split(), *line.split()]), world_size=4)
    made = of_run(config, SLOW)
    found = without_more_pairs(made, SLOW, GIB)
    assert found.config.parallel.overlap_moe_expert_parallel_comm == stays
    assert found.step <= 1.01 * made.step
    assert (FLAG in summary(found, SLOW)) == stays
