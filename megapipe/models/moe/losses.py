"""Losses of a router: they keep the load of the experts even, and the logits small.

Each function returns the part of this rank's tokens; the sum over the ranks that share a
microbatch's tokens is the loss. `attach` adds a loss's gradient to the router's backward, so that
no loss has to be sent down the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megapipe.tensor_parallel.attached import attach_gradient

LOGGED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
}
"""Value of --moe-router-load-balancing-type, or z_loss -> Megatron-LM's name in logs."""


def balance(
    scores: Tensor, counts: Tensor, tokens: int, k: int, num_experts: int, weight: float
) -> Tensor:
    """Return this rank's part of the loss weight x E x sum_i f_i P_i (Fedus et al. 2021, sec. 2.2).

    The loss is `weight` where the load is even. f_i = counts_i / (tokens k) is the share of the
    choices that expert i has; P_i is its mean score.

    Args:
        scores: [..., E], sums of the scores of this rank's tokens. A token's scores add up to 1.
        counts: [..., E], how often each expert was chosen by the tokens of all ranks.
        tokens: number of tokens on all ranks.
    """
    return (scores * counts).sum() * slope(tokens, k, num_experts, weight)


def slope(tokens: int, k: int, num_experts: int, weight: float) -> float:
    """Return c, where the gradient of `balance` with respect to the scores is c x counts.

    Args:
        tokens: number of tokens on all ranks.
        k: choices of a token.
        num_experts: E.
        weight: the loss's coefficient.
    """
    # f_i has the factor 1 / (tokens k) and P_i the factor 1 / tokens.
    return num_experts * weight / (k * tokens * tokens)


def small_logits(logits: Tensor, weight: float, ranks: int) -> Tensor:
    """Return this rank's part of the loss weight x mean squared logsumexp (Zoph et al. 2022, 3.3).

    Args:
        logits: [T, E].
        weight: the loss's coefficient.
        ranks: the number of ranks that share the microbatch's tokens equally.
    """
    return logits.logsumexp(dim=-1).square().mean() * (weight / ranks)


def attach(x: Tensor, loss: Tensor, weight: float) -> Tensor:
    """Return a view of x, whose backward also starts the loss's backward with gradient `weight`.

    Args:
        x: a tensor on the path to the model's loss.
        loss: the loss of a router, with its coefficient.
        weight: the factor of this loss in the loss that the step differentiates.
    """
    return attach_gradient(x, loss, torch.full_like(loss, weight))


def attach_late(x: Tensor, scores: Tensor, counts: Callable[[], Tensor], weight: float) -> Tensor:
    """Return a view of x, whose backward also adds weight x counts() to the scores' gradient.

    The added term is the gradient of a balancing loss, whose counts are known only in backward.

    Args:
        x: a tensor on the path to the model's loss.
        scores: the sums of the scores, [..., E].
        counts: returns the load of all slices of the microbatch, in the shape of `scores`.
        weight: factor of counts in the gradient: `slope`, times the loss's factor in the loss that
            the step differentiates.
    """
    dtype = scores.dtype
    return attach_gradient(x, scores, lambda: counts().to(dtype) * weight)
