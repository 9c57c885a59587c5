"""Losses of a router: they keep the load of the experts even and its logits small.

Each is a number of this rank's tokens; the sum over the ranks that have a microbatch's tokens among them is the loss.
It reaches the gradient through `attach`, an identity, so that no loss has to travel down the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megapipe.tensor_parallel.beside import beside

LOGGED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
}
"""Name of --moe-router-load-balancing-type -> Megatron-LM's name in logs."""


def balance(scores: Tensor, counts: Tensor, tokens: int, k: int, num_experts: int, weight: float) -> Tensor:
    """weight x E x sum_i f_i P_i (Fedus et al. 2021, section 2.2): 1 x weight where all is even.

    Args:
        scores: [...] sums over this rank's tokens, of each of which they add up to 1 over the experts.
        counts: [...] how often each expert was chosen among `tokens`, those of all ranks: f_i = n_i / (tokens k).
    """
    return (scores * counts).sum() * slope(tokens, k, num_experts, weight)


def slope(tokens: int, k: int, num_experts: int, weight: float) -> float:
    """The gradient of `balance` in its scores, for each of the counts."""
    return num_experts * weight / (k * tokens * tokens)


def small_logits(logits: Tensor, weight: float, ranks: int) -> Tensor:
    """The mean over all tokens of the squared logsumexp (Zoph et al. 2022, section 3.3), this rank's part of it."""
    return logits.logsumexp(dim=-1).square().mean() * (weight / ranks)


def attach(x: Tensor, loss: Tensor, weight: float) -> Tensor:
    """Return x; where it has a gradient, the loss has `weight`."""
    return beside(x, loss, torch.full_like(loss, weight))


def attach_late(x: Tensor, scores: Tensor, counts: Callable[[], Tensor], weight: float) -> Tensor:
    """Return x; where it has a gradient, the scores have weight x counts, as these are then."""
    dtype = scores.dtype
    return beside(x, scores, lambda: counts().to(dtype) * weight)
