"""Flags that say which layers are on which stage: what they lead to, and what is refused with a remedy."""

import itertools

import pytest
from small_plans import config, problems, stages

from megapipe.checks.run import validate
from megapipe.errors import ConfigError


def test_a_layout_says_how_many_stages_a_rank_has():
    assert stages("--num-layers 10 --pipeline-model-parallel-layout Ett|(ttt|)*2,ttL", 4) == ("1f1b", (2, 3, 3, 2))
    assert stages("--num-layers 10 --pipeline-model-parallel-layout Ett|(ttt|)*2,ttL", 2)[0] == "interleaved"
    layout = "--num-layers 3 --pipeline-model-parallel-layout E|tt|t|L --pipeline-schedule"
    assert stages(f"{layout} zb-v", 2) == ("zb-v", (0, 2, 1, 0))
    assert stages("--num-layers 3 --pipeline-model-parallel-layout Et|ttL --pipeline-schedule dualpipe", 2)[1] == (1, 2)


FLAGS = {
    "per stage": "--num-layers-per-virtual-pipeline-stage 1",
    "per rank": "--num-virtual-stages-per-pipeline-rank 2",
    "layout": "--pipeline-model-parallel-layout Et|tL",
    "first": "--decoder-first-pipeline-num-layers 1",
    "last": "--decoder-last-pipeline-num-layers 1",
    "embedding": "--account-for-embedding-in-pipeline-split",
    "loss": "--account-for-loss-in-pipeline-split",
}
TOGETHER = {("per stage", "embedding"), ("per stage", "loss"), ("first", "last"), ("embedding", "loss")} | {
    ("per rank", other) for other in ("first", "last", "embedding", "loss")
}


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations(FLAGS, 2)))
def test_two_flags_are_refused_together_as_megatron_refuses_them(a, b):
    # 16 layers with two counted do not fill stages: then the refusal is about layers, not about the pair.
    flags = f"--pipeline-model-parallel-size 2 --num-layers 16 {FLAGS[a]} {FLAGS[b]}"
    try:
        validate(config(flags, 2), has_cuda=False)
        text = ""
    except ConfigError as error:
        text = str(error)
    refused = any(FLAGS[a] in line and FLAGS[b] in line and "both say" in line for line in text.splitlines())
    refused |= "makes stages uneven" in text
    assert refused == ((a, b) not in TOGETHER), text


def test_auto_takes_virtual_stages_but_no_other_split():
    auto = "--num-layers 6 --pipeline-model-parallel-layout auto"
    name, counts = stages(f"{auto} --num-virtual-stages-per-pipeline-rank 2", 2)
    assert (name, len(counts), sum(counts)) == ("interleaved", 4, 6)
    assert "both say the layers of a stage" in problems(
        f"--pipeline-model-parallel-size 2 {auto} --decoder-first-pipeline-num-layers 1", 2
    )
