"""A GPT in plain torch, trained by autograd and torch.optim: an independent judge of our runs.

Nothing of megapipe is imported. Parameters have the names and shapes of megapipe's checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EMBEDDING, POSITIONS = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Samples = Sequence[Tensor]
Weights = dict[str, Tensor]
Linear = Callable[[Tensor, Tensor, Tensor], Tensor]


class Trained(NamedTuple):
    """The numbers of a run.

    Attributes:
        losses: of each step, then of a batch that is not trained on.
        gradients: of the first step, clipped.
        weights: after the last step.
    """

    losses: list[float]
    norms: list[float]
    gradients: Weights
    weights: Weights


class PlainGPT(nn.Module):
    """GPT-2 with a tied head.

    Args:
        weights: by name.
        linear: x, weight, bias -> x W^T + b, for the linear layers of attention and MLPs.
    """

    def __init__(self, weights: Weights, layers: int, heads: int, linear: Linear) -> None:
        super().__init__()
        self.weights = {name: nn.Parameter(x.clone()) for name, x in weights.items()}
        self.layers, self.heads, self.linear = layers, heads, linear

    def forward(self, tokens: Tensor) -> Tensor:
        """[s] -> logits [s, v]."""
        x = self.weights[EMBEDDING][tokens] + self.weights[POSITIONS][: len(tokens)]
        for n in range(self.layers):
            layer = f"decoder.layers.{n}"
            y = self._norm(x, f"{layer}.input_layernorm")
            x = x + self._attention(y, f"{layer}.self_attention")
            y = self._norm(x, f"{layer}.pre_mlp_layernorm")
            y = F.gelu(self._product(y, f"{layer}.mlp.linear_fc1"), approximate="tanh")
            x = x + self._product(y, f"{layer}.mlp.linear_fc2")
        return self._norm(x, "decoder.final_layernorm") @ self.weights[EMBEDDING].t()

    def _attention(self, x: Tensor, name: str) -> Tensor:
        qkv = self._product(x, f"{name}.linear_qkv").unflatten(-1, (self.heads, 3, -1))
        q, k, v = qkv.permute(2, 1, 0, 3)  # each [heads, s, d]
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        seen = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return self._product(seen.transpose(0, 1).flatten(1), f"{name}.linear_proj")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias)

    def _product(self, x: Tensor, name: str) -> Tensor:
        return self.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])


def trained(
    model: PlainGPT,
    steps: Sequence[Samples],
    unseen: Samples,
    lr: float,
    eod: int,
) -> Trained:
    """Train on the samples [s + 1] of each step, as Megatron-LM does with --eod-mask-loss.

    An end of document has no loss as an input. A step differentiates the mean of its samples'
    means, and reports the mean over all tokens.
    """
    matrices = [p for p in model.weights.values() if p.dim() > 1]
    vectors = [p for p in model.weights.values() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=lr)
    told = Trained([], [], {}, {})
    for samples in steps:
        adam.zero_grad()
        sums, counts = _token_losses(model, samples, eod)
        (sums / counts).mean().backward()
        told.losses.append((sums.sum() / counts.sum()).item())
        told.norms.append(float(nn.utils.clip_grad_norm_(model.weights.values(), 1.0)))
        if not told.gradients:
            told.gradients.update((name, p.grad.clone()) for name, p in model.weights.items())
        adam.step()
    sums, counts = _token_losses(model, unseen, eod)
    told.losses.append((sums.sum() / counts.sum()).item())
    told.weights.update((name, p.detach()) for name, p in model.weights.items())
    return told


def _token_losses(model: PlainGPT, samples: Samples, eod: int) -> tuple[Tensor, Tensor]:
    """Return the sum of each sample's losses, and how many there are."""
    sums = []
    counts = []
    for sample in samples:
        losses = F.cross_entropy(model(sample[:-1]), sample[1:], reduction="none")
        counted = sample[:-1] != eod
        sums.append(losses[counted].sum())
        counts.append(counted.sum())
    return torch.stack(sums), torch.stack(counts)


class HybridLinear(torch.autograd.Function):
    """x W^T + b with --fp8-format hybrid --fp8-recipe tensorwise (Micikevicius et al. 2022).

    Each operand of the three products is rounded to FP8 after a scale of its own: a gradient to
    e5m2, the rest to e4m3. Products are summed in float32, as our runs on a CPU do: another sum
    could move a value across a border of rounding, which changes later steps by 1e-3.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (_product(_rounded(x), _rounded(weight)) + bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dx = _product(_rounded(dy, E5M2), _rounded(weight.t()))
        grad = _product(_rounded(dy.t(), E5M2), _rounded(x.t()))
        return dx.to(dy.dtype), grad.to(dy.dtype), dy.sum(0)


def _rounded(x: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """Return FP8 values and the factor to multiply them by."""
    scale = torch.finfo(dtype).max / x.abs().max().float()
    return (x.float() * scale).to(dtype), 1 / scale


def _product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    return F.linear(a[0].float(), b[0].float()) * (a[1] * b[1])
