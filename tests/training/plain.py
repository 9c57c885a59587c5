"""A model of torch's own layers, partly frozen where asked, trained under any mesh and in plain torch."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.config import BatchConfig, Config, ModelConfig, OptimizerConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import ProcessMesh
from megapipe.models.build import build_stage
from megapipe.models.gpt import GPTModel
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.rule import Rates
from megapipe.partition.spans import LayerSpan, partition
from megapipe.schedule import build
from megapipe.training.forward_step import forward_step
from megapipe.training.guards.model import check_ownership
from megapipe.training.guards.replicas import check_replicas
from megapipe.training.steps.stages import Stages
from megapipe.training.steps.step import train_step

LAYERS, HIDDEN, VOCAB, SEQ, BATCH = 4, 8, 24, 6, 8
MODEL = ModelConfig(num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=1, padded_vocab_size=VOCAB)
RUN = Config(
    MODEL,
    batch=BatchConfig(train_iters=3, micro_batch_size=1, global_batch_size=BATCH, seq_length=SEQ),
    optimizer=OptimizerConfig(lr=0.05, weight_decay=0.1),
)
ALL = {"tp": 2, "dp": 2, "pp": 2}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.gain = nn.Parameter(torch.randn(HIDDEN))
        self.register_buffer("shift", torch.randn(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(x) * self.gain + self.shift)


class Plain(nn.Module):
    def __init__(self, span: LayerSpan) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN) if span.embedding else None
        self.layers = nn.ModuleDict({str(n): Block() for n in span.layers})
        self.head = nn.Linear(HIDDEN, VOCAB) if span.loss else None

    def set_input_tensor(self, x: Tensor | None) -> None:
        self.input = x

    def forward(self, tokens=None, position_ids=None, labels=None) -> Tensor:
        x = self.input if self.embedding is None else self.embedding(tokens.t())
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else F.cross_entropy(self.head(x).permute(1, 2, 0), labels, reduction="none")


def provider(config: ModelConfig, span: LayerSpan, tp: Axis) -> nn.Module:
    return Plain(span)


def tokens(step: int) -> Tensor:
    return torch.randint(VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(step))


def frozen(config: ModelConfig, span: LayerSpan, tp: Axis) -> nn.Module:
    """Nothing is trained in the first half, and half of the last layer."""
    stage = Plain(span)
    for name, param in stage.named_parameters():
        param.requires_grad_(not name.startswith(("embedding", "layers.0", "layers.1", "layers.3.mix")))
    return stage


def frozen_gpt(config: ModelConfig, span: LayerSpan, tp: Axis) -> nn.Module:
    """Our layers, whose weight gradients wait for W; the head is tied to the embedding, and both are frozen."""
    stage = GPTModel(replace(config, attention_dropout=0.0, hidden_dropout=0.0, max_position_embeddings=SEQ), span, tp)
    for name, param in stage.named_parameters():
        fixed = ("embedding", "output_layer", "decoder.layers.0", "decoder.layers.1", "decoder.layers.3.mlp")
        param.requires_grad_(not name.startswith(fixed))
    return stage


def stages(mesh: ProcessMesh, schedule, make=provider) -> list[nn.Module]:
    spans = partition(LAYERS, schedule.placement)
    own = schedule.placement.stages_on(mesh.pp.rank)
    return [build_stage(make, MODEL, spans[stage], mesh.tp, 1234).double() for stage in own]


def run(mesh: ProcessMesh, name: str, make=provider, asked=RUN, steps: int = 3, distributed=False):
    """Losses, gradient norms, initial and trained parameters of this rank, its optimizer and its norm of parameters."""
    config = replace(asked, world_size=mesh.world.size)
    microbatches = BATCH // mesh.dp.size
    schedule = build(name, mesh.pp.size, microbatches)
    modules = stages(mesh, schedule, make)
    check_ownership(modules, MODEL, make, schedule.placement, mesh)
    check_replicas(modules, mesh, mirrored=schedule.placement.num_chains > 1)
    named = dict(pair for module in modules for pair in module.named_parameters())
    before = {name: param.detach().clone() for name, param in named.items()}
    pipeline, optimizer = (
        Stages(config, schedule, modules, forward_step, mesh, 0),
        Optimizer(modules, config.optimizer, mesh, distributed=distributed),
    )
    told = []
    for step in range(steps):
        share = tokens(step).unflatten(0, (microbatches, mesh.dp.size))[:, mesh.dp.rank]
        result = train_step(pipeline, optimizer, list(share[:, None]), step * BATCH, Rates(0.05))
        told += [result.losses["lm loss"], result.grad_norm]
    return told, before, {name: param.detach() for name, param in named.items()}, optimizer, optimizer.params_norm()


def oracle(make=provider):
    """The same in plain torch: one module, one batch, torch's AdamW and clipping."""
    module = build_stage(make, MODEL, LayerSpan(0, LAYERS, True, True), Axis(), 1234).double()
    trained = [p for p in module.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(
        [{"params": [p for p in trained if (p.ndim > 1) == decays], "weight_decay": 0.1 * decays} for decays in (0, 1)],
        lr=0.05,
    )
    before, told = {name: param.detach().clone() for name, param in module.named_parameters()}, []
    for step in range(3):
        adam.zero_grad()
        batch = tokens(step)
        module.set_input_tensor(None)
        loss = module(batch[:, :-1], labels=batch[:, 1:]).mean()
        loss.backward()
        told += [loss.item(), float(nn.utils.clip_grad_norm_(trained, 1.0))]
        adam.step()
    return told, before, {name: param.detach() for name, param in module.named_parameters()}
