"""Sizes of tensor-parallel work that a plan counts too. Nothing is imported here, torch neither."""

KEPT_ELEMENTS = 1 << 26
"""The most logits of a microbatch that are kept for backward by default: 128 MiB in bf16."""
PIECES = 4
"""Pieces of a product that is all-reduced; only the last piece's all-reduce is not overlapped."""
