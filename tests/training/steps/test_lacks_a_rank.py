"""A run that lacks a rank: which runs are one, what they leave out, and what is refused before ranks meet."""

from dataclasses import replace

import pytest

from megapipe.checkpoint.memory.cliques import equal_sets
from megapipe.checks.run import flag_problems
from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse
from megapipe.plan.make import make_plan
from megapipe.training.check import report
from megapipe.training.hooks import NONE
from megapipe.training.reschedule import with_rescheduling

RUN = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --lr 1e-3 "
    "--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 12 --train-iters 4 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 127 --eval-iters 0"
)
IN_MEMORY = "--non-persistent-ckpt-type local --non-persistent-save-interval 1 --elastic"


def run(flags, ranks=3):
    return replace(parse(Config, f"{RUN} {flags}".split()), world_size=ranks)


def test_one_rank_short_of_whole_replicas_is_a_run_that_lacks_a_rank():
    sizes = {ranks: run(IN_MEMORY, ranks) for ranks in range(1, 7)}
    assert {n: c.data_parallel_size for n, c in sizes.items() if c.lacks_a_rank} == {3: 2, 5: 3}
    assert equal_sets(sizes[5], experts=False) == [(0, 2, 4), (1, 3)]


def test_elastic_without_states_in_memory_is_without_effect():
    """It was said to be idle, and such a run was rerouted all the same."""
    assert not run("--elastic").lacks_a_rank
    assert "3 processes are not" in " ".join(flag_problems(run("--elastic")))


@pytest.mark.parametrize(
    "flags",
    ["--use-distributed-optimizer --replication", "--dataloader-type cyclic", "--enable-optimizer-post-validation"],
)
def test_passes_that_peers_cannot_run_are_refused_with_what_to_start(flags):
    (problem,) = [x for x in flag_problems(run(f"{IN_MEMORY} {flags}")) if "one rank is missing" in x]
    assert problem.startswith("--elastic")
    assert problem.endswith("Start all ranks, or a replica less.")
    assert not [x for x in flag_problems(run(f"{IN_MEMORY} {flags}", ranks=4)) if "missing" in x]


def test_a_run_that_lacks_a_rank_keeps_its_table():
    """Its steps have no times: the second step ended in an AssertionError, and so did each start after it."""
    flags = f"{IN_MEMORY} --reschedule-after 3"
    assert with_rescheduling(NONE, run(flags), plan=None) is NONE
    assert with_rescheduling(NONE, run(flags, ranks=4), plan=None) is not NONE


def test_check_says_that_a_rank_is_missing():
    config = run(IN_MEMORY)
    text = report(replace(config, check=replace(config.check, check=True, world_size=3)))
    assert "3 processes = 1 tensor x 2 pipeline x 2 data parallel less one rank; a batch of 12" in text
    assert "data parallelism keeps 2 equal states (1 of the missing rank's stages), and a run goes on" in text


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--pipeline-schedule dualpipe", "Each stage of dualpipe is on two ranks already"),
        ("--vocab-parallel-pipeline", "has C, E, EW, S, T: reroute F, B, W and BW"),
    ],
)
def test_check_refuses_tables_that_cannot_be_rerouted(flags, why):
    """It let them pass, and DualPipe ended where its stages are built: "tuple.index(x): x not in tuple"."""
    config = run(f"{IN_MEMORY} {flags}")
    with pytest.raises(ConfigError, match=f"a rank is missing, and its passes cannot be rerouted.*{why}"):
        report(replace(config, check=replace(config.check, check=True, world_size=3)))
    assert report(replace(config, check=replace(config.check, check=True, world_size=4)))


def test_the_plan_has_room_for_a_second_set_of_gradients_on_the_peer():
    whole, lacking = (
        make_plan(replace(c, model=replace(c.model, padded_vocab_size=128)))
        for c in (run(IN_MEMORY, 4), run(IN_MEMORY))
    )
    # 12 h^2 + 13 h a layer, the last norm and the tied head.
    parameters = 2 * (12 * 16**2 + 13 * 16) + 2 * 16 + 128 * 16
    more = [b - a for a, b in zip(whole.peak_bytes, lacking.peak_bytes, strict=True)]
    idle = max(whole.timeline.peak) - whole.timeline.peak[-1]
    assert more == [0, pytest.approx(4 * parameters + idle)]
