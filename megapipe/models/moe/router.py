"""The router of a layer: it chooses k experts for each token, and keeps their load even.

A recomputed layer reuses the choices of its first forward, so that a rounding difference cannot
send a token to another expert. Counts are stored by microbatch: a second run overwrites the first.
Shapes: T = s x b tokens of this rank, E experts, k choices for each token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout, parameter
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
from megapipe.tensor_parallel.rng import MicrobatchContext, current_microbatch, draws
from megapipe.tensor_parallel.weight_grad import current_weight_grads, submit_weight_grad


class _Linear(torch.autograd.Function):
    """x W^T + b, computed in a given type.

    The weight's gradient can be deferred to a W pass, as in tensor_parallel.linear.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        ctx.bias = bias
        ctx.dtype = dtype
        ctx.weight_grads = current_weight_grads()
        if bias is not None:
            bias = bias.to(dtype)
        return linear(x.to(dtype), weight.to(dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dtype = ctx.dtype
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]

        def add(into: Tensor) -> None:
            dy = grad.reshape(-1, grad.shape[-1])
            into.add_(linear(dy.t(), x.to(dtype).reshape(-1, x.shape[-1]).t()))

        grad_x = None
        if needs_x:
            grad_x = linear(grad, weight.to(dtype).t()).to(x.dtype)
        grad_bias = bias_grad(ctx.bias, grad) if needs_bias else None
        grad_weight = None
        if needs_weight:
            grad_weight = submit_weight_grad(ctx.weight, add, ctx.weight_grads)
        return grad_x, grad_weight, grad_bias, None


narrow_linear: Callable[[Tensor, Tensor, Tensor | None, torch.dtype], Tensor] = _Linear.apply
"""(x [..., in], weight [out, in], bias [out] or None, dtype) -> x W^T + b [..., out] in dtype."""


class Routing(NamedTuple):
    """A router's result: the experts of this rank's T = s b tokens, and their weights.

    Attributes:
        experts: [T, k], the experts of each token, the best first.
        weights: [s, b, k], the weight of each expert's output; 0 where a choice is dropped.
        kept: [T, k], True for choices that are not dropped; None for all.
        capacity: the most tokens of this rank that an expert takes; None without a limit.
    """

    experts: Tensor
    weights: Tensor
    kept: Tensor | None
    capacity: int | None


class Seen(NamedTuple):
    """A router's record of one microbatch or slice, for the update of biases and for logged losses.

    Attributes:
        tokens: [E], the number of rows that each expert computes.
        losses: this rank's part of each loss, divided by its coefficient. Keys as in `LOGGED`.
    """

    tokens: Tensor
    losses: dict[str, Tensor]


class Router(nn.Module):
    """The linear layer and the choice that send each token to its experts.

    Args:
        layer: the layer's number in the whole model.
    Attributes:
        seen: the record of each microbatch or slice since `forget`, in training. The key is
            (number of the microbatch's first sample, the slice's first token).
        expert_bias: [E], float32 in any model, or None. The training step changes it by the load
            of the experts; it has no gradient.
    """

    expert_bias: Tensor | None

    def __init__(self, config: ModelConfig, tp: Axis, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.tp = tp
        self.shares_sequence = tp if config.sequence_parallel else Axis()
        shape = (config.experts, config.hidden)
        split = config.sequence_parallel
        layout = Layout(shape, std=config.linear_std, sum_over_tp=split)
        self.weight = parameter(layout)
        self.bias = None
        if config.has_bias("router"):
            # The bias starts at random values, as in Megatron-LM's router, and not at 0.
            self.bias = parameter(replace(layout, full=shape[:1]))
        expert_bias = None
        if config.moe_router_enable_expert_bias:
            expert_bias = torch.zeros(config.experts)
        self.register_buffer("expert_bias", expert_bias)
        self.seen: dict[tuple[int, int], Seen] = {}
        self._load: dict[int, Tensor] = {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        kept = self.expert_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # The bias keeps float32 under .to(bfloat16): 16 bits are too few for steps of 1e-3.
        if kept is not None and self.expert_bias is not None:
            self.expert_bias = kept.to(self.expert_bias.device)
        return self

    def forget(self) -> None:
        """Delete the records in `seen`, and the counts of earlier microbatches of the step."""
        self.seen = {}
        self._load = {}

    def forward(self, x: Tensor) -> Routing:
        """Route this rank's tokens, and in training record the load and the losses in `seen`.

        Args:
            x: [s, b, h]; under sequence parallelism [s/t, b, h].
        Returns: the experts of each token and their weights.
        """
        config = self.config
        stream = current_microbatch()
        dtypes = {None: x.dtype, "fp32": torch.float32, "fp64": torch.float64}
        dtype = dtypes[config.moe_router_dtype]
        compute = wide(x)
        logits = narrow_linear(self._jittered(x, stream), self.weight, self.bias, dtype)
        logits = logits.view(-1, config.experts)
        if config.moe_router_force_load_balancing:
            # Routing at random shows the speed of an even load. The gradient is the usual one.
            logits = logits + (self._random(x, stream).to(dtype) - logits).detach()
        losses: dict[str, Tensor] = {}
        tokens = len(logits)
        if self.training and config.moe_z_loss_coeff:
            ranks = self.ranks(stream)
            loss = small_logits(logits, config.moe_z_loss_coeff, ranks)
            logits = attach(logits, loss, stream.weigh(tokens * ranks))
            losses["z_loss"] = loss.detach() * (stream.share / config.moe_z_loss_coeff)
        most = capacity(tokens, config)
        experts = self._once(
            "experts", stream, lambda: self._chosen(logits.detach(), stream, compute)
        )
        weights = weights_of(logits, experts, config, compute)
        kept = None
        if most is not None and most < tokens:
            kept = self._once(
                "kept", stream, lambda: within(experts, weights.detach(), most, config)
            )
            weights = weights.masked_fill(~kept, 0.0)
        if self.training:
            weights = self._balanced(weights, logits, experts, x.shape[1], stream, losses, compute)
            # A recomputed forward writes the same entry once more.
            self.seen[stream.sample, stream.begin] = Seen(
                self._counted(experts, kept, most), losses
            )
        return Routing(experts, weights.view(*x.shape[:2], -1), kept, most)

    def _chosen(self, logits: Tensor, stream: MicrobatchContext, compute: torch.dtype) -> Tensor:
        """Return each token's experts [T, k] for logits [T, E]. `compute` is the scores' type.

        `stream` is the microbatch: its ranks sum the tokens of each expert for Sinkhorn.
        """
        config = self.config
        k = config.moe_router_topk
        if not config.by_sinkhorn:
            return choose(logits, self.expert_bias, config, compute)
        if not self.training:
            return best(scores_of(logits, sinkhorn_scores(config), compute), k)
        tokens = len(logits) * self.ranks(stream)
        scores = sinkhorn(logits.to(compute), tokens, lambda x: self._sum(x, stream))
        return best(scores, k)

    def ranks(self, stream: MicrobatchContext) -> int:
        """Return the number of ranks that share a microbatch's tokens, given its `stream`."""
        return self.shares_sequence.size * stream.cp.size

    def _balanced(
        self,
        weights: Tensor,
        logits: Tensor,
        experts: Tensor,
        batch: int,
        stream: MicrobatchContext,
        losses: dict[str, Tensor],
        compute: torch.dtype,
    ) -> Tensor:
        """Return the weights [T, k] of the choices; their backward starts the balancing losses too.

        The scores are taken without expert_bias, and the choices before any is dropped.

        Args:
            weights, experts: [T, k]. logits: [T, E].
            batch: b, the number of sequences.
            losses: a dictionary to which this rank's part of each loss is added by name.
            compute: the type of the scores.
        """
        config = self.config
        k = config.moe_router_topk
        num_experts = config.experts
        tokens = len(logits) * self.ranks(stream)
        if not config.balancing:
            return weights
        scores = scores_of(logits, config.moe_router_score_function, compute)
        if config.moe_router_score_function != "softmax":
            scores = scores / (scores.sum(dim=-1, keepdim=True) + NOTHING)
        if self.expert_bias is not None or config.moe_router_num_groups:
            # The losses judge the router's own choices, before bias and groups changed them.
            experts = self._once("unbiased", stream, lambda: best(scores.detach(), k))
        for kind, weight in config.balancing.items():
            # One load for each sequence, or one for all sequences: [., rows, E].
            rows = batch if kind == "seq_aux_loss" else 1
            each = scores.view(-1, rows, num_experts)
            sums = each.sum(0)
            counts = self._sum(dense(experts, num_experts).view_as(each).sum(0), stream)
            ranks = stream.dp.size if kind == "global_aux_loss" else 1
            # Tokens of the whole microbatch; this pass may run one slice.
            whole = round(tokens / stream.share)
            of = (whole // rows * ranks, k, num_experts, weight * ranks)
            if stream.piece is None:
                counts = self._so_far(kind, counts, stream)
                loss = balance(sums, counts, *of) / rows
                weights = attach(weights, loss, stream.weigh(tokens))
                value = loss.detach()
            else:
                # Only the last slice knows the load. Backward runs after it, and reads it then.
                load, found = self._load_of_slices(kind, sums.detach(), counts, stream)
                factor = slope(*of) * stream.weigh(whole, 1.0) / rows
                weights = attach_late(weights, sums, load, factor)
                value = sums.new_zeros(())
                if found is not None:
                    value = balance(found, load(), *of) / rows
            losses[kind] = value / weight
        return weights

    def _load_of_slices(
        self, kind: str, sums: Tensor, counts: Tensor, stream: MicrobatchContext
    ) -> tuple[Callable[[], Tensor], Tensor | None]:
        """Record one slice of a microbatch for one balancing loss.

        Args:
            kind: the loss, a key of `LOGGED`.
            sums, counts: [1, E], or [sequences, E] for a loss of each sequence: the slice's sums of
                scores, and how often each expert was chosen.
        Returns: (load, total). load() returns the counts of all slices, once all have run. total
            sums all scores; None before the last slice.
        """
        name = (self.layer, kind)
        prefix = stream.prefix
        parts: dict[int, tuple[Tensor, Tensor]] = prefix.setdefault(name, {})
        parts[stream.begin] = (sums, counts)

        def load() -> Tensor:
            return prefix[*name, "load"]  # type: ignore[no-any-return]

        if stream.begin + len(stream.piece or ()) < stream.length:
            return load, None
        if (*name, "load") not in prefix:  # a recomputed forward finds it
            total = torch.stack([n for _, n in parts.values()]).sum(0)
            prefix[*name, "load"] = self._so_far(kind, total, stream)
        return load, torch.stack([x for x, _ in parts.values()]).sum(0)

    def _so_far(self, kind: str, counts: Tensor, stream: MicrobatchContext) -> Tensor:
        """Return how often each expert was chosen, [rows, E], as the loss `kind` counts it.

        Most losses count this microbatch's choices. global_aux_loss sums the counts over all
        data-parallel ranks, and averages them over the step's microbatches so far.
        """
        if kind != "global_aux_loss":
            return counts
        return self._once("global", stream, lambda: self._mean(counts, stream))

    def _mean(self, counts: Tensor, stream: MicrobatchContext) -> Tensor:
        self._load[stream.sample] = stream.dp.all_reduce(counts)
        # Post-validation may have undone forwards of later samples: their counts do not count.
        before = [counts for sample, counts in self._load.items() if sample <= stream.sample]
        return torch.stack(before).sum(0) / len(before)

    def _sum(self, counts: Tensor, stream: MicrobatchContext) -> Tensor:
        """Return counts [..., E] summed over the ranks that share the tokens of `stream`."""
        return stream.cp.all_reduce(self.shares_sequence.all_reduce(counts))

    def _once(self, what: str, stream: MicrobatchContext, find: Callable[[], Tensor]) -> Tensor:
        """Return find(), or in a recomputation the result that the first forward found.

        what: a name for the result; `stream` keeps results by layer and name.
        """
        if not self.training:
            return find()
        name = (self.layer, what)
        if name not in stream.kept:
            found = find()
            if torch.is_grad_enabled():
                return found
            # A training forward without a graph will be recomputed in backward.
            stream.kept[name] = found
        return stream.kept[name]  # type: ignore[no-any-return]

    def _counted(self, experts: Tensor, kept: Tensor | None, most: int | None) -> Tensor:
        """Return the number of rows [E] that each expert computes, for `experts` [T, k].

        `kept` marks the choices that are not dropped, None all. `most` is the capacity, if any.
        """
        config = self.config
        if most is not None and config.moe_pad_expert_input_to_capacity:
            return torch.full((config.experts,), most, device=experts.device)
        ones = torch.ones_like(experts) if kept is None else kept.long()
        counts = torch.zeros(config.experts, dtype=torch.int64, device=experts.device)
        return counts.scatter_add_(0, experts.flatten(), ones.flatten())

    def _jittered(self, x: Tensor, stream: MicrobatchContext) -> Tensor:
        """Return x times noise in 1 +- eps, drawn for `stream` (Fedus et al. 2021, sec. 2.4)."""
        eps = self.config.moe_input_jitter_eps
        if not eps or not self.training:
            return x
        drawn = draws(
            x.shape,
            self.layer,
            "jitter",
            device=x.device,
            tp=self._split,
            dim=0,
            cut=stream.cut,
        )
        return x * (1 - eps + 2 * eps * drawn).to(x.dtype)

    def _random(self, x: Tensor, stream: MicrobatchContext) -> Tensor:
        """Return logits [T, E] drawn from a normal distribution, for x [s, b, h] of `stream`."""
        drawn = draws(
            (*x.shape[:2], self.config.experts),
            self.layer,
            "forced",
            device=x.device,
            tp=self._split,
            dim=0,
            cut=stream.cut,
        )
        # The inverse of the normal distribution function turns uniform numbers into normal ones.
        normal = torch.erfinv(2 * drawn.clamp(1e-6, 1 - 1e-6) - 1).mul_(math.sqrt(2))
        return normal.view(-1, self.config.experts)

    @property
    def _split(self) -> Axis | None:
        if self.config.sequence_parallel:
            return self.tp
        return None


def gated(x: Tensor, weight: Tensor) -> Tensor:
    """Return sigmoid(x weight^T): x [..., h], weight [1, h] -> [..., 1]."""
    return F.sigmoid(narrow_linear(x, weight, None, x.dtype))
