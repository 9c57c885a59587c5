"""A layer of experts beside a dense MLP of the same active FLOPs, and beside transformers' own: forward and backward.

    python tools/bench/experts.py --tokens-per-expert 64

CPU time of one thread, medians, so that other programs on the machine do not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.flags.parse import parse, run
from megapipe.models.mlp import MLP
from megapipe.models.moe.layer import MoE
from megapipe.tensor_parallel.rng import initialize


@dataclass(frozen=True)
class Flags:
    """A layer of experts beside a dense MLP of the same active FLOPs, and beside transformers' own."""

    hidden: int = 512
    """Width of the model."""
    ffn: int = 768
    """Width of an expert."""
    experts: int = 16
    """Of the layer."""
    topk: int = 4
    """Experts for each token."""
    tokens_per_expert: int = 64
    """On average."""
    repeats: int = 9
    """Measured ones; two before them warm up."""


def main(argv: Sequence[str]) -> None:
    args = parse(Flags, argv)
    torch.set_num_threads(1)
    tokens = args.tokens_per_expert * args.experts // args.topk
    model = ModelConfig(
        num_layers=1,
        hidden_size=args.hidden,
        num_attention_heads=1,
        num_experts=args.experts,
        moe_ffn_hidden_size=args.ffn,
        moe_router_topk=args.topk,
        swiglu=True,
        disable_bias_linear=True,
    )
    layers: dict[str, nn.Module] = {
        "experts": MoE(model, Axis(), 0),
        "dense, same active FLOPs": MLP(replace(model, num_experts=None), Axis(), args.ffn * args.topk),
    }
    for layer in layers.values():
        initialize(layer, 1, Axis())
        for param in layer.parameters():
            setattr(param, "main_grad", torch.zeros_like(param))  # noqa: B010
    layers |= {f"transformers, {way}": _theirs(args, way) for way in ("eager", "grouped_mm")}
    x, dy = (torch.randn(1, tokens, args.hidden) for _ in range(2))
    times = {name: _median(partial(_step, layer, x, dy), args.repeats) for name, layer in layers.items()}
    for name, ms in times.items():
        print(f"{name:<28} {ms:8.1f} ms  {ms / times['experts']:5.2f}")


def _theirs(args: Flags, way: str) -> nn.Module:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes = {"hidden_size": args.hidden, "moe_intermediate_size": args.ffn, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**sizes, num_experts=args.experts, num_experts_per_tok=args.topk)
    config._experts_implementation = way
    layer: nn.Module = Qwen3MoeSparseMoeBlock(config)
    for param in layer.parameters():
        nn.init.normal_(param, std=0.02)
    return layer


def _step(layer: nn.Module, x: Tensor, dy: Tensor) -> None:
    mine = x.clone().requires_grad_()
    y = layer(mine)
    (y[0] if isinstance(y, tuple) else y).backward(dy)


def _median(step: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        began = time.process_time()
        step()
        times.append((time.process_time() - began) * 1e3)
    return statistics.median(times[2:])


if __name__ == "__main__":
    run(main)
