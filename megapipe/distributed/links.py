"""Communicators of one way each, for messages between neighbours of a pipeline over NCCL.

NCCL runs what is posted on one communicator one after another: a receive that waits for its sender would hold up every
message behind it. Here each communicator of a rank serves one neighbour, one way, so that a waiting receive holds up
only receives from the same neighbour, and may be posted before its turn.
"""

from __future__ import annotations


def num_links(size: int) -> int:
    """How many communicators the links of a ring of `size` ranks need."""
    return 0 if size == 1 else 2 if size == 2 else 4 + 2 * (size % 2)


def link(src: int, dst: int, size: int) -> int | None:
    """The communicator from src to dst, 0..num_links-1; None if they are not neighbours on the ring.

    The links of a chain take two colours in turn, the one that closes an odd ring a third; each colour has two ways.
    """
    low, high = sorted((src, dst))
    if high - low not in (1, size - 1):
        return None
    place = low if high - low == 1 else high
    colour = 2 if size % 2 and place == size - 1 else place % 2
    return 2 * colour + (src < dst)
