"""A run that lacks a rank: which runs are one, what they leave out, and what is refused before ranks meet."""

from dataclasses import replace

import pytest

from megapipe.checkpoint.memory.cliques import equal_sets
from megapipe.checks.run import flag_problems
from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse
from megapipe.schedule import build
from megapipe.training.check import report
from megapipe.training.hooks import NONE
from megapipe.training.reschedule import with_rescheduling
from megapipe.training.steps.rerouted import refuse_twins

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
    assert equal_sets(sizes[5]) == [(0, 2, 4), (1, 3)]


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


def test_stages_on_two_ranks_are_refused_before_they_are_built():
    """Building them without a rank ended in "tuple.index(x): x not in tuple"."""
    with pytest.raises(ConfigError, match="dualpipe cannot be rerouted, as each of its stages is on two ranks"):
        refuse_twins(build("dualpipe", 2, 6))
    refuse_twins(build("zb-v", 2, 6))
