"""Run all passes of a step on this rank's stages, in training and in evaluation.

The same code runs under every schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import replace
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
from megapipe.tensor_parallel.rng import MicrobatchContext
from megapipe.training.steps.batches import StepReading, documents_of
from megapipe.training.steps.routers import Routers
from megapipe.training.steps.scales import Scales
from megapipe.training.steps.totals import Adder, Totals


class Stages:
    """The stages of this rank with their data, run under one schedule.

    `run` runs a step. `follow` changes the schedule and `take` the batch size for later steps.
    `under` returns the same stages for another batch size. `buffer_updates` returns tensors that
    change without a gradient.

    Args:
        config: the run's configuration.
        schedule: the table of passes.
        modules: the stages of this rank in ascending order.
        forward_step: Megatron's (data_iterator, model) -> (output, loss_func).
        mesh: this rank's mesh.
        eod: end-of-document id of the tokenizer.
        also_read: stages that get batches in addition to those with embedding or loss.
        costs: times of passes and messages, which decide the order in which messages are posted.

    Attributes:
        engine: runs the passes.
        schedule: the table of the next steps, with the passes for reduction and update that flags
            ask for.
        stopwatch: times of the last training step whose passes are over.
        also_read: stages that get batches in addition to those with embedding or loss.
        routers: the routers of this rank's layers with experts.
        scales: the FP8 scales of this rank's layers.
        copy: takes the index of a stage of this rank, begins to copy its state to a peer, and
            returns a function that waits. None where nothing is copied.
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
        self.config = config
        self.modules = modules
        self.mesh = mesh
        self.stopwatch = Stopwatch(mesh.device)
        self._forward_step = forward_step
        self._eod = eod
        self.also_read = also_read
        self._adder = Adder(mesh)
        self.copy: Callable[[int], Callable[[], None]] | None = None
        mirrored = schedule.placement.num_chains > 1
        self.routers = Routers(modules, mesh, config.model, mirrored=mirrored)
        self.scales = Scales(modules, mesh, mirrored=mirrored)
        self.follow(schedule, costs)
        parallel = config.parallel
        self.engine = ForwardBackward(
            mesh, self.schedule, p2p_mode=parallel.p2p_mode, config=config.model
        )
        host = self.engine.kept["offload"]
        host.share = parallel.activation_offload_fraction
        host.modules = parallel.offload_modules

    def follow(self, schedule: Schedule, costs: Costs) -> None:
        """Use another table of the same stages from the next step on.

        All ranks must call this before the same step.

        costs: times of passes and messages, which decide the order in which messages are posted.
        """
        self.schedule = whole_step(schedule, self.config, costs)
        self.costs = costs

    def under(self, config: Config, schedule: Schedule) -> Stages:
        """Return the same stages on the same ranks, for another batch size and its schedule."""
        # Shallow: modules, engine and routers are shared.
        other = copy(self)
        other.take(config, schedule)
        return other

    def take(self, config: Config, schedule: Schedule) -> None:
        """Use another batch size and its schedule from the next step on.

        All ranks must call this before the same step.
        """
        self.config = config
        self.follow(schedule, self.costs)

    def buffer_updates(self) -> list[tuple[Tensor, Tensor]]:
        """Return (tensor, its value after this step) of tensors that change without a gradient.

        Such tensors are the expert biases of routers and the amax histories of FP8. Collective over
        the ranks with these layers.
        """
        return [*self.routers.buffer_updates(), *self.scales.buffer_updates()]

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
        """Run all passes of one step, and return the sums of all ranks' losses, still under way.

        Args:
            microbatches: of this data-parallel rank; an item is read only if a stage needs it.
            consumed: number of samples before this step, which seeds its random numbers.
            evaluate: run forwards alone, without dropout.
            loss_scale: returns the factor on the loss when a backward needs it.
            weights: for each stage of this rank, the functions of passes that act on its weights,
                such as the update. None if the table has no such pass.
            iteration: the iteration's number in diagnoses; None computes it from `consumed`.
        """
        config = self.config
        mesh = self.mesh
        table = self.schedule
        dp = mesh.dp
        b = config.batch.micro_batch
        kind = "evaluation" if evaluate else "iteration"
        number = iteration or consumed // config.global_batch_size + 1
        # The watchdog names this place for a rank that hangs.
        mesh.position.begin(f"{kind} {number}")
        # In every step, because evaluations use the same modules between training steps.
        for module in self.modules:
            module.train(not evaluate)
        self.routers.begin()
        losses: list[Loss] = []
        # All stages of the rank, and all slices, ask for the same documents.
        documents = lru_cache(maxsize=64)(partial(documents_of, config, self._eod, microbatches))
        reading = StepReading(
            config, table, mesh, self._eod, self.also_read, microbatches, documents
        )
        own = table.placement.stages_on(mesh.pp.rank)
        watch = Stopwatch(mesh.device, table)
        forward_only = evaluate or config.optimizer.freeze_all_layers

        def stream(i: int) -> MicrobatchContext:
            # Named by its first sample, a microbatch has one stream under every layout of ranks.
            first = consumed + (i * dp.size + dp.rank) * b
            return MicrobatchContext(config.batch.seed, first, documents(i))

        with self.scales.during_step():
            self.engine(
                forward_step_func=self._forward_step,
                data_iterator=[reading.batches(stage) for stage in own],
                model=self.modules,
                num_microbatches=table.num_microbatches,
                seq_length=config.batch.sequence,
                micro_batch_size=b,
                schedule=table,
                costs=self.costs,
                forward_only=forward_only,
                calculate_per_token_loss=config.batch.calculate_per_token_loss,
                loss_scale=loss_scale,
                on_loss=losses.append,
                documents=reading.borders,
                read=reading.wait,
                stopwatch=watch,
                weights=self._copied(weights),
                stream=stream,
            )
        # Costs are measured in training steps alone.
        if not forward_only:
            self.stopwatch = watch
        # A rank that hangs in the sum is reported with this place.
        mesh.position.enter("the sum of the losses")
        extra = None if evaluate else self.routers.table()
        finish = self._adder.start(losses, consumed, evaluate=evaluate, extra=extra)
        mesh.position.leave()
        return finish

    def _copied(self, weights: Sequence[Weights] | None) -> Sequence[Weights] | None:
        """Return `weights` of `run`, with a function that copies each stage's state."""
        if self.copy is None or weights is None:
            return weights
        return [replace(own, copy=partial(self.copy, n)) for n, own in enumerate(weights)]
