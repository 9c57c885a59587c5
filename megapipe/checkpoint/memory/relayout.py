"""Find a rank's state in the states of a world with another number of data-parallel ranks.

A checkpoint has whole tensors, which any layout reads. States in memory have parts of flat tensors:
each data-parallel rank has an equal part, and the end of the tensor is padded. The parts of another
number of ranks are other pieces of the same flat tensor. Below, a digit is an element that the rank
of this number has, and a dot is padding.

    three ranks   [ 0 0 0 0 | 1 1 1 1 | 2 2 . . ]        two ranks   [ 0 0 0 0 0 | 1 1 1 1 1 ]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megapipe.checkpoint.memory.cliques import equal_sets, sets_of
from megapipe.config import Config
from megapipe.optim.buffers import ALIGN

ROW = 64
"""Each tensor of a state begins at a multiple of this many bytes."""


@dataclass(frozen=True)
class Kept:
    """A tensor of a rank's state.

    Attributes:
        tensor: the tensor on this rank: a shard, or the whole tensor.
        filled: for a flat tensor, which data-parallel ranks may split: number of elements of the
            whole, without padding. None for any other tensor, which each of them has whole.
        of_experts: whether the tensor belongs to experts, which fewer ranks share.
    """

    tensor: Tensor
    filled: int | None = None
    of_experts: bool = False

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return self.tensor.numel() * self.tensor.element_size()


State = Sequence[Sequence[Kept]]
"""The tensors of a rank's state, stage by stage."""


class Piece(NamedTuple):
    """A range of bytes of one state that is copied into another state.

    Attributes:
        owner: the rank whose state has the bytes.
        at: the offset of the range in that state.
        to: the offset of the range in the other state.
        size: the number of bytes.
    """

    owner: int
    at: int
    to: int
    size: int


def rows(size: int) -> int:
    """Return the bytes that a tensor of `size` bytes takes in a state: `size` rounded up to ROW."""
    return -(-size // ROW) * ROW


def size_of(state: State) -> int:
    """Return the bytes of a state in memory."""
    return sum(rows(x.size) for stage in state for x in stage)


def pieces(state: State, rank: int, config: Config, before: int) -> list[Piece]:
    """Return the byte ranges of earlier states that together make up a rank's state now.

    The earlier run had another number of data-parallel ranks; all other parallel sizes are equal.

    Args:
        state: the rank's tensors now.
        rank: the global rank now.
        config: the configuration now.
        before: the number of ranks of the earlier run.
    """
    earlier = dataclasses.replace(config, world_size=before)
    sets, sends = sets_of(earlier)
    owner = dict(zip(range(before), range(before), strict=True))
    if not sends:
        # States that are equal go by the first rank's number.
        owner = {member: ranks[0] for ranks in sets for member in ranks}
    found = []
    at = to = 0
    for x in (x for stage in state for x in stage):
        now, then = _along(config, rank, x), _along(earlier, rank, x, config)
        size = x.tensor.element_size()
        if x.filled is None:
            found.append(Piece(owner[then[0]], at, to, x.size))
            at += rows(x.size)
            to += rows(x.size)
            continue
        sharded = config.parallel.splits_optimizer
        shares = len(then) if sharded else 1
        length = -(-x.filled // (ALIGN * shares)) * ALIGN
        first = now.index(rank) * x.tensor.numel() if sharded else 0
        end = min(first + x.tensor.numel(), x.filled)
        for n in range(shares):
            low, high = max(first, n * length), min(end, (n + 1) * length)
            if low < high:
                places = (at + (low - n * length) * size, to + (low - first) * size)
                found.append(Piece(owner[then[n]], *places, (high - low) * size))
        at += rows(length * size)
        to += rows(x.size)
    return found


def _along(config: Config, rank: int, x: Kept, of: Config | None = None) -> tuple[int, ...]:
    """Return the ranks that have shards or copies of the same tensor as `rank`.

    Args:
        config: the run whose ranks are returned.
        rank: a global rank of the run `of`.
        x: the tensor.
        of: the run in which `rank` is a rank; None if it is `config`.
    """
    experts = x.of_experts
    if x.filled is None:
        experts = config.model.has_experts
    # Sets are in the order of all other axes, whose sizes are equal in both worlds.
    sets = equal_sets(of or config, experts=experts)
    place = next(n for n, ranks in enumerate(sets) if rank in ranks)
    return equal_sets(config, experts=experts)[place]
