"""What a user reads about depths of multi-token prediction that cannot be."""

import pytest

from .sound import config, problem

LAYOUT = "--pipeline-model-parallel-layout"


@pytest.mark.parametrize(
    "flags, line",
    [
        (f"{LAYOUT} Ettttm|ttttL", f"{LAYOUT} Ettttm|ttttL lists 1 m, but --mtp-num-layers is 0. Make them equal."),
        (
            f"{LAYOUT} Etttt|ttttmL --mtp-num-layers 2",
            f"{LAYOUT} Etttt|ttttmL lists 1 m, but --mtp-num-layers is 2. Make them equal.",
        ),
        ("--mtp-num-layers 101", "--mtp-num-layers 101 must be at least 0 and at most 100"),
        (
            "--mtp-num-layers 1 --enable-optimizer-post-validation",
            "--mtp-num-layers 1 does not go with --enable-optimizer-post-validation: a depth's embedding and head come "
            "from their owners when an update is valid. Leave one out.",
        ),
        (
            "--mtp-num-layers 1 --pipeline-slices 2",
            "--mtp-num-layers 1 does not go with --pipeline-slices 2: a depth is a pass of a whole microbatch. "
            "Leave one out.",
        ),
        (
            # Its projection of two widths to one is split by rows; with --kv-channels nothing else divides this width.
            "--mtp-num-layers 1 --pipeline-model-parallel-size 1 --tensor-model-parallel-size 4 --hidden-size 30 "
            "--kv-channels 8 --ffn-hidden-size 128 --num-attention-heads 4",
            "--hidden-size 30 does not divide by --tensor-model-parallel-size 4: 30 = 4 x 7 + 2. "
            "Use --tensor-model-parallel-size 1 or 2.",
        ),
    ],
)
def test_each_problem_has_its_line(flags, line):
    ranks = 4 if "--tensor-model-parallel-size 4" in flags else 2
    assert problem(f"--pipeline-model-parallel-size 2 --global-batch-size 8 {flags}", ranks) == line


def test_two_copies_of_a_model_have_their_depths_with_embedding_and_loss():
    flags = "--pipeline-model-parallel-size 4 --pipeline-schedule dualpipe --global-batch-size 16 --mtp-num-layers 1"
    assert problem(f"{flags} {LAYOUT} Ett|ttm|tt|ttL", 4) == (
        "--pipeline-schedule dualpipe has two copies of the model, whose ends are on ranks 0 and 3: "
        f"{LAYOUT} Ett|ttm|tt|ttL has m on rank 1. List m with E or L, or use dualpipe-v."
    )
    assert config(flags).model.depths == 1
