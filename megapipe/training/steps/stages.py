"""All passes of a step on this rank's stages, in training and in evaluation, the same under every schedule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import copy
from functools import lru_cache, partial

from torch import Tensor, nn

from megapipe.config import Config
from megapipe.data.loader import Microbatch
from megapipe.distributed.late import Late
from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.engine import ForwardBackward
from megapipe.pipeline_parallel.loss import ForwardStep, Loss
from megapipe.pipeline_parallel.passes.begin import Weights
from megapipe.pipeline_parallel.stopwatch import Stopwatch
from megapipe.plan import whole_step
from megapipe.schedule import Costs, Schedule
from megapipe.schedule.costs import UNIT
from megapipe.tensor_parallel.rng import Stream
from megapipe.training.steps.batches import StepReading, documents_of
from megapipe.training.steps.routers import Routers
from megapipe.training.steps.scales import Scales
from megapipe.training.steps.totals import Adder, Totals


class Stages:
    """The stages of this rank with their data, run under one schedule.

    Args:
        modules: the stages of this rank in ascending order.
        forward_step: as Megatron's, see pipeline_parallel.loss.
        eod: end-of-document id of the tokenizer.
        also_read: stages that get batches in addition to those with embedding or loss.
        costs: what the stages take, by which messages are ordered.
    Attributes:
        engine: runs their passes.
        schedule: the table of the steps to come.
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
        self.follow(schedule, costs)
        mode = config.parallel.p2p_mode
        self.engine = ForwardBackward(mesh, self.schedule, p2p_mode=mode, config=config.model)
        host = self.engine.kept["offload"]
        host.share, host.modules = config.parallel.activation_offload_fraction, config.parallel.offload_modules

    def follow(self, schedule: Schedule, costs: Costs) -> None:
        """Take another table of the same stages from the next step on. All ranks at the same step."""
        self.schedule, self.costs = whole_step(schedule, self.config, costs), costs

    def under(self, config: Config, schedule: Schedule) -> Stages:
        """Return the same stages, on the same ranks, under the table of another batch."""
        other = copy(self)
        other.take(config, schedule)
        return other

    def take(self, config: Config, schedule: Schedule) -> None:
        """Take the batch of another configuration, under its table, from the next step on. On all ranks at once."""
        self.config = config
        self.follow(schedule, self.costs)

    def moved(self) -> list[tuple[Tensor, Tensor]]:
        """Return tensors that the training changes without a gradient, each with its value after this step: routers'
        biases, histories of largest values. Collective over the ranks with these layers."""
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
        config, mesh, table, dp = self.config, self.mesh, self.schedule, self.mesh.dp
        b = config.batch.micro_batch
        what = "evaluation" if evaluate else "iteration"
        mesh.position.begin(f"{what} {iteration or consumed // config.global_batch_size + 1}")
        # Each step, as evaluations run between them on the same modules.
        for module in self.modules:
            module.train(not evaluate)
        self.routers.begin()
        losses = list[Loss]()
        documents = lru_cache(maxsize=64)(partial(documents_of, config, self._eod, microbatches))
        reading = StepReading(config, table, mesh, self._eod, self._also_read, microbatches, documents)
        watch = Stopwatch(mesh.device, table)
        with self.scales.of_a_step():
            self.engine(
                forward_step_func=self._forward_step,
                data_iterator=[reading.batches(stage) for stage in table.placement.stages_on(mesh.pp.rank)],
                model=self.modules,
                num_microbatches=table.num_microbatches,
                seq_length=config.batch.sequence,
                micro_batch_size=b,
                schedule=table,
                costs=self.costs,
                forward_only=evaluate or config.optimizer.freeze_all_layers,
                calculate_per_token_loss=config.batch.calculate_per_token_loss,
                loss_scale=loss_scale,
                on_loss=losses.append,
                documents=reading.borders,
                read=reading.wait,
                stopwatch=watch,
                weights=weights,
                stream=lambda i: Stream(config.batch.seed, consumed + (i * dp.size + dp.rank) * b, documents(i)),
            )
        if not (evaluate or config.optimizer.freeze_all_layers):
            self.stopwatch = watch
        mesh.position.enter("the sum of the losses")
        beside = None if evaluate else self.routers.table()
        finish = self._add_up.start(losses, consumed, evaluate=evaluate, beside=beside)
        mesh.position.leave()
        return finish
