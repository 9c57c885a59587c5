"""Give Megatron-LM's `get_forward_backward_func` and its step's keywords, over the one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megapipe.distributed.mesh import ProcessMesh
from megapipe.distributed.process_groups import ProcessGroupCollection
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.attributes import config_of
from megapipe.pipeline_parallel.contracts.grad_sync import GradSync, check_config
from megapipe.pipeline_parallel.contracts.p2p import P2PCommunicator, mesh_of
from megapipe.pipeline_parallel.engine import ForwardBackward
from megapipe.pipeline_parallel.loss import ForwardStep, Loss
from megapipe.pipeline_parallel.messages.agreed import size_of
from megapipe.pipeline_parallel.messages.transport import P2PMode
from megapipe.schedule import Schedule
from megapipe.schedule.catalogue import entry_of, is_file, usual
from megapipe.schedule.patterns import GROUP_SIZE, Entry
from megapipe.tensor_parallel.rng import MicrobatchContext

AdjustShapes = Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]


def get_forward_backward_func(
    pp_size: int | None = None,
    vp_size: int | None = None,
    schedule_pg_collection: Any = None,
    *,
    mesh: ProcessMesh | None = None,
    schedule: Schedule | str | None = None,
    p2p_mode: str | None = None,
    config: Any = None,
    variable_seq_lengths: bool = False,
) -> ForwardBackwardFunc:
    """Return the function that runs one step's forward and backward passes.

    Args:
        pp_size, vp_size: number of pipeline ranks, and of model chunks per rank, as in Megatron. By
            default, the mesh's pipeline size and the number of modules that a step is given.
        schedule_pg_collection: Megatron's process groups for modules on several grids. Such modules
            are not implemented: the argument must be None.
        mesh: this rank's mesh; by default the one that ProcessMesh.create made.
        schedule: a table, or a name or file for `schedule.build`. The default is 1f1b, and
            interleaved with several chunks.
        p2p_mode: how messages are posted: "plain" (one by one, the default), "batched" or "ring".
        config: a Megatron config in place of the model's own.
        variable_seq_lengths: microbatches differ in length, so each message's shape is sent first.
    Raises: ConfigError for schedule_pg_collection, and if pp_size is not the mesh's. Without `mesh`
    the first step raises the latter.
    """
    if schedule_pg_collection is not None:
        raise ConfigError(
            "get_forward_backward_func: schedule_pg_collection (modules on several grids) "
            "is not implemented"
        )
    step = ForwardBackwardFunc(
        mesh, schedule, pp_size, vp_size, p2p_mode, config, variable_seq_lengths
    )
    if mesh is not None:
        step.check_size(mesh)
    return step


_ENGINES = 8
"""Most engines that a mesh keeps: for training and evaluation of some models."""


class _Engine(NamedTuple):
    """An engine and the arguments of the step that it was made for.

    Later steps use it if their `values`, such as pp_size, are equal, and their `objects`, such as
    the config, are the same objects.
    """

    values: tuple[Any, ...]
    objects: tuple[Any, ...]
    engine: ForwardBackward


@dataclass(eq=False)
class ForwardBackwardFunc:
    """A function that runs one rank's step, called as Megatron calls its forward_backward_func.

    The fields are the arguments of `get_forward_backward_func`. Keywords that are not described
    here have the meaning of the fields of request.Request.

    Keywords:
        first_val_step: whether this is the first step of an evaluation; None counts as True. In
            such a step, and in each training step, set_is_first_microbatch is called on chunks that
            have it, so that Transformer Engine converts its weights.
        seq_length, micro_batch_size: the size of messages. One pipeline rank has no messages and
            takes None. With several chunks decoder_seq_length is not read, as in Megatron's
            interleaving.
        adjust_tensor_shapes_fn: allows messages of any shape. Each message's shape is sent before
            it. The shapes that the function returns are not used, but must have three dimensions.
        p2p_communicator, pg_collection: transport and groups in place of the mesh's. Give both or
            neither. One pipeline rank may give one of them.
        consumed_microbatches: number of microbatches that this rank has trained on before. This
            number seeds our layers' random numbers. By default this mesh's are counted. Give it
            after a resume, when that count begins at 0.
        force_all_reduce: passed on to config.finalize_model_grads_func, if it takes it. So is
            pg_collection (the mesh's groups if None).
        stream, loss_scale, calculate_per_token_loss: fields of request.Request that Megatron does
            not have. The last two default to config.grad_scale_func and
            config.calculate_per_token_loss.
    Returns: loss_func's dict of every microbatch in order, on ranks whose stages hold the loss;
        else []. Without loss_func, which only forward_only allows, the outputs.
    Raises: ConfigError for arguments that do not fit, and for settings of a Megatron config that
    are not implemented.
    """

    mesh: ProcessMesh | None
    schedule: Schedule | str | None
    pp_size: int | None
    vp_size: int | None
    p2p_mode: str | None
    config: Any
    variable_seq_lengths: bool
    _alone: dict[str, Any] = field(default_factory=dict, init=False)

    def __call__(
        self,
        *,
        forward_step_func: ForwardStep,
        data_iterator: Any,
        model: nn.Module | Sequence[nn.Module],
        num_microbatches: int,
        seq_length: int | None,
        micro_batch_size: int | None,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: AdjustShapes | None = None,
        p2p_communicator: P2PCommunicator | None = None,
        pg_collection: Any = None,
        force_all_reduce: bool = False,
        consumed_microbatches: int | None = None,
        **ours: Any,
    ) -> list[dict[str, Any]]:
        """Run every microbatch through this rank's stages; see the class."""
        modules = list(model) if isinstance(model, Sequence) else [model]
        config = config_of(modules[0]) if self.config is None else self.config
        # 1. The engine, and everything that a Megatron config asks for. All problems come up before
        # the first message.
        engine = self._engine_for(len(modules), config, p2p_communicator, pg_collection)
        mesh = engine.mesh
        stages = engine.table(num_microbatches).placement.stages_on(mesh.pp.rank)
        sync = GradSync(config, dict(zip(stages, modules, strict=False)))
        check_config(config, mesh)
        if adjust_tensor_shapes_fn is not None and mesh.pp.size > 1:
            shape = size_of(seq_length, micro_batch_size, config)
            _check_shapes(adjust_tensor_shapes_fn, shape)
        # 2. Modules that count steps are prepared.
        if first_val_step is None or not forward_only or first_val_step:
            _mark_first_microbatch(modules)
        _forget_last_step(modules)
        # 3. Settings of the engine. The caller's own come last and win. Megatron's
        # DistributedDataParallel averages gradients over context parallelism, so losses are made
        # for an average.
        losses: list[Loss] = []
        settings = {"on_loss": losses.append, "averaged_over_cp": True} | _settings_of(config)
        # An evaluation leaves the training's randomness where it is.
        trained = 0 if forward_only else num_microbatches
        settings |= self._stream(trained, consumed_microbatches, mesh)
        if not forward_only:
            settings |= {
                "around_last_backward": sync.around_last_backward,
                "on_stage_done": sync.on_stage_done,
            }
        settings |= ours
        # Megatron's interleaved schedule reads seq_length alone.
        if len(modules) > 1:
            decoder_seq_length = None
        # 4. The passes. Gradients are synchronised in each stage's last backward alone.
        with _timed(config), sync.off(not forward_only):
            results = engine(
                forward_step_func=forward_step_func,
                data_iterator=data_iterator,
                model=model,
                num_microbatches=num_microbatches,
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
                decoder_seq_length=decoder_seq_length,
                forward_only=forward_only,
                collect_non_loss_data=collect_non_loss_data,
                variable_seq_lengths=adjust_tensor_shapes_fn is not None,
                **settings,
            )
        # 5. The end of a training step. Losses that are not divided by their tokens are divided
        # there, by the tokens of the whole batch.
        if not forward_only:
            tokens = None
            if settings.get("calculate_per_token_loss"):
                tokens = _tokens(losses, mesh)
            groups = pg_collection or ProcessGroupCollection.of(mesh)
            sync.finalize(tokens, groups, force_all_reduce)
        return results

    def check_size(self, mesh: ProcessMesh) -> None:
        """Raise ConfigError if pp_size is given and is not the mesh's number of pipeline ranks."""
        if self.pp_size not in (None, mesh.pp.size):
            raise ConfigError(
                f"get_forward_backward_func: pp_size is {self.pp_size}, and the mesh has "
                f"{mesh.pp.size} pipeline ranks. Leave pp_size out, or make the mesh with "
                "--pipeline-model-parallel-size of that size."
            )

    @property
    def _kept(self) -> dict[str, Any]:
        """Return the dict of state kept from step to step: engines, count of microbatches.

        The mesh, if there is one, holds it: Megatron's callers ask for a new function in each step.
        """
        mesh = self.mesh or ProcessMesh.current()
        return self._alone if mesh is None else mesh.kept

    def _engine_for(
        self, chunks: int, config: Any, p2p_communicator: Any, pg_collection: Any
    ) -> ForwardBackward:
        """Return the engine of an earlier step with the same arguments, or a new one.

        `chunks` is the number of modules of this rank. `p2p_communicator` and `pg_collection`
        replace the mesh if they are not None.
        """
        group_size = getattr(config, "microbatch_group_size_per_vp_stage", None)
        # To make an engine is collective, as ranks agree on their messages. So nothing may count
        # here that one rank changes alone, such as the chunk that parallel_state's callers are at.
        values = (
            self.pp_size,
            self.vp_size,
            self.p2p_mode,
            self.variable_seq_lengths,
            chunks,
            group_size,
        )
        objects = (self.schedule, self.config, p2p_communicator, pg_collection)
        engines: list[_Engine] = self._kept.setdefault("engines", [])
        for known in engines:
            same = all(a is b for a, b in zip(known.objects, objects, strict=True))
            if same and known.values == values:
                return known.engine
        mesh = self.mesh or ProcessMesh.current()
        made = self._made(mesh, p2p_communicator, pg_collection, chunks, group_size)
        # The oldest goes first: a caller that makes new configs in each step must not fill the
        # memory.
        engines[:] = [*engines[-_ENGINES + 1 :], _Engine(values, objects, made)]
        return made

    def _made(
        self,
        mesh: ProcessMesh | None,
        p2p: Any,
        pg_collection: Any,
        chunks: int,
        group_size: int | None,
    ) -> ForwardBackward:
        """Return a new engine. `p2p` and `pg_collection` replace the mesh if they are not None.

        `group_size` is config.microbatch_group_size_per_vp_stage, `chunks` the number of modules of
        this rank.
        """
        if pg_collection is not None:
            mesh = mesh_of(pg_collection, getattr(p2p, "pp", None))
        mesh = mesh or ProcessMesh.required()
        self.check_size(mesh)
        if (p2p is None) != (pg_collection is None) and mesh.pp.size > 1:
            raise ConfigError("give both p2p_communicator and pg_collection, or neither")
        mode = self.p2p_mode
        variable = self.variable_seq_lengths
        if p2p is not None:
            if not isinstance(p2p, P2PCommunicator):
                raise ConfigError(
                    f"p2p_communicator is a {type(p2p).__name__}, not P2PCommunicator of "
                    "megapipe.pipeline_parallel.contracts.p2p"
                )
            mode = mode or p2p.transport.mode
            variable = variable or p2p.variable_seq_lengths
        table = self.schedule or usual(self.vp_size or chunks)
        options = _group_size(table, group_size, chunks, mesh.pp.size)
        # Schedules such as interleaved leave the number of chunks to the user. Others fix it.
        entry = _entry(table)
        given = chunks if entry and entry.any_chunks else None
        return ForwardBackward(
            mesh,
            table,
            chunks=self.vp_size or given,
            p2p_mode=mode or P2PMode.PLAIN,
            config=self.config,
            variable_seq_lengths=variable,
            options=options,
        )

    def _stream(self, trained: int, consumed: int | None, mesh: ProcessMesh) -> dict[str, Any]:
        """Return {"stream": a function from a microbatch to its context with random streams}.

        The context differs for each microbatch, step and data-parallel rank.

        Args:
            trained: number of microbatches of this step; 0 in an evaluation.
            consumed: number of microbatches before this step; None for this mesh's own count.
        """
        kept = self._kept
        first = kept.get("microbatches", 0) if consumed is None else consumed
        if trained:
            kept["microbatches"] = first + trained
        dp = mesh.dp
        sample = first * dp.size + dp.rank
        return {"stream": lambda microbatch: MicrobatchContext(0, sample + microbatch * dp.size)}


def _entry(table: Schedule | str) -> Entry | None:
    """Return the properties of a schedule that is given by name; None for a table or a file."""
    return None if isinstance(table, Schedule) or is_file(table) else entry_of(table)


def _group_size(table: Schedule | str, size: int | None, chunks: int, ranks: int) -> dict[str, int]:
    """Return config.microbatch_group_size_per_vp_stage as keywords for `schedule.build`.

    The result is {} with one chunk, and if `size`, the value, is None or `ranks`, the default.

    Raises: ConfigError for a schedule that does not run microbatches in groups, where the value
    would do nothing.
    """
    # The number of pipeline ranks is Megatron's default.
    if size in (None, ranks) or chunks == 1:
        return {}
    entry = _entry(table)
    if entry is None or not entry.grouped:
        name = table if isinstance(table, str) else table.name
        raise ConfigError(
            f"config.{GROUP_SIZE} is {size}, and the schedule {name} has no groups of "
            "microbatches. Leave it out, or take the schedule interleaved, interleaved-zb or "
            "group-interleaved by its name."
        )
    return {GROUP_SIZE: size}


def _settings_of(config: Any) -> dict[str, Any]:
    """Return {keyword of the engine: value} for calculate_per_token_loss and loss_scale, if set."""
    # Absent and None say nothing, so that the engine's own defaults hold.
    settings: dict[str, Any] = {}
    per_token = getattr(config, "calculate_per_token_loss", None)
    if per_token is not None:
        settings["calculate_per_token_loss"] = per_token
    scale = getattr(config, "grad_scale_func", None)
    if scale is not None:
        settings["loss_scale"] = lambda: float(scale(torch.ones(())))
    return settings


def _mark_first_microbatch(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        if hasattr(module, "set_is_first_microbatch"):
            module.set_is_first_microbatch()  # type: ignore[operator]


def _forget_last_step(modules: Sequence[nn.Module]) -> None:
    """Call `forget` of each submodule: experts' routers drop their records of the last step."""
    for module in modules:
        for part in module.modules():
            forget = getattr(part, "forget", None)
            if callable(forget):
                forget()


def _check_shapes(adjust: AdjustShapes, shape: tuple[int, ...]) -> None:
    for shapes in adjust([shape], [shape]):
        if len(shapes) != 1 or len(shapes[0]) != len(shape):
            raise ConfigError(
                "adjust_tensor_shapes_fn: a message is one tensor of 3 dimensions, got shapes "
                f"{shapes}"
            )


def _tokens(losses: Sequence[Loss], mesh: ProcessMesh) -> Tensor:
    """Return the number of tokens, a tensor [], of all microbatches whose loss is on this rank."""
    counts = [loss.tokens for loss in losses if loss.tokens is not None]
    if not counts:
        return torch.zeros((), dtype=torch.int, device=mesh.device)
    return torch.stack(counts).sum().int()


@contextmanager
def _timed(config: Any) -> Iterator[None]:
    """Run the timer `forward-backward` of config.timers, if there is one, around a step."""
    timers = getattr(config, "timers", None)
    if timers is not None:
        barrier = getattr(config, "barrier_with_L1_time", False)
        timers("forward-backward", log_level=1).start(barrier=barrier)
    yield
    if timers is not None:
        timers("forward-backward").stop()
