"""Where the documents of a microbatch lie, for attention that stays inside them and positions that start anew.

Plain numbers read from the token ids on the host: no layer needs a mask of s x s, and every stage can know them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Documents of each sequence of a microbatch.

    Attributes:
        lengths: for each of the b sequences the lengths of its documents in order; their sum is s.
        isolate: attention does not cross from one to another (--reset-attention-mask).
        restart: positions begin at 0 in each (--reset-position-ids).
    """

    lengths: tuple[tuple[int, ...], ...]
    isolate: bool
    restart: bool


def find_documents(tokens: Tensor, eod: int, *, isolate: bool, restart: bool) -> Documents:
    """Cut after each end-of-document token. tokens: [b, s] on the host."""
    lengths = []
    for row in tokens == eod:
        ends = [*(row[:-1].nonzero().flatten() + 1).tolist(), len(row)]
        lengths.append(tuple(end - begin for begin, end in pairwise([0, *ends])))
    return Documents(tuple(lengths), isolate, restart)


@lru_cache(maxsize=16)  # all layers of a pass ask for the same
def restarting_positions(documents: Documents, device: torch.device) -> Tensor:
    """[b, s] int64: the index of each token in its document."""
    rows = [torch.cat([torch.arange(n) for n in lengths]) for lengths in documents.lengths]
    return torch.stack(rows).to(device)
