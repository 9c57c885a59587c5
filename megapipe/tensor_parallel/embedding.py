"""The word embedding with its rows split over tensor-parallel ranks (Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout, set_layout
from megapipe.tensor_parallel.collectives import Edge, closing
from megapipe.tensor_parallel.vocabulary import add_rows_gradient, look_up


class _Lookup(torch.autograd.Function):
    """weight[ids], zero where an id is not of this rank; the gradient is added row by row into main_grad."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, first: int, closes: Edge) -> Tensor:
        local, ctx.closes, ctx.weight = ids - first, closes, weight
        ctx.save_for_backward(local, weight)
        return closes.forward(look_up(local, weight)).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None, None]:
        local, weight = ctx.saved_tensors
        main_grad: Tensor | None = getattr(ctx.weight, "main_grad", None)
        into = torch.zeros_like(weight) if main_grad is None else main_grad
        add_rows_gradient(local, ctx.closes.backward(grad).wait(), into)
        return None, into if main_grad is None else None, None, None


_lookup: Callable[..., Tensor] = _Lookup.apply


class VocabParallelEmbedding(nn.Module):
    """Weight [v/t, h]: rank r holds rows r v/t .. (r+1) v/t - 1.

    Args:
        num_embeddings: v, rows of the whole table; must divide by tp.
        embedding_dim: h.
        sequence_parallel: the output is this rank's share of the sequence, the first dimension of the ids.
        init_std, tied_to: of the weight, as in Layout.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        tp: Axis,
        sequence_parallel: bool = False,
        init_std: float | None = 0.02,
        tied_to: str | None = None,
    ) -> None:
        super().__init__()
        assert num_embeddings % tp.size == 0, f"{num_embeddings} rows do not divide over {tp.size} ranks"
        self.tp = tp
        self._closes = closing(tp, sequence_parallel)
        self.weight = set_layout(
            nn.Parameter(torch.empty(num_embeddings // tp.size, embedding_dim)),
            Layout((num_embeddings, embedding_dim), 0, tied_to, std=init_std),
        )

    def forward(self, ids: Tensor) -> Tensor:
        """ids [s, ...], 0..v-1 -> [s, ..., h], the same on all tp ranks, or [s/t, ..., h]."""
        return _lookup(ids, self.weight, self.tp.rank * self.weight.shape[0], self._closes)
