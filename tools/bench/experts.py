"""Time a layer of experts, a dense MLP of the same active FLOPs, and transformers' own layer:
forward and backward.

    python tools/bench/experts.py --tokens-per-expert 64
    torchrun --nproc-per-node 2 tools/bench/experts.py     # experts shared by processes, or not

CPU time of one thread, medians, so that other programs on the machine do not count.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from megapipe.config import ModelConfig, ParallelConfig
from megapipe.distributed.axis import CPU, Axis, Pending
from megapipe.distributed.mesh import ProcessMesh
from megapipe.flags.parse import parse, run
from megapipe.models.mlp import MLP
from megapipe.models.moe.layer import MoE
from megapipe.tensor_parallel.products import add_linear, linear
from megapipe.tensor_parallel.rng import initialize


@dataclass(frozen=True)
class Flags:
    """Compare a layer of experts with a dense MLP of the same active FLOPs, and with transformers'
    own layer.
    """

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
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return _shared(args, model, tokens)
    layers: dict[str, nn.Module] = {
        "experts": MoE(model, Axis(), 0),
        "dense, same active FLOPs": MLP(
            replace(model, num_experts=None), Axis(), args.ffn * args.topk
        ),
    }
    for layer in layers.values():
        _ready(layer, Axis())
    layers |= {f"transformers, {way}": _theirs(args, way) for way in ("eager", "grouped_mm")}
    x, dy = (torch.randn(1, tokens, args.hidden) for _ in range(2))
    steps: dict[str, Callable[[], None]] = {
        name: partial(_step, layer, x, dy) for name, layer in layers.items()
    }
    steps["the products alone"] = _products(
        args.experts, args.tokens_per_expert, args.hidden, args.ffn
    )
    steps["of the dense one"] = _products(1, tokens, args.hidden, args.ffn * args.topk)
    times = {name: _median(step, args.repeats) for name, step in steps.items()}
    for name, ms in times.items():
        print(f"{name:<28} {ms:8.1f} ms  {ms / times['experts']:5.2f}")


def _shared(args: Flags, model: ModelConfig, tokens: int) -> None:
    """Compare the CPU time of a process whose experts are shared by all processes with one that has
    all experts.
    """
    ranks = int(os.environ["WORLD_SIZE"])
    mesh = ProcessMesh.create(
        ParallelConfig(expert_model_parallel_size=ranks, distributed_backend="gloo"), CPU
    )
    x, dy = (torch.randn(1, tokens, args.hidden) for _ in range(2))
    start, spent = Axis.start_all_to_all, list[float]()

    def timed(axis: Axis, x: Tensor, rows: Sequence[Sequence[int]]) -> Pending:
        began = time.process_time()
        moved = start(axis, x, rows).wait()
        spent.append((time.process_time() - began) * 1e3)
        return Pending(moved)

    setattr(Axis, "start_all_to_all", timed)  # noqa: B010
    cases: list[tuple[str, ModelConfig, Axis]] = [
        ("ep 1", model, Axis()),
        (f"ep {ranks}, alltoall", replace(model, moe_token_dispatcher_type="alltoall"), mesh.tp),
        (f"ep {ranks}, allgather", replace(model, moe_token_dispatcher_type="allgather"), mesh.tp),
    ]
    for way, config, tp in cases:
        layer = MoE(config, tp, 0)
        _ready(layer, tp)
        spent.clear()
        ms = _median(partial(_step, layer, x, dy), args.repeats)
        moved = sum(spent) / (args.repeats + 2)
        if mesh.world.rank == 0:
            print(
                f"{way:<28} {ms:8.1f} ms"
                + f", {moved:.1f} ms of it all-to-all ({moved / ms:.1%})" * bool(spent)
            )
    mesh.close()


def _ready(layer: nn.Module, tp: Axis) -> None:
    initialize(layer, 1, tp)
    for param in layer.parameters():
        setattr(param, "main_grad", torch.zeros_like(param))  # noqa: B010


def _products(experts: int, rows: int, hidden: int, ffn: int) -> Callable[[], None]:
    """The matrix products of a step and nothing else: the least that any layer of these sizes takes
    here.
    """
    sizes = [(2 * ffn, hidden), (hidden, ffn)]
    weights = [[torch.randn(size) for size in sizes] for _ in range(experts)]
    sums = [[torch.zeros(size) for size in sizes] for _ in range(experts)]
    data = [
        [(torch.randn(rows, into), torch.randn(rows, out)) for out, into in sizes]
        for _ in range(experts)
    ]

    def step() -> None:
        for n in range(experts):
            for weight, main_grad, (x, dy) in zip(weights[n], sums[n], data[n], strict=True):
                linear(x, weight)
                linear(dy, weight.t())
                add_linear(main_grad, dy.t(), x.t())

    return step


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
