"""A small GPT in both styles, its data, and one step of it under any layout: what the equality tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.distributed.layout import layout_of
from megapipe.distributed.mesh import ProcessMesh
from megapipe.models.provider import gpt_provider
from megapipe.optim.buffers import FlatBuffers
from megapipe.partition.spans import partition
from megapipe.partition.spans import spans as spans_of
from megapipe.pipeline_parallel.contracts.forward_backward import get_forward_backward_func
from megapipe.schedule import Kind, Schedule, from_csv
from megapipe.tensor_parallel.rng import MicrobatchContext, initialize

SEQ, BATCH, VOCAB, LAYERS = 12, 2, 64, 4

_SIZES: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": SEQ,
    "padded_vocab_size": VOCAB,
}
GPT2 = ModelConfig(**_SIZES)
LLAMA = ModelConfig(
    **_SIZES,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    ffn_hidden_size=48,
    group_query_attention=True,
    num_query_groups=2,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
STYLES = {"gpt2": GPT2, "llama": LLAMA}

WAITING = from_csv("0F0,0B0,0F1,0B1,0W0,0W1", "waiting.csv")
"""Two microbatches on one rank, each of whose W waits for both B: no schedule of one rank lets W wait."""


def tokens(microbatches: int) -> Tensor:
    """[m, b, s + 1]."""
    return torch.randint(0, VOCAB, (microbatches, BATCH, SEQ + 1), generator=torch.Generator().manual_seed(7))


def forward_step(data: Iterator[Tensor] | None, model: nn.Module) -> tuple[Tensor, Any]:
    if data is None:
        return model(), None
    microbatch = next(data)

    def loss_func(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
        return losses.sum(), torch.tensor(losses.numel()), {"lm loss": losses.sum().item()}

    return model(microbatch[:, :-1], labels=microbatch[:, 1:]), loss_func


def run_step(
    mesh: ProcessMesh,
    model: ModelConfig,
    schedule: Schedule,
    dtype: torch.dtype = torch.float64,
    counts: tuple[int, ...] | None = None,
) -> tuple[list[float], dict[str, tuple[Tensor, int | None, tuple[int, ...]]]]:
    """(loss sums of the microbatches, name -> (local gradient, tp dim, full shape)) of one rank.

    counts: layers of each stage of a chain, even by default.
    """
    spans = partition(LAYERS, schedule.placement) if counts is None else spans_of(counts, schedule.placement)
    own = schedule.placement.stages_on(mesh.pp.rank)
    modules = [gpt_provider(model, spans[stage], mesh.tp).to(dtype) for stage in own]
    data = tokens(schedule.num_microbatches)
    iterators: list[Iterator[Tensor] | None] = []
    for stage, module in zip(own, modules, strict=True):
        initialize(module, 1, mesh.tp)
        order = [p.microbatch for step in schedule.ranks[mesh.pp.rank] for p in step if p[:2] == (Kind.F, stage)]
        iterators.append(iter(data[order]) if spans[stage].embedding or spans[stage].loss else None)
    buffers = [FlatBuffers(dict(module.named_parameters())) for module in modules]
    run = get_forward_backward_func(mesh=mesh, schedule=schedule)
    reported = run(
        forward_step_func=forward_step,
        data_iterator=iterators,
        model=modules,
        num_microbatches=schedule.num_microbatches,
        seq_length=SEQ,
        micro_batch_size=BATCH,
        stream=lambda microbatch: MicrobatchContext(0, microbatch),  # data-parallel ranks have the same data here
    )
    for flat in buffers:
        flat.sum_over_tp(mesh.tp)
    named = [pair for module in modules for pair in module.named_parameters()]
    return [r["lm loss"] for r in reported], {n: (p.main_grad, layout_of(p).dim, layout_of(p).full) for n, p in named}
