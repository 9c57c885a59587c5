"""The choice of experts for a token, and their weights: functions of the router's logits alone.

Equal scores are decided by the expert's number, the lower one first: `torch.topk` promises nothing, and with 16-bit
logits up to a quarter of the tokens have such a tie at the k-th place.
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
"""Added to a sum of scores that something is divided by."""


def wide(x: Tensor) -> torch.dtype:
    """The type that scores are computed in, whatever the logits are: float32, float64 in a float64 model."""
    return torch.promote_types(x.dtype, torch.float32)


def scores_of(logits: Tensor, function: str, compute: torch.dtype) -> Tensor:
    """[T, E] -> [T, E]."""
    if function == "softmax":
        return torch.softmax(logits, dim=-1, dtype=compute)
    x = logits.to(compute)
    return torch.sigmoid(x) if function == "sigmoid" else F.softplus(x).sqrt()


def best(scores: Tensor, k: int) -> Tensor:
    """[..., E] -> [..., k], the places of the largest, the first of equal ones."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :k].clone()


def best_of_groups(scores: Tensor, k: int, groups: int, chosen: int, counted: int) -> Tensor:
    """The best k within the `chosen` groups of experts whose `counted` best scores have the largest sums
    (DeepSeek-V2, section 2.2.2, has one of each; DeepSeek-V3, section 2.1.2, k / chosen)."""
    grouped = scores.view(*scores.shape[:-1], groups, -1)
    places = best(grouped, counted)
    of_group = best(grouped.gather(-1, places).sum(-1), chosen)
    out = torch.ones((*of_group.shape[:-1], groups), dtype=torch.bool, device=scores.device).scatter_(-1, of_group, 0)
    return best(scores.masked_fill(out.repeat_interleave(grouped.shape[-1], -1), -math.inf), k)


def sinkhorn(logits: Tensor, tokens: int, total: Callable[[Tensor], Tensor]) -> Tensor:
    """exp(logits) [T, E] with its rows and columns scaled in turn until all tokens count alike and all experts are
    wanted alike (S-BASE, Clark et al. 2022, appendix; the constants are Megatron-LM's). The host waits each time.

    Args:
        tokens: of the microbatch, on all ranks that have parts of it.
        total: the sum [E] over those ranks, so that the choice does not depend on how many they are.
    """
    cost = logits.exp()
    columns = torch.ones_like(cost[0])
    # Other data-parallel ranks need other numbers of iterations, and share experts with this one. If another pass went
    # on at each wait, the experts' ranks would meet in different orders.
    with at_waits.do(None, at_waits.watch):
        while True:
            rows = 1 / tokens / ((columns * cost).sum(1, keepdim=True) + 1e-8)
            before = columns
            columns = 1 / cost.shape[1] / (total((rows * cost).sum(0)) + 1e-8)
            if not (columns - before).abs().mean() > 1e-4:  # also where a logit is no number
                return columns * cost * rows


def choose(logits: Tensor, bias: Tensor | None, model: ModelConfig, compute: torch.dtype) -> Tensor:
    """logits [T, E] -> the k experts of each token [T, k], the best first."""
    k, groups, chosen = model.moe_router_topk, model.moe_router_num_groups, model.moe_router_group_topk
    function = model.moe_router_score_function
    after = function == "softmax" and not model.moe_router_pre_softmax
    scores = logits if after else scores_of(logits, function, compute)
    if bias is not None:
        scores = scores + bias
    if groups and chosen:
        return best_of_groups(scores, k, groups, chosen, model.group_scores)
    return best(scores, k)


def sinkhorn_scores(model: ModelConfig) -> str:
    """The function from logits to weights beside Sinkhorn's choice, and to the choice itself in an evaluation."""
    return "sigmoid" if model.moe_router_topk == 1 else "softmax"


def weights_of(logits: Tensor, experts: Tensor, model: ModelConfig, compute: torch.dtype) -> Tensor:
    """logits [T, E] and the experts of each token [T, k] -> their weights [T, k], of the logits' type."""
    if model.by_sinkhorn:
        return scores_of(logits, sinkhorn_scores(model), compute).gather(1, experts).to(logits.dtype)
    function = model.moe_router_score_function
    if function == "softmax" and not model.moe_router_pre_softmax:
        weights = torch.softmax(logits.gather(1, experts), dim=-1, dtype=compute)
    else:
        weights = scores_of(logits, function, compute).gather(1, experts)
        if function != "softmax" and model.moe_router_topk > 1:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + NOTHING)
    if model.moe_router_topk_scaling_factor:
        weights = weights * model.moe_router_topk_scaling_factor
    return weights.to(logits.dtype)


def capacity(tokens: int, model: ModelConfig) -> int | None:
    """Tokens of so many that an expert takes at most; None without a limit."""
    if model.capacity_factor is None:
        return None
    return min(tokens, math.ceil(tokens * model.moe_router_topk / model.experts * model.capacity_factor))


def within_capacity(experts: Tensor, weights: Tensor, most: int, model: ModelConfig) -> Tensor:
    """A mask of the choices [T, k] that stay where an expert takes `most` tokens: of the largest weights, the first
    of equal ones, or just the first."""
    # By expert, not by choice: what an expert takes is decided among all of its tokens.
    places = torch.full((len(experts), model.experts), -math.inf, dtype=weights.dtype, device=weights.device)
    places.scatter_(1, experts, weights)
    if model.moe_token_drop_policy == "position":
        kept = (places > -math.inf).cumsum(0) <= most
    else:
        kept = torch.zeros_like(places, dtype=torch.bool).scatter_(0, best(places.t(), most).t(), True)
    return kept.gather(1, experts)


def dense(experts: Tensor, num_experts: int) -> Tensor:
    """The choices [T, k] as a map [T, E] of zeros and ones."""
    return torch.zeros(len(experts), num_experts, dtype=torch.int64, device=experts.device).scatter_(1, experts, 1)
