"""Layers whose weights are split over tensor-parallel ranks.

Each layer is imported when it is first used: a plan needs the sizes here, and no torch.
"""

import typing

KEPT_ELEMENTS = 1 << 26
"""The most logits of a microbatch that are kept for backward by default: 128 MiB in bf16."""
PIECES = 4
"""Pieces of a product that is all-reduced; only the last piece's all-reduce is not overlapped."""

if typing.TYPE_CHECKING:
    # The same names as in _ROOMS: type checkers read these lines, and Python those below.
    from megapipe.tensor_parallel.cross_entropy import (
        vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
    )
    from megapipe.tensor_parallel.embedding import VocabParallelEmbedding as VocabParallelEmbedding
    from megapipe.tensor_parallel.linear import ColumnParallelLinear as ColumnParallelLinear
    from megapipe.tensor_parallel.linear import RowParallelLinear as RowParallelLinear

_ROOMS = {
    "vocab_parallel_cross_entropy": "cross_entropy",
    "VocabParallelEmbedding": "embedding",
    "ColumnParallelLinear": "linear",
    "RowParallelLinear": "linear",
}

if not typing.TYPE_CHECKING:
    # Hidden from type checkers, which would take any misspelled name for a name of this module.

    def __getattr__(name: str) -> typing.Any:
        """Import a name when it is first used. Raises: AttributeError if there is none."""
        if name not in _ROOMS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
