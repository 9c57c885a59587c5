"""Experts over links, on a GPU by the roofline: what pairs of passes hide of the all-to-alls, and the MFU that is left.

    python -m tools.proofs.gpu pairs

A layer's arithmetic is that of roofline.py with the experts of one rank and as many rows as all ranks send it; each
all-to-all takes the bytes that leave a rank over RATES. Two passes together take the makespan of their pieces, as
schedule/costs.py has it; DualPipe's step is the simulator's, of stages of such layers alone, with its bubble.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from megapipe.config import ModelConfig
from megapipe.partition.spans import LayerSpan
from megapipe.schedule import Costs, build, simulate, unpaired
from tools.proofs.gpu import fake_cuda
from tools.proofs.gpu.roofline import GPU, LLAMA, PEAK, attention, passes

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
    """A layer alone and in pairs, and a step of DualPipe. exposed: of the time, in which only messages are under way.

    Args:
        forward, backward: seconds of a layer's arithmetic, of which flops.
        leaves: seconds of an all-to-all; a pass has two in each layer.
    """
    f, bw = forward + 2 * leaves, backward + 2 * leaves
    w = backward / 3  # products of weight gradients wait for no rows
    costs = Costs(f=f, b=bw - w, w=w, link_f=2 * leaves / f, link_b=2 * leaves / (bw - w), piece=leaves / LAYERS)
    table = build("dualpipe", PP, MICROBATCHES)
    pair = next(step for row in table.ranks for step in row if len(step) > 1)
    together = costs.of_step(pair, table.placement) * table.placement.main / PP  # as plain numbers: of a rank's stages
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


def main() -> None:
    fake_cuda.move_parameters()
    F.scaled_dot_product_attention = attention  # type: ignore[assignment]
    for name, (model, ranks, tokens) in MODELS.items():
        times = arithmetic(model, tokens)
        for link, rate in RATES.items():
            print(f"{name}, experts over {ranks} ranks, {tokens} tokens, {link} at {rate / 1e9:g} GB/s")
            leaves = tokens * model.moe_router_topk * model.hidden * 2 * (1 - 1 / ranks) / rate
            for what, value in figures(*times, leaves).items():
                print(f"  {what}: {value:.2f}" if "ms" in what else f"  {what}: {value:.1%}")
