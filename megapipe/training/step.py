"""One training step and one evaluation, the same under every schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.config import Config
from megapipe.data.loader import Batch, make_batch
from megapipe.distributed.mesh import ProcessMesh
from megapipe.distributed.tokens import Documents, find_documents
from megapipe.errors import TrainingError
from megapipe.optim.optimizer import Optimizer
from megapipe.pipeline_parallel.forward_backward import get_forward_backward_func
from megapipe.pipeline_parallel.stage import ForwardStep
from megapipe.schedule import Kind, Schedule
from megapipe.tensor_parallel.rng import Stream


@dataclass(frozen=True)
class StepResult:
    """What every rank knows after a step.

    Attributes:
        losses: mean over the global batch of what loss_func reported, by name.
        tokens: trained tokens of the global batch; 0 if loss_func does not say.
        skipped: nothing was updated, because a loss or the gradient was not finite.
    """

    losses: dict[str, float]
    grad_norm: float
    tokens: float
    skipped: bool
    num_zeros: int | None = None


class Pipeline:
    """This rank's stages with their data, run under one schedule.

    Args:
        modules: the stages of this rank in ascending order.
        forward_step: as Megatron's, see pipeline_parallel.stage.
        eod: end-of-document id of the tokenizer.
        variable_seq_lengths: microbatches may differ in length.
    """

    def __init__(
        self,
        config: Config,
        schedule: Schedule,
        modules: Sequence[nn.Module],
        forward_step: ForwardStep,
        mesh: ProcessMesh,
        eod: int,
        *,
        variable_seq_lengths: bool = False,
    ) -> None:
        self.config, self.schedule, self.modules, self.mesh = config, schedule, modules, mesh
        self._forward_step, self._eod = forward_step, eod
        self._names: list[str] | None = None
        vp = len(modules) if len(modules) > 1 else None
        self._forward_backward = get_forward_backward_func(
            mesh.pp.size,
            vp,
            mesh=mesh,
            schedule=schedule,
            p2p_mode=config.parallel.p2p_mode,
            variable_seq_lengths=variable_seq_lengths,
        )

    def run(
        self, microbatches: Sequence[Tensor], consumed: int, *, evaluate: bool = False, loss_scale: float = 1.0
    ) -> tuple[dict[str, float], float]:
        """All passes of one step.

        Args:
            microbatches: token ids [b, s + 1] of this data-parallel rank; read only where a stage needs them.
            consumed: samples trained on before this step, which name its randomness.
        Returns: the losses' means over the global batch, and its tokens; the same on every rank.
        """
        config, dp = self.config, self.mesh.dp
        b, s = config.train.micro_batch_size, config.train.seq_length
        what = "evaluation" if evaluate else "iteration"
        self.mesh.position.begin(f"{what} {consumed // config.global_batch_size + 1}")
        for module in self.modules:
            module.train(not evaluate)
        reported = self._forward_backward(
            forward_step_func=self._forward_step,
            data_iterator=[self._batches(stage, microbatches) for stage in self._own],
            model=self.modules,
            num_microbatches=self.schedule.num_microbatches,
            seq_length=s,
            micro_batch_size=b,
            forward_only=evaluate,
            calculate_per_token_loss=config.train.calculate_per_token_loss,
            loss_scale=loss_scale,
            stream=lambda i: Stream(
                config.train.seed, consumed + (i * dp.size + dp.rank) * (b or 1), self._documents(microbatches, i)
            ),
        )
        self.mesh.position.enter("the sum of the losses")
        means = self._means(reported, 2 * consumed + evaluate)
        self.mesh.position.leave()
        return means

    def _documents(self, microbatches: Sequence[Tensor], i: int) -> Documents | None:
        """What --reset-attention-mask and --reset-position-ids need to know on every stage, also between the ends."""
        isolate, restart = self.config.data.reset_attention_mask, self.config.data.reset_position_ids
        if not (isolate or restart):
            return None
        return find_documents(microbatches[i][:, :-1], self._eod, isolate=isolate, restart=restart)

    @property
    def _own(self) -> tuple[int, ...]:
        return self.schedule.placement.stages_on(self.mesh.pp.rank)

    def _batches(self, stage: int, microbatches: Sequence[Tensor]) -> Iterator[Batch] | None:
        """The stage's microbatches in its order; None where there is neither embedding nor loss."""
        place = self.schedule.placement
        if not (place.is_first(stage) or place.is_last(stage)):
            return None
        steps = self.schedule.ranks[self.mesh.pp.rank]
        order = [p.microbatch for step in steps for p in step if p.kind is Kind.F and p.stage == stage]
        data = self.config.data

        def batch(i: int) -> Batch:
            tokens = microbatches[i].to(self.mesh.device, non_blocking=True)
            return make_batch(tokens, self._eod, data.eod_mask_loss, data.reset_position_ids)

        return map(batch, order)

    def _means(self, reported: list[dict[str, Any]], place: int) -> tuple[dict[str, float], float]:
        """Sum what the loss stages reported over all ranks. A value is (sum, count) or one number.

        place: where this rank is in the data; ranks at different ones would add up different steps unnoticed.
        """
        if self._names is None:
            known = self.mesh.pp.gather_json(sorted(reported[0]) if reported else [])
            self._names = max(known, key=len)
        rows = torch.zeros(len(self._names) + 1, 2, dtype=torch.float64)
        residue = place % 2**20  # its square, summed over 4096 ranks, is exact in float64
        rows[-1] = torch.tensor((residue, residue**2))
        for result in reported if self.mesh.tp.rank == 0 else ():  # all ranks of a tensor-parallel group report it
            for i, name in enumerate(self._names):
                value = torch.as_tensor(result[name]).detach().double().flatten().cpu()
                rows[i] += value if value.numel() == 2 else torch.stack((value[0], torch.ones(())))
        rows = self.mesh.world.all_reduce(rows.to(self.mesh.device)).cpu()
        total, squares = map(int, rows[-1].tolist())
        if total**2 != squares * self.mesh.world.size:  # Cauchy-Schwarz: equal for equal numbers alone
            places = self.mesh.world.gather_json(place // 2)
            raise TrainingError(
                "the ranks are at different places of the data: "
                + ", ".join(f"rank {rank} at sample {sample}" for rank, sample in enumerate(places))
                + ". Nothing was updated; start again from the last checkpoint with --load."
            )
        means = {name: (rows[i, 0] / rows[i, 1]).item() for i, name in enumerate(self._names)}
        return means, rows[0, 1].item() if self._names else 0.0


def train_step(
    pipeline: Pipeline,
    optimizer: Optimizer,
    microbatches: Sequence[Tensor],
    consumed: int,
    lr: float,
    *,
    loss_scale: float = 1.0,
    count_zeros: bool = False,
) -> StepResult:
    """Forward, backward, reduce, clip, update."""
    optimizer.zero_grad()
    losses, tokens = pipeline.run(microbatches, consumed, loss_scale=loss_scale)
    if not all(math.isfinite(loss) for loss in losses.values()):
        return StepResult(losses, math.nan, tokens, skipped=True)
    per_token = pipeline.config.train.calculate_per_token_loss
    scale = 1 / max(tokens, 1) if per_token else 1 / pipeline.mesh.dp.size
    position = pipeline.mesh.position
    position.enter("the optimizer step")
    info = optimizer.step(lr, scale / loss_scale, count_zeros)
    position.leave()
    return StepResult(losses, info.grad_norm, tokens, info.skipped, info.num_zeros)


def evaluate(
    pipeline: Pipeline, batches_at: Callable[[int], Sequence[Tensor]], consumed: int, iters: int
) -> dict[str, float]:
    """Mean losses over `iters` global batches; `batches_at(samples)` gives one."""
    size = pipeline.config.global_batch_size
    results = [
        pipeline.run(batches_at(consumed + i * size), consumed + i * size, evaluate=True)[0] for i in range(iters)
    ]
    return {name: sum(r[name] for r in results) / len(results) for name in results[0]}
