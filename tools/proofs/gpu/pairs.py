"""Links of a GPU by the roofline: what pairs of passes hide of experts' all-to-alls, what products
in pieces hide of tensor parallelism, and the MFU that is left.

    python -m tools.proofs.gpu pairs

A layer's arithmetic is that of roofline.py with the experts of one rank and as many rows as all
ranks send it; each all-to-all takes the bytes that leave a rank over RATES. Two passes together
take the makespan of their pieces, as schedule/costs.py has it; DualPipe's step is the simulator's,
of stages of such layers alone, with its bubble.

Of tensor parallelism one rank's layer runs with an axis whose collectives take their bytes over the
link's rate, one after another beside the kernels, and are waited for where the code waits.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis, Pending
from megapipe.models.gpt import GPTModel
from megapipe.optim.buffers import FlatBuffers
from megapipe.partition.spans import LayerSpan
from megapipe.schedule import Costs, build, simulate, unpaired
from megapipe.tensor_parallel.rng import MicrobatchContext
from megapipe.tensor_parallel.weight_grad import WeightGrads
from tools.proofs.gpu import fake_cuda
from tools.proofs.gpu.roofline import _1_3B, _8B, GPU, LLAMA, PEAK, Roofline, passes

RATES = {"NVLink": 300e9, "a 400 Gbit/s card each": 45e9}
"""Bytes a second that leave a GPU: assumed, of 450 and 50 of the data sheets."""
PP, MICROBATCHES, LAYERS = 8, 32, 4
"""Pipeline ranks and microbatches of the step, and layers of a rank."""
MIXTRAL = replace(
    LLAMA,
    num_layers=2,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    ffn_hidden_size=14336,
    num_experts=2,
)
DEEPSEEK = replace(
    LLAMA,
    num_layers=2,
    hidden_size=7168,
    num_attention_heads=128,
    group_query_attention=False,
    multi_latent_attention=True,
    kv_channels=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    moe_ffn_hidden_size=2048,
    ffn_hidden_size=18432,
    moe_shared_expert_intermediate_size=2048,
    moe_router_topk=8,
    num_experts=8,
)
MODELS = {"Mixtral 8x7B": (MIXTRAL, 4, 4096), "DeepSeek-V3": (DEEPSEEK, 32, 4096)}
"""The model with the experts of one rank, ranks that share them, and tokens of a microbatch."""


def arithmetic(model: ModelConfig, tokens: int) -> tuple[float, float, float]:
    """Seconds of a layer forward and backward, and its FLOPs."""
    config = replace(model, max_position_embeddings=tokens, padded_vocab_size=1024)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(tokens, 1, config.hidden, device=GPU, dtype=torch.bfloat16)
        there, back = passes(config, LayerSpan(0, 1, False, False), x, None)
    return sum(there.seconds.values()), sum(back.seconds.values()), there.flops + back.flops


def figures(forward: float, backward: float, flops: float, leaves: float) -> dict[str, float]:
    """A layer alone and in pairs, and a step of DualPipe. exposed: of the time, in which only
    messages are under way.

    Args:
        forward, backward: seconds of a layer's arithmetic, of which flops.
        leaves: seconds of an all-to-all; a pass has two in each layer.
    """
    f, bw = forward + 2 * leaves, backward + 2 * leaves
    w = backward / 3  # products of weight gradients wait for no rows
    costs = Costs(
        f=f,
        b=bw - w,
        w=w,
        link_f=2 * leaves / f,
        link_b=2 * leaves / (bw - w),
        piece=leaves / LAYERS,
    )
    table = build("dualpipe", PP, MICROBATCHES)
    pair = next(step for row in table.ranks for step in row if len(step) > 1)
    together = (
        costs.of_step(pair, table.placement) * table.placement.main / PP
    )  # as plain numbers: of a rank's stages
    work = MICROBATCHES * flops / PEAK
    return {
        "layer's arithmetic, ms": 1e3 * (forward + backward),
        "its all-to-alls, ms": 1e3 * 4 * leaves,
        "exposed alone": 4 * leaves / (f + bw),
        "exposed in pairs": max(0.0, 1 - (forward + backward) / together),
        "MFU alone": flops / PEAK / (f + bw),
        "MFU in pairs": flops / PEAK / together,
        "step's MFU alone": work / simulate(unpaired(table), costs).makespan,
        "step's MFU in pairs": work / simulate(table, costs).makespan,
    }


LATENCY, BLOCKS = 1e-5, 16 / 132
"""Seconds of a collective beside its bytes, and the part of a GPU that it takes from products
beside it: assumed.
"""
DENSE = {"1.3B": (_1_3B, 4, 2048), "8B": (_8B, 1, 4096)}
"""The model, sequences of a microbatch and their tokens."""


@dataclass(frozen=True)
class _Work:
    """A transfer that is under way until `end` of a roofline's clock."""

    roof: Roofline
    end: float

    def wait(self) -> None:
        self.roof.wait_for(self.end)


@dataclass(frozen=True)
class Timed(Axis):
    """An axis with one real rank, over a link of a number of bytes a second."""

    rate: float = 1.0

    def _sent(self, out: Tensor, size: float) -> Pending:
        roof = _get_current_dispatch_mode()
        if not isinstance(roof, Roofline):
            return Pending(out)
        end = roof.send(size / self.rate + LATENCY)
        return Pending(out, _Work(roof, end))  # type: ignore[arg-type]

    def start_all_reduce(self, x: Tensor, op: str = "sum") -> Pending:
        return self._sent(x, 2 * x.nbytes * (self.size - 1) / self.size)

    def start_all_gather(self, x: Tensor, into: Tensor | None = None) -> Pending:
        return self._sent(x.new_empty(self.size * len(x), *x.shape[1:]), x.nbytes * (self.size - 1))

    def start_reduce_scatter(self, x: Tensor, into: Tensor | None = None) -> Pending:
        out = x.new_empty(len(x) // self.size, *x.shape[1:])
        return self._sent(out, out.nbytes * (self.size - 1))

    def start_shift(self, x: Tensor, channel: int = 0, into: Tensor | None = None) -> Pending:
        return self._sent(x.new_empty(x.shape) if into is None else into, x.nbytes)


def layer_of(
    model: ModelConfig, batch: int, tokens: int, tp: Axis, *, deferred: bool
) -> list[Roofline]:
    """The passes of a rank's layer: F and B with weight gradients, or F, B and W."""
    config = replace(model, max_position_embeddings=tokens, padded_vocab_size=1024)
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = GPTModel(config, LayerSpan(0, 1, False, False), tp).to(GPU).bfloat16()
        FlatBuffers(dict(module.named_parameters()), device=GPU)
        rows = tokens // (tp.size if config.sequence_parallel else 1)
        x = torch.empty(rows, batch, config.hidden, device=GPU, dtype=torch.bfloat16)
        owner, roofs = WeightGrads(), [Roofline() for _ in range(2 + deferred)]

        def forward() -> Tensor:
            module.set_input_tensor(x.detach().requires_grad_())
            with MicrobatchContext(0, 0).active(), owner.capturing():
                return module(labels=None)  # type: ignore[no-any-return]

        forward()  # tables of angles are made once
        with roofs[0]:
            out = forward()
        with owner.deferring(0) if deferred else nullcontext(), roofs[1]:
            torch.autograd.backward(out, torch.ones_like(out))
        if deferred:
            with torch.no_grad(), roofs[2]:
                owner.run(0)
    return roofs


def of_tensor_ranks(
    model: ModelConfig, batch: int, tokens: int, ranks: int, *, deferred: bool
) -> dict[str, float]:
    """A layer's time and MFU, and how much of its collectives shows."""
    tp = Timed(0, ranks, tuple(range(ranks)), device=GPU, rate=RATES["NVLink"])
    roofs = layer_of(model, batch, tokens, tp, deferred=deferred)
    shows, travelled = sum(x.waited for x in roofs), sum(x.travelled for x in roofs)
    seconds = sum(x.now for x in roofs) + BLOCKS * (travelled - shows)
    return {
        "layer ms": 1e3 * seconds,
        "collectives ms": 1e3 * travelled,
        "of which show": shows / travelled,
        "kernels": sum(sum(x.kernels.values()) for x in roofs),
        "MFU": sum(x.flops for x in roofs) / PEAK / seconds,
    }


def main() -> None:
    # Imported late: the package makes the device known, which tests do not need.
    from tools.proofs.gpu.emulated.attention import attention

    fake_cuda.move_parameters()
    F.scaled_dot_product_attention = attention  # type: ignore[assignment]
    for name, (model, ranks, tokens) in MODELS.items():
        times = arithmetic(model, tokens)
        for link, rate in RATES.items():
            print(
                f"{name}, experts over {ranks} ranks, {tokens} tokens, {link} at {rate / 1e9:g} "
                "GB/s"
            )
            leaves = tokens * model.moe_router_topk * model.hidden * 2 * (1 - 1 / ranks) / rate
            for what, value in figures(*times, leaves).items():
                print(f"  {what}: {value:.2f}" if "ms" in what else f"  {what}: {value:.1%}")
    for name, (model, batch, tokens) in DENSE.items():
        for ranks, sequence, deferred, pieces in product(
            (2, 4), (True, False), (False, True), (False, True)
        ):
            config = replace(model, sequence_parallel=sequence, tp_comm_overlap=pieces)
            found = of_tensor_ranks(config, batch, tokens, ranks, deferred=deferred)
            said = (
                f"{name} tp {ranks}{' sequence parallel' * sequence}"
                f"{', W apart' * deferred}{', pieces' * pieces}"
            )
            print(said, ", ".join(f"{what} {value:.3g}" for what, value in found.items()))
