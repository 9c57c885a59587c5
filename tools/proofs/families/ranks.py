"""A rank's part of a run that begins from a converted model. Processes find it here by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapipe.checkpoint.save_load import save_checkpoint
from megapipe.config import (
    BatchConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
)
from megapipe.convert import SavedTensors, load_full
from megapipe.distributed.mesh import ProcessMesh
from megapipe.models.provider import gpt_provider
from megapipe.optim.loss_scale import LossScale
from megapipe.optim.optimizer import Optimizer
from megapipe.partition.spans import spans
from megapipe.schedule import Schedule
from megapipe.training.forward_step import forward_step
from megapipe.training.steps.stages import Stages
from tools.proofs.equivalence import Part, Training

VOCAB = 104
"""Ids of each model. Two ranks divide them without rows of padding, which a loss would count."""
LENGTH, SAMPLES, STEPS, LR = 12, 4, 2, 1e-3


class Layout(NamedTuple):
    """How a model lies over ranks.

    Attributes:
        name: which axis has two ranks; "one" for one process.
        schedule: the table of passes.
        layers: number of layers of each position of the chain.
        settings: changes of ModelConfig that only a layout makes.
    """

    name: str
    schedule: Schedule
    layers: tuple[int, ...]
    settings: dict[str, Any]

    @property
    def sizes(self) -> dict[str, int]:
        """The numbers of ranks by axis; experts lie over data-parallel ranks."""
        if self.name == "one":
            return {}
        return {"ep": 2, "dp": 2} if self.name == "ep" else {self.name: 2}


def config_of(model: ModelConfig, layout: Layout) -> Config:
    """Return the configuration of a run of two steps in this layout, without random numbers."""
    sizes = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "dp": 1} | layout.sizes
    plain: dict[str, Any] = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    if model.moe_input_jitter_eps:
        plain["moe_input_jitter_eps"] = 0.0
    return Config(
        model=replace(model, **plain, **layout.settings),
        parallel=ParallelConfig(sizes["tp"], sizes["pp"], sizes["cp"], sizes["ep"]),
        batch=BatchConfig(
            micro_batch_size=1,
            global_batch_size=SAMPLES,
            seq_length=LENGTH,
            train_iters=STEPS,
        ),
        optimizer=OptimizerConfig(lr=LR),
        data=DataConfig(mock_data=True, tokenizer_type="NullTokenizer", vocab_size=VOCAB - 1),
        world_size=sizes["tp"] * sizes["pp"] * sizes["cp"] * sizes["dp"],
    )


def sample(number: int) -> Tensor:
    """Return the token ids [s + 1] of a sample."""
    dice = torch.Generator().manual_seed(number)
    return torch.randint(0, VOCAB, (LENGTH + 1,), generator=dice)


def batch() -> tuple[Tensor, Tensor]:
    """Return the tokens and the labels [b, s] of the first step."""
    rows = torch.stack([sample(number) for number in range(SAMPLES)])
    return rows[:, :-1], rows[:, 1:]


class Converted(Training):
    """A rank's part of a run that begins from an imported checkpoint.

    Args:
        tensors: the checkpoint.
        dtype: of weights and activations.
    """

    def __init__(
        self,
        mesh: ProcessMesh,
        config: Config,
        layout: Layout,
        tensors: SavedTensors,
        dtype: torch.dtype,
    ) -> None:
        self.mesh, self.config = mesh, config
        places = spans(layout.layers, layout.schedule.placement)
        own = layout.schedule.placement.stages_on(mesh.pp.rank)
        self.stages = [gpt_provider(config.model, places[n], mesh.tp) for n in own]
        load_full(self.stages, tensors.read, mesh.tp)
        for stage in self.stages:
            stage.to(mesh.device, dtype)
        self.logits: list[Tensor] = []
        step = forward_step if dtype == torch.float64 else self._keeping
        self.pipeline = Stages(config, layout.schedule, self.stages, step, mesh, VOCAB)
        self.optimizer = Optimizer(self.stages, config.optimizer, mesh, **config.of_optimizer)
        self.scale = LossScale.start(config.precision)

    def _keeping(self, batches: Any, model: Any) -> tuple[Tensor, Any]:
        """A forward_step that keeps the logits [1, s/c, v/t] of each microbatch."""
        found = None if batches is None else next(batches)
        if found is None:
            return model(), None

        def keep(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            self.logits.append(output.detach())
            return output.sum(), found.loss_mask.sum(), {}

        return model(found.tokens, found.position_ids), keep

    def _at(self, consumed: int) -> list[Tensor]:
        dp = self.mesh.dp
        count = SAMPLES // dp.size
        return [sample(consumed + i * dp.size + dp.rank)[None] for i in range(count)]

    def evaluated(self) -> list[Tensor]:
        """Return this rank's part of the logits of each of its microbatches."""
        self.pipeline.run(self._at(0), 0, evaluate=True)()
        return self.logits


class Evaluated(NamedTuple):
    """What a rank has after an evaluation in float32: parts of logits, and where they belong."""

    tp: int
    cp: int
    dp: int
    logits: list[Tensor]
    folder: Path | None


class Trained(NamedTuple):
    """What a rank has after two steps in float64."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Part]
    weights: dict[str, Part]


def evaluate(
    mesh: ProcessMesh, config: Config, layout: Layout, tensors: SavedTensors, root: Path
) -> Evaluated:
    """Compute this rank's logits; ranks that are processes also write a checkpoint to `root`."""
    run = Converted(mesh, config, layout, tensors, torch.float32)
    logits = run.evaluated()
    state = {"consumed_train_samples": 0, "consumed_valid_samples": 0}
    folder = None
    if mesh.device_mesh is not None:
        folder = save_checkpoint(root, 1, run.stages, run.optimizer, state, config, mesh)
    return Evaluated(mesh.tp.rank, mesh.cp.rank, mesh.dp.rank, logits, folder)


def train(mesh: ProcessMesh, config: Config, layout: Layout, tensors: SavedTensors) -> Trained:
    """Train two steps in float64."""
    run = Converted(mesh, config, layout, tensors, torch.float64)
    first = run.step(0)
    gradients = run.gradients()
    results = [first, run.step(1)]
    losses = [result.losses["lm loss"] for result in results]
    norms = [result.grad_norm for result in results]
    return Trained(losses, norms, gradients, run.weights())
