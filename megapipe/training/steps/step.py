"""One training step and one evaluation, the same under every schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import add
from typing import NamedTuple

from torch import Tensor, nn

from megapipe.config import Config
from megapipe.data.loader import Batch, Microbatch, make_batch, tokens_of
from megapipe.distributed.late import Late, read_together
from megapipe.distributed.mesh import ProcessMesh
from megapipe.distributed.tokens import Cut, Documents, find_documents
from megapipe.optim.optimizer import Optimizer
from megapipe.pipeline_parallel.engine import ForwardBackward
from megapipe.pipeline_parallel.loss import Loss
from megapipe.pipeline_parallel.messages.transport import Transport
from megapipe.pipeline_parallel.passes.begin import Weights
from megapipe.pipeline_parallel.stage import ForwardStep, Rewinding
from megapipe.pipeline_parallel.stopwatch import Stopwatch
from megapipe.schedule import Costs, Kind, Schedule
from megapipe.schedule.costs import UNIT
from megapipe.tensor_parallel.rng import Stream
from megapipe.training.steps.overlap import with_overlap
from megapipe.training.steps.routers import Routed, Routers
from megapipe.training.steps.totals import Adder, Totals, counted_tokens

Refuses = Callable[[Mapping[str, float]], bool]
"""Is a step not to count, by its losses?"""


@dataclass(frozen=True)
class StepResult:
    """What every rank knows after a step.

    Attributes:
        losses: what loss_func reported, by name: sum over count of the global batch, or the mean of single numbers.
            What nothing was counted of is left out. Nothing else depends on them.
        grad_norm: before clipping; nan if it was not computed.
        tokens: trained tokens of the global batch: the second of three values of loss_func, 0 if it returns two.
        skipped: nothing was updated, because the loss or the gradient was not finite.
        finite: every loss that was differentiated, whatever was reported.
        spiked: skipped because a loss is above its limit.
        batch: sequences of the global batch.
        late: the update did not wait for the norm. undone: and was wrong.
        routed: of the layers with experts.
    """

    losses: dict[str, float]
    grad_norm: float
    tokens: float
    skipped: bool
    num_zeros: int | None = None
    finite: bool = True
    spiked: bool = False
    batch: int = 0
    late: bool = False
    undone: bool = False
    routed: Routed = field(default_factory=Routed)

    @property
    def shown(self) -> dict[str, float]:
        """What logs say of the losses."""
        return self.losses | self.routed.losses


class Rates(NamedTuple):
    """Of one update; ends_lr is that of word embeddings and output head, `lr` if None."""

    lr: float
    ends_lr: float | None
    weight_decay: float


class Pipeline:
    """This rank's stages with their data, run under one schedule.

    Args:
        modules: the stages of this rank in ascending order.
        forward_step: as Megatron's, see pipeline_parallel.stage.
        eod: end-of-document id of the tokenizer.
        variable_seq_lengths: microbatches may differ in length.
        also_read: stages that get batches beside those with embedding or loss.
        costs: what the stages take, by which messages are ordered.
    Attributes:
        stopwatch: of the last step of training whose passes are over.
        routers: of the layers with experts here.
        on_layer_done: as in a Request, with a stage's number among this rank's.
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
        also_read: Collection[int] = (),
        costs: Costs = UNIT,
    ) -> None:
        self.config, self.modules, self.mesh = config, modules, mesh
        self.stopwatch = Stopwatch(mesh.device)
        self.on_layer_done: Callable[[int, int, int], None] | None = None
        self._forward_step, self._eod, self._also_read = forward_step, eod, also_read
        self._add_up = Adder(mesh)
        self.routers = Routers(modules, mesh, config.model, mirrored=schedule.placement.num_chains > 1)
        self._forward_backward = ForwardBackward(
            mesh,
            with_overlap(schedule, config),
            p2p_mode=config.parallel.p2p_mode,
            config=config.model,
            variable_seq_lengths=variable_seq_lengths,
            costs=costs,
        )

    @property
    def schedule(self) -> Schedule:
        """The table of the steps to come."""
        assert isinstance(self._forward_backward.schedule, Schedule)
        return self._forward_backward.schedule

    @property
    def transport(self) -> Transport:
        """How messages between stages are posted."""
        return self._forward_backward.transport

    def follow(self, schedule: Schedule, costs: Costs) -> None:
        """From the next step on, another table of the same stages. All ranks at the same step."""
        self._forward_backward.schedule = with_overlap(schedule, self.config)
        self._forward_backward.costs = costs

    def under(self, config: Config, schedule: Schedule) -> Pipeline:
        """The same stages, on the same ranks, under the table of another batch."""
        other = copy(self)
        other.config, other._forward_backward = config, copy(self._forward_backward)
        other.follow(schedule, self._forward_backward.costs)
        return other

    def run(
        self,
        microbatches: Sequence[Microbatch],
        consumed: int,
        *,
        evaluate: bool = False,
        loss_scale: Callable[[], float] = lambda: 1.0,
        weights: Sequence[Weights] | None = None,
        iteration: int | None = None,
    ) -> Late[Totals]:
        """All passes of one step; what is returned waits for what they reported, of all ranks.

        Args:
            microbatches: of this data-parallel rank; read only where a stage needs them.
            consumed: samples trained on before this step, which name its randomness.
            weights: of each of this rank's stages, what the table's passes of it as a whole do.
            iteration: as diagnoses name it; default: by the samples.
        """
        config, dp = self.config, self.mesh.dp
        b, s = config.train.micro_batch_size, config.train.seq_length
        assert b is not None, "validated flags have a micro batch size"
        assert s is not None, "validated flags have a sequence length"
        what = "evaluation" if evaluate else "iteration"
        self.mesh.position.begin(f"{what} {iteration or consumed // config.global_batch_size + 1}")
        for module in self.modules:
            module.train(not evaluate)
        self.routers.begin()
        losses, done = list[Loss](), self.on_layer_done
        chunk = {stage: i for i, stage in enumerate(self._own)}
        batches = [self._batches(stage, microbatches) for stage in self._own]
        self._forward_backward(
            forward_step_func=self._forward_step,
            data_iterator=batches,
            model=self.modules,
            num_microbatches=self.schedule.num_microbatches,
            seq_length=s,
            micro_batch_size=b,
            forward_only=evaluate or config.train.freeze_all_layers,
            calculate_per_token_loss=config.train.calculate_per_token_loss,
            loss_scale=loss_scale,
            on_loss=losses.append,
            stopwatch=(watch := Stopwatch(self.mesh.device, self.schedule)),
            on_layer_done=done and (lambda stage, layer, layers: done(chunk[stage], layer, layers)),
            weights=weights,
            stream=lambda i: Stream(
                config.train.seed, consumed + (i * dp.size + dp.rank) * b, self._documents(microbatches, i)
            ),
        )
        if not (evaluate or config.train.freeze_all_layers):
            self.stopwatch = watch
        self.mesh.position.enter("the sum of the losses")
        beside = None if evaluate else self.routers.table()
        finish = self._add_up.start(losses, consumed, evaluate=evaluate, beside=beside)
        self.mesh.position.leave()
        return finish

    def _documents(self, microbatches: Sequence[Microbatch], i: int) -> Documents | None:
        """What --reset-attention-mask and --reset-position-ids need to know on every stage, also between the ends."""
        isolate, restart = self.config.data.reset_attention_mask, self.config.data.reset_position_ids
        if not (isolate or restart):
            return None
        return find_documents(tokens_of(microbatches[i])[:, :-1], self._eod, isolate=isolate, restart=restart)

    @property
    def _own(self) -> tuple[int, ...]:
        return self.schedule.placement.stages_on(self.mesh.pp.rank)

    def _batches(self, stage: int, microbatches: Sequence[Microbatch]) -> Rewinding[Batch] | None:
        """The stage's microbatches in its order; None where it has neither embedding nor loss and did not ask."""
        place = self.schedule.placement
        shares = stage in place.shares(stage)
        if not (place.is_first(stage) or place.is_last(stage) or stage in self._also_read or shares):
            return None
        steps = self.schedule.ranks[self.mesh.pp.rank]
        reads = Kind.E if shares else Kind.F
        order = [p.microbatch for step in steps for p in step if p.kind is reads and p.stage == stage]
        data, cp = self.config.data, self.mesh.cp

        def batch(i: int) -> Batch:
            read = microbatches[i]
            named = {"tokens": read} if isinstance(read, Tensor) else read
            here = {name: x.to(self.mesh.device, non_blocking=True) for name, x in named.items()}
            usual = make_batch(here.pop("tokens"), self._eod, data.eod_mask_loss, data.reset_position_ids)
            return replace(usual, more=here).cut(Cut(cp.rank, cp.size))

        return Rewinding(batch, order)


def weights_of(optimizer: Optimizer) -> list[Weights]:
    """How the reductions and gathers of each of this rank's stages begin."""
    reduce, gather = optimizer.reduction.start, optimizer.start_gather
    return [Weights(partial(reduce, n), partial(gather, n)) for n in range(len(optimizer.chunks))]


def train_step(
    pipeline: Pipeline,
    optimizer: Optimizer,
    microbatches: Sequence[Microbatch],
    consumed: int,
    lr: float,
    *,
    loss_scale: float = 1.0,
    count_zeros: bool = False,
    ends_lr: float | None = None,
    refuses: Refuses = lambda losses: False,
    iteration: int | None = None,
) -> StepResult:
    """Forward, backward, reduce, clip, update. Run again after a step that was skipped it does the same.

    Args:
        ends_lr: the rate of word embeddings and output head, `lr` if None.
        refuses: is nothing to be updated after these losses?
    """
    optimizer.zero_grad()
    batch, weights = pipeline.config.global_batch_size, weights_of(optimizer)
    late = pipeline.run(microbatches, consumed, loss_scale=lambda: loss_scale, weights=weights, iteration=iteration)
    per_token, position = pipeline.config.train.calculate_per_token_loss, pipeline.mesh.position
    scale = counted_tokens(late).clamp(min=1).reciprocal() if per_token else 1 / pipeline.mesh.dp.size
    position.enter("the optimizer step")
    totals, norm = read_together(late, optimizer.start_norm(scale / loss_scale))
    position.leave()
    result = StepResult(totals.means, math.nan, totals.tokens, skipped=True, batch=batch)
    result = replace(result, routed=pipeline.routers.read(totals.beside, pipeline.config))
    if not totals.finite:
        return replace(result, finite=False)
    if refuses(totals.means):
        return replace(result, spiked=True)
    info = optimizer.update_by(norm, lr, count_zeros, ends_lr)
    if not (info.skipped or pipeline.config.train.freeze_all_layers):
        pipeline.routers.move(pipeline.routers.moved())
    return replace(result, grad_norm=info.grad_norm, skipped=info.skipped, num_zeros=info.num_zeros)


def evaluate(
    pipeline: Pipeline, batches_at: Callable[[int], Sequence[Microbatch]], consumed: int, iters: int
) -> dict[str, float]:
    """What loss_func reports of `iters` global batches: sums over counts of all of them, as in Megatron-LM.

    Args:
        batches_at: samples consumed -> one batch.
    """
    size = pipeline.config.global_batch_size
    starts = range(consumed, consumed + iters * size, size)
    return reduce(add, (pipeline.run(batches_at(start), start, evaluate=True)() for start in starts)).means
