"""Sizes that a plan counts are those with which a run computes."""

from megapipe.plan import sizes
from megapipe.tensor_parallel import fused_cross_entropy, pieces


def test_a_plan_counts_the_sizes_of_a_run():
    assert sizes.KEPT_ELEMENTS == fused_cross_entropy.KEPT_ELEMENTS
    assert sizes.PIECES == pieces.PIECES
