"""All passes of a step on this rank's stages, in training and in evaluation, the same under every schedule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial, reduce
from operator import add

from torch import Tensor, nn

from megapipe.config import Config
from megapipe.data.loader import Batch, Microbatch, make_batch, tokens_of
from megapipe.distributed.late import Late
from megapipe.distributed.mesh import ProcessMesh
from megapipe.distributed.tokens import Cut, Documents, find_documents
from megapipe.pipeline_parallel.again import Rewinding
from megapipe.pipeline_parallel.engine import ForwardBackward
from megapipe.pipeline_parallel.graphs.graphed import Graphs
from megapipe.pipeline_parallel.loss import ForwardStep, Loss
from megapipe.pipeline_parallel.messages.transport import Transport
from megapipe.pipeline_parallel.passes.begin import Weights
from megapipe.pipeline_parallel.passes.host import Host
from megapipe.pipeline_parallel.slices import Slices, lengths_of
from megapipe.pipeline_parallel.stopwatch import Stopwatch
from megapipe.plan import whole_step
from megapipe.schedule import Costs, Kind, Pass, Schedule
from megapipe.schedule.costs import UNIT
from megapipe.schedule.transforms.cuts import DOCUMENTS
from megapipe.tensor_parallel.rng import Stream
from megapipe.training.steps.routers import Routers
from megapipe.training.steps.scales import Scales
from megapipe.training.steps.totals import Adder, Totals


class Stages:
    """The stages of this rank with their data, run under one schedule.

    Args:
        modules: the stages of this rank in ascending order.
        forward_step: as Megatron's, see pipeline_parallel.stage.
        eod: end-of-document id of the tokenizer.
        also_read: stages that get batches beside those with embedding or loss.
        costs: what the stages take, by which messages are ordered.
    Attributes:
        stopwatch: of the last step of training whose passes are over.
        routers: of the layers with experts here.
        scales: of the products in eight bits here.
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
        also_read: Collection[int] = (),
        costs: Costs = UNIT,
    ) -> None:
        self.config, self.modules, self.mesh = config, modules, mesh
        self.stopwatch = Stopwatch(mesh.device)
        self._forward_step, self._eod, self._also_read = forward_step, eod, also_read
        self._add_up = Adder(mesh)
        mirrored = schedule.placement.num_chains > 1
        self.routers = Routers(modules, mesh, config.model, mirrored=mirrored)
        self.scales = Scales(modules, mesh, mirrored=mirrored)
        self._forward_backward = ForwardBackward(
            mesh,
            whole_step(schedule, config, costs),
            p2p_mode=config.parallel.p2p_mode,
            config=config.model,
            costs=costs,
        )
        self.host.share = config.parallel.activation_offload_fraction
        self.host.modules = config.parallel.offload_modules

    def capture(self, graphs: Graphs) -> None:
        """Let graphs have the passes of training."""
        self._forward_backward.graphs = graphs

    @property
    def schedule(self) -> Schedule:
        """The table of the steps to come."""
        assert isinstance(self._forward_backward.schedule, Schedule)
        return self._forward_backward.schedule

    @property
    def transport(self) -> Transport:
        """The way in which messages between stages are posted."""
        return self._forward_backward.transport

    @property
    def host(self) -> Host:
        """The rank's buffers on the host, and what it held in the last step, where the table moves activations."""
        return self._forward_backward.host

    def follow(self, schedule: Schedule, costs: Costs) -> None:
        """Take another table of the same stages from the next step on. All ranks at the same step."""
        self._forward_backward.schedule = whole_step(schedule, self.config, costs)
        self._forward_backward.costs = costs

    def under(self, config: Config, schedule: Schedule) -> Stages:
        """A copy: the same stages, on the same ranks, under the table of another batch."""
        other = copy(self)
        other._forward_backward = copy(self._forward_backward)
        other.take(config, schedule)
        return other

    def take(self, config: Config, schedule: Schedule) -> None:
        """Take the batch of another configuration, under its table, from the next step on. On all ranks at once."""
        self.config = config
        self.follow(schedule, self._forward_backward.costs)

    @property
    def moving(self) -> list[Tensor]:
        """Tensors that the training changes after a step, without a gradient: routers' biases, amaxes' histories."""
        return [*self.routers.biases, *self.scales.histories]

    def moved(self) -> list[Tensor]:
        """These tensors after this step. Collective over the ranks with these layers."""
        return [*self.routers.moved(), *self.scales.moved()]

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
        # Each step, as evaluations run between them on the same modules.
        for module in self.modules:
            module.train(not evaluate)
        self.routers.begin()
        losses = list[Loss]()
        documents = lru_cache(maxsize=64)(partial(self._documents, microbatches))
        borders = documents if config.parallel.pipeline_slice_cuts == DOCUMENTS else None
        batches = [self._batches(stage, microbatches, borders) for stage in self._own]
        with self.scales.of_a_step():
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
                documents=borders,
                read=partial(self._read, microbatches),
                stopwatch=(watch := Stopwatch(self.mesh.device, self.schedule)),
                weights=weights,
                stream=lambda i: Stream(config.train.seed, consumed + (i * dp.size + dp.rank) * b, documents(i)),
            )
        if not (evaluate or config.train.freeze_all_layers):
            self.stopwatch = watch
        self.mesh.position.enter("the sum of the losses")
        beside = None if evaluate else self.routers.table()
        finish = self._add_up.start(losses, consumed, evaluate=evaluate, beside=beside)
        self.mesh.position.leave()
        return finish

    def _documents(self, microbatches: Sequence[Microbatch], i: int) -> Documents | None:
        """Document borders, which --reset-attention-mask and --reset-position-ids need on every stage, ends or not."""
        isolate, restart = self.config.data.reset_attention_mask, self.config.data.reset_position_ids
        if not (isolate or restart):
            return None
        return find_documents(tokens_of(microbatches[i])[:, :-1], self._eod, isolate=isolate, restart=restart)

    @property
    def _own(self) -> tuple[int, ...]:
        return self.schedule.placement.stages_on(self.mesh.pp.rank)

    def _looks(self, stage: int) -> bool:
        """Return whether the stage gets batches: it has an end of the model, shares the vocabulary, or asked."""
        place = self.schedule.placement
        return place.reads(stage) or stage in self._also_read or stage in place.shares(stage)

    def _read(self, microbatches: Sequence[Microbatch], item: Pass) -> None:
        """Wait until the samples of a pass have been read."""
        data = self.config.data
        looks = data.reset_attention_mask or data.reset_position_ids or self._looks(item.stage)
        if item.kind in (Kind.F, Kind.E) and looks:
            microbatches[item.microbatch]

    def _batches(
        self,
        stage: int,
        microbatches: Sequence[Microbatch],
        borders: Callable[[int], Documents | None] | None,
    ) -> Rewinding[Batch] | None:
        """Return the stage's microbatches in its order, None where it gets none.

        Args:
            borders: the documents of a microbatch, if slices end with them.
        """
        if not self._looks(stage):
            return None
        place = self.schedule.placement
        steps = self.schedule.ranks[self.mesh.pp.rank]
        reads = Kind.E if stage in place.shares(stage) else Kind.F
        order = [self.schedule.number(p) for step in steps for p in step if p.kind is reads and p.stage == stage]
        data, cp, table = self.config.data, self.mesh.cp, self.schedule
        depth, per_token = place.depth(stage), self.config.train.calculate_per_token_loss
        ends = self._eod if self.config.model.mtp_within_documents else None
        slices = Slices(lengths_of(table, self.config.train.seq_length, self.mesh, self.config.model, borders))

        @lru_cache(maxsize=1)  # slices of a microbatch follow each other
        def whole(i: int) -> Batch:
            read = microbatches[i]
            named = {"tokens": read} if isinstance(read, Tensor) else read
            here = {name: x.to(self.mesh.device, non_blocking=True) for name, x in named.items()}
            usual = make_batch(here.pop("tokens"), self._eod, data.eod_mask_loss, data.reset_position_ids)
            return replace(usual, more=here).ahead(depth, weighs=per_token, ends=ends)

        def batch(number: int) -> Batch:
            return whole(slices.microbatch(number)).cut(Cut(cp.rank, cp.size, *slices.tokens(number)))

        return Rewinding(batch, order)


def evaluate(
    stages: Stages,
    batches_at: Callable[[int], Sequence[Microbatch]],
    consumed: int,
    iters: int,
    weights: Sequence[Weights] | None = None,
) -> dict[str, float]:
    """Means of what loss_func reports in `iters` global batches: all sums over all counts, as in Megatron-LM.

    Args:
        batches_at: samples consumed -> one batch.
        weights: as of `Stages.run`.
    """
    size = stages.config.global_batch_size
    starts = range(consumed, consumed + iters * size, size)
    totals = (stages.run(batches_at(start), start, evaluate=True, weights=weights)() for start in starts)
    return reduce(add, totals).means
