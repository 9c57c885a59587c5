"""Sizes that a plan counts are those with which a run computes, and it says what a small one drops."""

import pytest

from megapipe.config import Config
from megapipe.flags.parse import parse
from megapipe.library.runs import check
from megapipe.plan import sizes
from megapipe.tensor_parallel import fused_cross_entropy, pieces


def test_a_plan_counts_the_sizes_of_a_run():
    assert sizes.KEPT_ELEMENTS == fused_cross_entropy.KEPT_ELEMENTS
    assert sizes.BLOCK_ELEMENTS_GPU == fused_cross_entropy.BLOCK_ELEMENTS_GPU
    assert sizes.PIECES == pieces.PIECES


@pytest.mark.parametrize("factor, says", [(0.25, "drops 75.0% of the choices"), (1.25, None)])
def test_a_capacity_below_an_even_load_says_what_it_drops(factor, says):
    flags = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
        "--num-experts 4 --expert-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 4 --train-iters 9 "
        "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --world-size 2 "
        f"--moe-expert-capacity-factor {factor}"
    )
    said = check(parse(Config, flags.split()))
    assert "experts: 2 of 4 on a rank" in said
    if says:
        assert says in said
    else:
        assert "drops" not in said
