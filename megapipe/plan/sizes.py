"""Sizes of tensor-parallel work that a plan counts, as megapipe.tensor_parallel has them.

They are written here too, since that room imports torch, which takes two seconds; a search of plans
has its first plan sooner. tests/plan/test_sizes.py holds them equal.
"""

KEPT_ELEMENTS = 1 << 26
"""The most logits of a microbatch that are kept for backward by default."""
BLOCK_ELEMENTS_GPU = 1 << 28
"""The most logits of a block that the fused loss computes at a time on a GPU."""
PIECES = 4
"""Pieces of a product that is all-reduced in pieces."""
