"""Run a step's forward and backward passes: make stages of modules, and execute the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

import torch

from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.attributes import Chunks, Wrap, chunks_of, config_of
from megapipe.pipeline_parallel.execute import execute
from megapipe.pipeline_parallel.families import FAMILIES
from megapipe.pipeline_parallel.families.family import OfStage, Setting, Sizes
from megapipe.pipeline_parallel.loss import Loss
from megapipe.pipeline_parallel.messages.agreed import dtype_of, size_of
from megapipe.pipeline_parallel.messages.messenger import Messenger
from megapipe.pipeline_parallel.messages.transport import P2PMode, Transport
from megapipe.pipeline_parallel.microbatches import Microbatches, Shape, ranks_of_tokens
from megapipe.pipeline_parallel.passes.begin import Ends
from megapipe.pipeline_parallel.request import Request
from megapipe.pipeline_parallel.shapes import as_run, microbatches_of, together_on
from megapipe.pipeline_parallel.stage import PipelineStage
from megapipe.schedule import (
    Costs,
    Pass,
    Placement,
    Program,
    Schedule,
    build,
    forward_only,
    verify,
)
from megapipe.schedule.dependencies import share_of_window
from megapipe.schedule.lower import lower_timed, most_in_flight
from megapipe.schedule.simulate import run_clock

SLACK = 2
"""Sends that a rank may have under way beyond the schedule's clock before it waits."""


@lru_cache(maxsize=16)
def _programs(
    schedule: Schedule, costs: Costs, evaluate: bool, hides: bool
) -> tuple[tuple[Program, ...], tuple[int, ...]]:
    """Return, each as a tuple over ranks, (programs, most sends under way at a time).

    The result is cached, and the schedule is verified once.

    Args:
        schedule: the table of a step.
        costs: the times of passes, which decide where messages are posted.
        evaluate: leave out all but the forwards and the passes that forwards need.
        hides: layers wait for collectives, so that an overlapped pair of passes runs together.
            Otherwise the two passes run one after the other.
    Raises: ScheduleError for a table that is not valid.
    """
    # Users may bring tables of their own. The cache verifies each once and not at every step.
    verify(schedule)
    schedule = as_run(schedule, hides=hides)
    if evaluate:
        schedule = forward_only(schedule)
    clock = run_clock(schedule, costs)
    return lower_timed(schedule, clock), most_in_flight(schedule, clock)


# Functions of values alone, asked at each step.
_built = lru_cache(maxsize=16)(build)
_kept = lru_cache(maxsize=16)(share_of_window)


@dataclass(eq=False)
class ForwardBackward:
    """A callable that runs the forward and backward passes of one rank's steps, one step a call.

    `table` returns the schedule for a number of microbatches.

    Args:
        mesh: this rank's mesh.
        schedule: a table, or a name or file for `schedule.build`.
        chunks: stages on each rank, if the schedule is a name; None for the schedule's default.
        p2p_mode: how messages are posted: "plain" (one by one), "batched" or "ring".
        config: has hidden_size and sequence_parallel, and may have
            num_microbatches_with_partial_activation_checkpoints, variable_seq_lengths, and
            pipeline_dtype, the type of messages. None for the model's own `.config`, which
            Megatron-LM's models have.
        variable_seq_lengths: microbatches differ in length, so each message's shape is sent first.
        options: further keywords of `schedule.build`, if the schedule is a name.
    Attributes:
        transport: posts the messages of all steps.
        kept: {name of a family of passes: its state that lasts from step to step}.
        wrap: takes the stages of a training step and its table, and returns the stages to run, such
            as ones with CUDA graphs. None to run the stages themselves.
    """

    mesh: ProcessMesh
    schedule: Schedule | str
    _: KW_ONLY
    chunks: int | None = None
    p2p_mode: str = P2PMode.PLAIN
    config: Any = None
    variable_seq_lengths: bool = False
    options: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # All of these last from step to step.
        self.transport = Transport(self.mesh.pp, self.p2p_mode)
        self._dtype: torch.dtype | None = None
        self._together = together_on(self.mesh.device)
        self._opened: set[Placement] = set()
        self.kept = {family.name: family.keeps(self.mesh.pp.device) for family in FAMILIES}
        self.wrap: Wrap | None = None

    def __call__(self, **given: Any) -> list[dict[str, Any]]:
        """Run every microbatch through this rank's stages.

        given: the fields of `request.Request`, as keywords.
        Returns: loss_func's dict of every microbatch in order, on ranks with a loss; else []. Where
            no loss is computed, the outputs or other data, see `PipelineStage.results`.
        Raises: ConfigError for a schedule, model or configuration that does not fit the rest.
            ScheduleError for a schedule that is not valid.
        """
        step = Request(**given)
        rank = self.mesh.pp.rank
        table = step.schedule or self.table(step.num_microbatches)
        chunks = chunks_of(table, rank, step.model, step.data_iterator)
        if self.wrap is not None and not step.forward_only:
            chunks = self.wrap(chunks, table)
        modules = [module for module, _ in chunks.values()]
        config = config_of(modules[0]) if self.config is None else self.config
        if self._dtype is None:
            # Collective, and the same for every step of a run.
            stated = getattr(config, "pipeline_dtype", None)
            self._dtype = dtype_of(modules, self.mesh.pp, stated)
        variable = any(getattr(of, "variable_seq_lengths", False) for of in (self, step, config))
        length = None if variable else step.decoder_seq_length or step.seq_length
        microbatches = microbatches_of(table, length, self.mesh, config, step.documents)
        stages = self._stages(step, table, chunks, config, microbatches)
        programs, in_flight = _programs(table, step.costs, step.forward_only, self.mesh.hides)
        # The clock's number of sends and a few more: a rank that runs ahead waits before it holds
        # the memory of more.
        limit = in_flight[rank] + SLACK
        comm = self._messenger(step, config, table.placement, limit, microbatches(), variable)
        # Steps may be of several placements, and each opens its links once.
        if table.placement not in self._opened:
            comm.open_links(table.placement)
            self._opened.add(table.placement)
        with torch.set_grad_enabled(not step.forward_only):
            execute(
                programs[rank],
                table.placement,
                stages,
                comm,
                on_stage_done=step.on_stage_done,
                read=step.read,
                position=self.mesh.position,
                watch=step.stopwatch,
                together=self._together,
            )
        return _reported(stages.values(), step.on_loss)

    def _stages(
        self,
        step: Request,
        table: Schedule,
        chunks: Chunks,
        config: Any,
        microbatches: Callable[[], Microbatches],
    ) -> dict[int, PipelineStage]:
        """Return {stage: the object that runs it} for this rank's stages in one step.

        Args:
            step: the arguments of the step.
            table: the schedule of the step.
            chunks: {stage: (module, data iterator)}.
            config: the model's configuration.
            microbatches: returns a new `Microbatches`, such as the lengths of slices; each stage
                gets its own.
        """
        window = getattr(config, "num_microbatches_with_partial_activation_checkpoints", None)
        kept = _kept(table, window or 0)
        of_stages: dict[int, dict[str, OfStage]] = {number: {} for number in chunks}
        for family in FAMILIES:
            setting = Setting(table, chunks, step, self.kept[family.name])
            for number, of_stage in family.stages(setting).items():
                of_stages[number][family.name] = of_stage
        stages = {}
        for n, (number, (module, data)) in enumerate(chunks.items()):
            ends = ends_of(table.placement, number, config)
            # A family may read the batches too, or join the inputs of the stage in its own way.
            for of_stage in of_stages[number].values():
                data = of_stage.data(data)
                ends = of_stage.ends(ends)
            weights = None
            if step.weights:
                weights = step.weights[n]
            stages[number] = PipelineStage(
                step,
                module,
                data,
                number=number,
                mesh=self.mesh,
                ends=ends,
                last=table.last.get(number),
                kept=kept[number],
                microbatches=microbatches(),
                weights=weights,
                own=of_stages[number],
            )
        return stages

    def _messenger(
        self,
        step: Request,
        config: Any,
        place: Placement,
        in_flight: int,
        microbatches: Microbatches,
        variable: bool,
    ) -> Messenger:
        """Return the object that sends and receives the step's messages.

        Args:
            step: the arguments of the step.
            config: the model's configuration.
            place: the rank of each stage.
            in_flight: number of sends that may be under way before the oldest is waited for.
            microbatches: the microbatches or their slices, which give the shapes of messages.
            variable: whether microbatches differ in length.
        """
        assert self._dtype is not None
        length, batch, hidden = 0, 0, 0
        # One pipeline rank sends nothing, so it need not know the size of a message.
        if self.mesh.pp.size > 1:
            given = step.decoder_seq_length or step.seq_length
            length, batch, hidden = size_of(given, step.micro_batch_size, config)
        ranks = ranks_of_tokens(self.mesh, config)
        here = length // ranks
        shape = (here, batch, hidden)
        whole = (here * ranks, batch, hidden)
        context = self.mesh.cp.size
        sizes = Sizes(place, whole, here, self._dtype, step.forward_only, variable, context)
        shapes: list[Callable[[Pass], Shape | None]] = [partial(microbatches.shape, shape)]
        # The first that knows a message decides. Messages that none knows are hidden states of
        # whole microbatches.
        for family in FAMILIES:
            shape_of = family.shapes(sizes)
            if shape_of is not None:
                shapes.append(shape_of)

        def shape_of_message(made_by: Pass) -> Shape | None:
            for shape_of in shapes:
                found = shape_of(made_by)
                if found is not None:
                    return found
            return None

        return Messenger(
            self.mesh.pp,
            shape,
            self._dtype,
            transport=self.transport,
            shape_of=shape_of_message,
            beyond_neighbours=place.vocabulary,
            variable_seq_lengths=variable,
            sends_in_flight=in_flight,
        )

    def table(self, num_microbatches: int) -> Schedule:
        """Return the schedule of a step with this number of microbatches.

        Raises: ConfigError if it is a table for other numbers of ranks or microbatches.
            ScheduleError if it is a name that has no table for these numbers.
        """
        ranks = self.mesh.pp.size
        table = self.schedule
        # A name makes a table for any number of microbatches, so a batch may grow.
        if isinstance(table, str):
            return _built(table, ranks, num_microbatches, chunks=self.chunks, **self.options)
        if (table.num_microbatches, len(table.ranks)) != (num_microbatches, ranks):
            raise ConfigError(
                f"the schedule {table.name} is a table of {len(table.ranks)} ranks and "
                f"{table.num_microbatches} microbatches, and the step has {ranks} pipeline ranks "
                f"and num_microbatches {num_microbatches}. Build the table for these, or give "
                "get_forward_backward_func the schedule's name."
            )
        return table


def ends_of(place: Placement, stage: int, config: Any) -> Ends:
    """Return whether a stage ends in a loss, how the loss counts, and whether a stage follows.

    `config.depth_weight` is the factor on the loss of a module of multi-token prediction.
    """
    depth = place.depth(stage)
    # Megatron-LM's mtp_loss_scaling_factor, divided by the number of depths.
    counts = 1.0
    if depth:
        counts = config.depth_weight
    return Ends(
        holds_loss=place.is_last(stage) or depth > 0,
        goes_on=place.next(stage) is not None,
        depth=depth,
        counts=counts,
    )


def _reported(
    stages: Iterable[PipelineStage], on_loss: Callable[[Loss], None] | None
) -> list[dict[str, Any]]:
    """Return loss_func's dict for each microbatch whose loss is on this rank, in order.

    Stages that computed no loss give their `results` in place of it.

    on_loss: called with the loss of each microbatch in order; None to call nothing.
    """
    losses: list[tuple[int, Loss]] = []
    results: dict[int, Any] = {}
    for stage in stages:
        stage.finish()
        losses += stage.microbatches.losses_of(stage.losses)
        results |= stage.results
    # Sorted, because `on_loss` adds losses up, and sums of floats depend on their order.
    for microbatch, loss in sorted(losses, key=itemgetter(0)):
        if on_loss is not None:
            on_loss(loss)
        results[microbatch] = results.get(microbatch, {}) | loss.reported
    return [results[microbatch] for microbatch in sorted(results)]
