"""Choose the experts of each token, and their weights, from the router's logits.

Of equal scores the expert with the lower number wins. `torch.topk` promises no order, and with
16-bit logits up to a quarter of the tokens have a tie at the k-th place. Shapes: T tokens, E
experts, k choices for each token.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megapipe.config import ModelConfig
from megapipe.distributed.axis import at_waits

NOTHING = 1e-20
"""Added to a sum of scores before a division by it."""


def wide(x: Tensor) -> torch.dtype:
    """Return the type in which scores are computed: float32, or float64 in a float64 model."""
    return torch.promote_types(x.dtype, torch.float32)


def scores_of(logits: Tensor, function: str, compute: torch.dtype) -> Tensor:
    """Return the experts' scores for each token.

    Args:
        logits: [T, E].
        function: softmax, sigmoid, or sqrtsoftplus.
        compute: the type of the scores.
    Returns: [T, E].
    """
    if function == "softmax":
        return torch.softmax(logits, dim=-1, dtype=compute)
    x = logits.to(compute)
    if function == "sigmoid":
        return torch.sigmoid(x)
    return F.softplus(x).sqrt()


def best(scores: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest scores, the lowest index first among equals.

    Args:
        scores: [..., E].
    Returns: [..., k], in descending order of score.
    """
    # The clone lets the sorted [..., E] indices be freed.
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :k].clone()


def best_of_groups(scores: Tensor, k: int, groups: int, chosen: int, counted: int) -> Tensor:
    """Return the best k experts, restricted to the best groups of experts.

    A group's score is the sum of the `counted` best scores in it. `counted` is 1 in DeepSeek-V2
    (section 2.2.2) and k / chosen in DeepSeek-V3 (section 2.1.2).

    Args:
        scores: [..., E]; successive experts form `groups` groups of equal size.
        chosen: number of groups that may be used.
        counted: number of a group's scores that are summed.
    Returns: [..., k], the experts' indices, the best first.
    """
    # Two choices: groups by their scores, then experts with all other groups at minus infinity.
    grouped = scores.view(*scores.shape[:-1], groups, -1)
    places = best(grouped, counted)
    of_group = best(grouped.gather(-1, places).sum(-1), chosen)
    # A mask, and not a gather of the chosen groups: indices still count all experts.
    excluded = torch.ones(
        (*of_group.shape[:-1], groups), dtype=torch.bool, device=scores.device
    ).scatter_(-1, of_group, 0)
    excluded = excluded.repeat_interleave(grouped.shape[-1], -1)
    return best(scores.masked_fill(excluded, -math.inf), k)


def sinkhorn(logits: Tensor, tokens: int, total: Callable[[Tensor], Tensor]) -> Tensor:
    """Return exp(logits), scaled until all tokens and all experts have nearly equal sums.

    Rows and columns are scaled in turn (S-BASE, Clark et al. 2022, appendix; the constants are
    Megatron-LM's). The host waits for the device in each iteration, and `total` is called once.

    Args:
        logits: [T, E], this rank's tokens.
        tokens: number of the microbatch's tokens on all ranks that have some of them.
        total: sums a tensor [E] over these ranks, so that the choice does not depend on the number
            of ranks.
    Returns: [T, E].
    """
    cost = logits.exp()
    columns = torch.ones_like(cost[0])
    # Data-parallel ranks need different numbers of iterations. If other passes took turns at these
    # waits, ranks that share experts would start their collectives in different orders.
    with at_waits.do(None, at_waits.watch):
        while True:
            rows = 1 / tokens / ((columns * cost).sum(1, keepdim=True) + 1e-8)
            before = columns
            columns = 1 / cost.shape[1] / (total((rows * cost).sum(0)) + 1e-8)
            # Written so that a NaN ends the loop, too.
            if not (columns - before).abs().mean() > 1e-4:
                return columns * cost * rows


def choose(logits: Tensor, bias: Tensor | None, model: ModelConfig, compute: torch.dtype) -> Tensor:
    """Return the k experts of each token, the best first, as the flags say (not by Sinkhorn).

    Args:
        logits: [T, E].
        bias: [E], added to the scores for the choice only (DeepSeek-V3, section 2.1.2), or None.
        compute: the type of the scores.
    Returns: [T, k].
    """
    k = model.moe_router_topk
    groups = model.moe_router_num_groups
    chosen = model.moe_router_group_topk
    function = model.moe_router_score_function
    # A softmax keeps the order of the logits: without --moe-router-pre-softmax it comes later,
    # over the chosen experts.
    scores = logits
    # A bias is in the unit of the scores.
    if function != "softmax" or model.moe_router_pre_softmax or bias is not None:
        scores = scores_of(logits, function, compute)
    if bias is not None:
        scores = scores + bias
    if groups and chosen:
        return best_of_groups(scores, k, groups, chosen, model.group_scores)
    return best(scores, k)


def sinkhorn_scores(model: ModelConfig) -> str:
    """Return the name of the score function for the weights of experts that Sinkhorn has chosen.

    An evaluation does not iterate: it chooses the experts by these scores, too.
    """
    if model.moe_router_topk == 1:
        return "sigmoid"
    return "softmax"


def weights_of(logits: Tensor, experts: Tensor, model: ModelConfig, compute: torch.dtype) -> Tensor:
    """Return the weights of each token's experts.

    Args:
        logits: [T, E]. experts: [T, k].
        compute: the type of the scores.
    Returns: [T, k], in the logits' type.
    """
    # The logits without expert_bias: it changes the choice, not the weights (DeepSeek-V3, section
    # 2.1.2).
    if model.by_sinkhorn:
        return (
            scores_of(logits, sinkhorn_scores(model), compute).gather(1, experts).to(logits.dtype)
        )
    function = model.moe_router_score_function
    if function == "softmax" and not model.moe_router_pre_softmax:
        # Equals the softmax over all experts, divided by the sum over the chosen ones.
        weights = torch.softmax(logits.gather(1, experts), dim=-1, dtype=compute)
    else:
        weights = scores_of(logits, function, compute).gather(1, experts)
        # A softmax already sums to 1 over all experts; the other scores are independent.
        if function != "softmax" and model.moe_router_topk > 1:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + NOTHING)
    if model.moe_router_topk_scaling_factor:
        weights = weights * model.moe_router_topk_scaling_factor
    return weights.to(logits.dtype)


def capacity(tokens: int, model: ModelConfig) -> int | None:
    """Return how many of a rank's tokens an expert takes at most; None without a limit."""
    if model.capacity_factor is None:
        return None
    even = tokens * model.moe_router_topk / model.experts
    # An expert is chosen once by a token at most; more rows than tokens would only be padding.
    return min(tokens, math.ceil(even * model.capacity_factor))


def within_capacity(experts: Tensor, weights: Tensor, most: int, model: ModelConfig) -> Tensor:
    """Return which choices stay if an expert takes at most `most` tokens.

    An expert keeps the tokens with the largest weights, the first among equals; or the first
    tokens, with --moe-token-drop-policy position.

    Args:
        experts, weights: [T, k].
    Returns: [T, k], True for a choice that stays.
    """
    # As a table of tokens and experts: each expert decides among all of its tokens.
    table = torch.full(
        (len(experts), model.experts), -math.inf, dtype=weights.dtype, device=weights.device
    )
    table.scatter_(1, experts, weights)
    if model.moe_token_drop_policy == "position":
        kept = (table > -math.inf).cumsum(0) <= most
    else:
        largest = best(table.t(), most).t()
        kept = torch.zeros_like(table, dtype=torch.bool).scatter_(0, largest, True)
    return kept.gather(1, experts)


def dense(experts: Tensor, num_experts: int) -> Tensor:
    """Return the choices `experts` [T, k] as a table [T, num_experts] of zeros and ones."""
    table = torch.zeros(len(experts), num_experts, dtype=torch.int64, device=experts.device)
    return table.scatter_(1, experts, 1)
