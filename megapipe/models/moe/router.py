"""The router of a layer: it sends each token to k experts, and says what that does to the load.

What depends on a choice happens once: a recomputed layer takes the choice of its first forward, so that no rounding can
send a token elsewhere, and counts of a microbatch are written down under its name, however often it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout, set_layout
from megapipe.models.moe.choice import (
    NOTHING,
    best,
    capacity,
    choose,
    dense,
    scores_of,
    sinkhorn,
    sinkhorn_scores,
    weights_of,
    wide,
)
from megapipe.models.moe.choice import within_capacity as within
from megapipe.models.moe.losses import attach, attach_late, balance, slope, small_logits
from megapipe.tensor_parallel.linear import bias_grad
from megapipe.tensor_parallel.products import linear
from megapipe.tensor_parallel.rng import Stream, current_stream, draws
from megapipe.tensor_parallel.weight_grad import current_weight_grads


class _Linear(torch.autograd.Function):
    """x W^T + b in a type of its own. The weight's gradient can be put off, as in tensor_parallel.linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.bias, ctx.dtype, ctx.weight_grads = weight, bias, dtype, current_weight_grads()
        return linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (x, weight), dtype, owner = ctx.saved_tensors, ctx.dtype, ctx.weight_grads
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        main_grad: Tensor | None = getattr(ctx.weight, "main_grad", None)

        def product() -> Tensor:
            return linear(grad.reshape(-1, grad.shape[-1]).t(), x.to(dtype).reshape(-1, x.shape[-1]).t())

        grad_x = linear(grad, weight.to(dtype).t()).to(x.dtype) if needs_x else None
        grad_bias = bias_grad(ctx.bias, grad) if needs_bias else None
        if not needs_weight:
            return grad_x, None, grad_bias, None
        if main_grad is None:
            return grad_x, product().to(weight.dtype), grad_bias, None
        if owner is None:
            main_grad.add_(product())
        else:
            owner.submit(lambda: main_grad.add_(product()))
        return grad_x, None, grad_bias, None


narrow_linear: Callable[[Tensor, Tensor, Tensor | None, torch.dtype], Tensor] = _Linear.apply
"""(x [..., in], weight [out, in], bias [out] or None, the type to compute in) -> [..., out] of that type."""


class Routing(NamedTuple):
    """The routing of this rank's tokens.

    Attributes:
        experts: [T, k] for T tokens, the best first.
        weights: [s, b, k], what their outputs count; 0 where a choice is dropped.
        kept: [T, k], which choices are not dropped; None for all.
        capacity: tokens that an expert takes at most; None without a limit.
    """

    experts: Tensor
    weights: Tensor
    kept: Tensor | None
    capacity: int | None


class Seen(NamedTuple):
    """A router's report of a microbatch. tokens: [E], rows that each expert computes. losses: this rank's parts, each
    without its weight, by the names of `losses.LOGGED`."""

    tokens: Tensor
    losses: dict[str, Tensor]


class Router(nn.Module):
    """Attributes:
    seen: of each microbatch of training since `forget`, by its first sample and its slice's first token.
    expert_bias: [E] in float32 whatever the model's type; the training moves it, no gradient does.
    """

    expert_bias: Tensor | None

    def __init__(self, config: ModelConfig, tp: Axis, layer: int) -> None:
        super().__init__()
        self.config, self.layer, self.tp = config, layer, tp
        self.shares_sequence = tp if config.sequence_parallel else Axis()
        shape, split = (config.experts, config.hidden), config.sequence_parallel
        layout = Layout(shape, std=config.linear_std, sum_over_tp=split)
        self.weight = set_layout(nn.Parameter(torch.empty(shape)), layout)
        self.bias = None
        if config.bias:
            of_bias = Layout(shape[:1], std=config.linear_std, sum_over_tp=split)  # drawn, as Megatron-LM's router does
            self.bias = set_layout(nn.Parameter(torch.empty(shape[:1])), of_bias)
        bias = torch.zeros(config.experts) if config.moe_router_enable_expert_bias else None
        self.register_buffer("expert_bias", bias)
        self.seen: dict[tuple[int, int], Seen] = {}
        self._load: dict[int, Tensor] = {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        kept = self.expert_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if kept is not None and self.expert_bias is not None:
            self.expert_bias = kept.to(self.expert_bias.device)  # 16 bits are too few for steps of 1e-3
        return self

    def forget(self) -> None:
        """Start a step."""
        self.seen = {}
        self._load = {}

    def forward(self, x: Tensor) -> Routing:
        """x [s, b, h], this rank's tokens."""
        config, stream = self.config, current_stream()
        dtype = {None: x.dtype, "fp32": torch.float32, "fp64": torch.float64}[config.moe_router_dtype]
        compute = wide(x)
        logits = narrow_linear(self._jittered(x, stream), self.weight, self.bias, dtype).view(-1, config.experts)
        if config.moe_router_force_load_balancing:
            # The forward routes by chance, the backward as without: what is measured is the speed of an even load.
            logits = logits + (self._random(x, stream).to(dtype) - logits).detach()
        losses: dict[str, Tensor] = {}
        tokens = len(logits)
        if self.training and config.moe_z_loss_coeff:
            loss = small_logits(logits, config.moe_z_loss_coeff, self.ranks(stream))
            logits = attach(logits, loss, stream.weigh(tokens * self.ranks(stream)))
            losses["z_loss"] = loss.detach() * (stream.share / config.moe_z_loss_coeff)
        most = capacity(tokens, config)
        experts = self._once("experts", stream, lambda: self._chosen(logits.detach(), stream, compute))
        weights = weights_of(logits, experts, config, compute)
        kept = None
        if most is not None and most < tokens:
            kept = self._once("kept", stream, lambda: within(experts, weights.detach(), most, config))
            weights = weights.masked_fill(~kept, 0.0)
        if self.training:
            weights = self._balanced(weights, logits, experts, x.shape[1], stream, losses, compute)
            # By sample and slice: a forward that is computed again in backward writes the same entry once more.
            self.seen[stream.sample, stream.begin] = Seen(self._counted(experts, kept, most), losses)
        return Routing(experts, weights.view(*x.shape[:2], -1), kept, most)

    def _chosen(self, logits: Tensor, stream: Stream, compute: torch.dtype) -> Tensor:
        config, k = self.config, self.config.moe_router_topk
        if not config.by_sinkhorn:
            return choose(logits, self.expert_bias, config, compute)
        if not self.training:
            return best(scores_of(logits, sinkhorn_scores(config), compute), k)
        tokens = len(logits) * self.ranks(stream)
        return best(sinkhorn(logits.to(compute), tokens, lambda x: self._sum(x, stream)), k)

    def ranks(self, stream: Stream) -> int:
        """The number of ranks that have a microbatch's tokens among them."""
        return self.shares_sequence.size * stream.cp.size

    def _balanced(
        self,
        weights: Tensor,
        logits: Tensor,
        experts: Tensor,
        batch: int,
        stream: Stream,
        losses: dict[str, Tensor],
        compute: torch.dtype,
    ) -> Tensor:
        """The weights, with what keeps the load even: of the scores without bias, before anything is dropped."""
        config = self.config
        k, num_experts, tokens = config.moe_router_topk, config.experts, len(logits) * self.ranks(stream)
        if not config.balancing:
            return weights
        scores = scores_of(logits, config.moe_router_score_function, compute)
        if config.moe_router_score_function != "softmax":
            scores = scores / (scores.sum(dim=-1, keepdim=True) + NOTHING)
        if self.expert_bias is not None or config.moe_router_num_groups:
            # The losses judge the router's own taste, not what the bias or the groups have made of it.
            experts = self._once("unbiased", stream, lambda: best(scores.detach(), k))
        for kind, weight in config.balancing.items():
            # [., b or 1, E]: of each sequence, or of all together.
            each = scores.view(-1, batch if kind == "seq_aux_loss" else 1, num_experts)
            rows = each.shape[1]
            sums, counts = each.sum(0), self._sum(dense(experts, num_experts).view_as(each).sum(0), stream)
            ranks = stream.dp.size if kind == "global_aux_loss" else 1
            whole = round(tokens / stream.share)
            of = whole // rows * ranks, k, num_experts, weight * ranks
            if stream.piece is None:
                counts = self._so_far(kind, counts, stream)
                loss = balance(sums, counts, *of) / rows
                weights, value = attach(weights, loss, stream.weigh(tokens)), loss.detach()
            else:
                load, found = self._load_of_slices(kind, sums.detach(), counts, stream)
                weights = attach_late(weights, sums, load, slope(*of) * stream.weigh(whole, 1.0) / rows)
                value = sums.new_zeros(()) if found is None else balance(found, load(), *of) / rows
            losses[kind] = value / weight
        return weights

    def _load_of_slices(
        self, kind: str, sums: Tensor, counts: Tensor, stream: Stream
    ) -> tuple[Callable[[], Tensor], Tensor | None]:
        """The counts of all slices of a microbatch, which are known from its last one on, before any backward; and with
        that one the sums of all."""
        name, prefix, last = (self.layer, kind), stream.prefix, stream.begin + len(stream.piece or ()) == stream.length
        parts: dict[int, tuple[Tensor, Tensor]] = prefix.setdefault(name, {})
        parts[stream.begin] = sums, counts
        if last and (*name, "load") not in prefix:  # it is there when the forward runs again
            prefix[*name, "load"] = self._so_far(kind, torch.stack([n for _, n in parts.values()]).sum(0), stream)
        return lambda: prefix[*name, "load"], torch.stack([x for x, _ in parts.values()]).sum(0) if last else None

    def _so_far(self, kind: str, counts: Tensor, stream: Stream) -> Tensor:
        """The counts that a loss goes by: of the microbatch, or global_aux_loss's mean over the microbatches of this
        step so far of how often each expert was chosen on all ranks."""
        if kind != "global_aux_loss":
            return counts
        return self._once("global", stream, lambda: self._mean(counts, stream))

    def _mean(self, counts: Tensor, stream: Stream) -> Tensor:
        self._load[stream.sample] = stream.dp.all_reduce(counts)
        # Not those of forwards that post-validation has taken back.
        before = [counts for sample, counts in self._load.items() if sample <= stream.sample]
        return torch.stack(before).sum(0) / len(before)

    def _sum(self, counts: Tensor, stream: Stream) -> Tensor:
        return stream.cp.all_reduce(self.shares_sequence.all_reduce(counts))

    def _once(self, what: str, stream: Stream, find: Callable[[], Tensor]) -> Tensor:
        """A choice, or that of the forward that is computed again."""
        if not self.training:
            return find()
        name = self.layer, what
        if name not in stream.kept:
            found = find()
            if torch.is_grad_enabled():
                return found
            stream.kept[name] = found  # a forward without graph, which backward will repeat
        return stream.kept[name]  # type: ignore[no-any-return]

    def _counted(self, experts: Tensor, kept: Tensor | None, most: int | None) -> Tensor:
        """[E] rows: with padding as many for each."""
        config = self.config
        if most is not None and config.moe_pad_expert_input_to_capacity:
            return torch.full((config.experts,), most, device=experts.device)
        ones = torch.ones_like(experts) if kept is None else kept.long()
        return torch.zeros(config.experts, dtype=torch.int64, device=experts.device).scatter_add_(
            0, experts.flatten(), ones.flatten()
        )

    def _jittered(self, x: Tensor, stream: Stream) -> Tensor:
        eps = self.config.moe_input_jitter_eps
        if not eps or not self.training:
            return x
        drawn = draws(x.shape, self.layer, "jitter", device=x.device, tp=self._split, dim=0, cut=stream.cut)
        return x * (1 - eps + 2 * eps * drawn).to(x.dtype)

    def _random(self, x: Tensor, stream: Stream) -> Tensor:
        """Normal logits of the microbatch, [T, E]."""
        shape = (*x.shape[:2], self.config.experts)
        drawn = draws(shape, self.layer, "forced", device=x.device, tp=self._split, dim=0, cut=stream.cut)
        return torch.erfinv(2 * drawn.clamp(1e-6, 1 - 1e-6) - 1).mul_(math.sqrt(2)).view(-1, self.config.experts)

    @property
    def _split(self) -> Axis | None:
        return self.tp if self.config.sequence_parallel else None


def gated(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., h] and weight [1, h] -> sigmoid(x weight^T) [..., 1]."""
    return F.sigmoid(narrow_linear(x, weight, None, x.dtype))
