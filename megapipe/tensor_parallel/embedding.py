"""The word embedding, split by rows over tensor-parallel ranks (Shoeybi et al. 2019, sec. 3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout, parameter
from megapipe.tensor_parallel.collectives import Edge, closing
from megapipe.tensor_parallel.vocabulary import add_rows_gradient, look_up
from megapipe.tensor_parallel.weight_grad import submit_weight_grad


class _Lookup(torch.autograd.Function):
    """The autograd function of a lookup: weight[ids] on the rank with the row, summed over ranks.

    A rank contributes 0 for an id whose row is on another rank. Backward adds the gradient row by
    row into the weight's main_grad.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, first: int, closes: Edge) -> Tensor:
        local = ids - first
        ctx.closes = closes
        # Hooks on saved tensors may return the weight as a new object, without main_grad.
        ctx.weight = weight
        ctx.save_for_backward(local, weight)
        return closes.forward(look_up(local, weight)).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None, None]:
        local, _ = ctx.saved_tensors
        # Under sequence parallelism grad has this rank's tokens. The ids of all tokens may be in
        # this rank's rows, so grad is gathered.
        rows = ctx.closes.backward(grad).wait()
        # Only the rows of these tokens change. A gradient for autograd would be as large as the
        # weight, and be added to main_grad once for each microbatch.
        add = partial(add_rows_gradient, local, rows)
        return None, submit_weight_grad(ctx.weight, add, None), None, None


_lookup: Callable[..., Tensor] = _Lookup.apply


class VocabParallelEmbedding(nn.Module):
    """A word embedding split by rows: rank r holds the rows r v/t .. (r+1) v/t - 1.

    Args:
        num_embeddings: v, the rows on all t ranks together, a multiple of t.
        embedding_dim: h.
        sequence_parallel: the output has this rank's tokens only; the sequence is the first
            dimension of the ids.
        init_std: standard deviation of the initial weight; None for a uniform distribution.
        tied_to: global name of the parameter that this weight repeats, or None.
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
        assert num_embeddings % tp.size == 0, (
            f"{num_embeddings} rows are not divisible by {tp.size} ranks"
        )
        self.tp = tp
        self._closes = closing(tp, sequence_parallel)
        layout = Layout((num_embeddings, embedding_dim), 0, tied_to, std=init_std)
        self.weight = parameter(layout, num_embeddings // tp.size, embedding_dim)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the embedding of each token.

        Args:
            ids: [s, ...], in 0..v-1, the same on all tp ranks. Any other number has the embedding
                0.
        Returns: [s, ..., h], the same on all tp ranks; under sequence parallelism [s/t, ..., h].
        """
        return _lookup(ids, self.weight, self.tp.rank * self.weight.shape[0], self._closes)
