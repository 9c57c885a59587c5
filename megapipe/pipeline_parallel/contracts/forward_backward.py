"""`get_forward_backward_func`: Megatron-LM's way to ask for a schedule and its step's keywords, over the one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megapipe.distributed.axis import ALONE, Axis
from megapipe.distributed.mesh import ProcessMesh
from megapipe.distributed.process_groups import ProcessGroupCollection
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.attributes import config_of
from megapipe.pipeline_parallel.contracts.grad_sync import GradSync, check_config
from megapipe.pipeline_parallel.contracts.p2p import P2PCommunicator, axis_of
from megapipe.pipeline_parallel.engine import ForwardBackward
from megapipe.pipeline_parallel.loss import ForwardStep, Loss
from megapipe.pipeline_parallel.messages.agreed import size_of
from megapipe.pipeline_parallel.messages.transport import P2PMode
from megapipe.schedule import Schedule
from megapipe.schedule.catalogue import entry_of, is_file, usual
from megapipe.schedule.patterns import GROUP_SIZE, Entry
from megapipe.tensor_parallel.rng import Stream

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
) -> Step:
    """The function that runs one step's forward and backward passes.

    Args:
        pp_size, vp_size: as Megatron's; default to the mesh's pipeline size and to the number of model chunks.
        schedule_pg_collection: Megatron's several modules on grids of their own; refused.
        mesh: who this rank is; default the one that ProcessMesh.create made.
        schedule: a table, or what `schedule.build` takes; default 1f1b, interleaved with several chunks.
        p2p_mode, config, variable_seq_lengths: as in engine.ForwardBackward.
    Raises: ConfigError if pp_size is not the mesh's, here or at the first step.
    """
    if schedule_pg_collection is not None:
        raise ConfigError(
            "get_forward_backward_func: schedule_pg_collection (modules on several grids) is not implemented"
        )
    step = Step(mesh, schedule, pp_size, vp_size, p2p_mode, config, variable_seq_lengths)
    if mesh is not None:
        step.check_size(mesh)
    return step


_ENGINES = 8
"""Engines that a mesh keeps: for training and evaluation of some models."""


class _Engine(NamedTuple):
    """An engine, and what it was made for: values that must be equal, objects that must be the same."""

    values: tuple[Any, ...]
    objects: tuple[Any, ...]
    engine: ForwardBackward


@dataclass(eq=False)
class Step:
    """One rank's step, called as Megatron's train_step and evaluate call theirs. What is not named here is as in
    request.Request.

    Keywords:
        first_val_step: is it the first of an evaluation? Then, and in training, a chunk that has
            set_is_first_microbatch is told (Transformer Engine converts its weights then).
        seq_length, micro_batch_size: the size of messages; one pipeline rank has none and takes None. With several
            chunks decoder_seq_length is not read, as in Megatron's interleaving.
        adjust_tensor_shapes_fn: gives the shapes that this rank receives and sends in place of the usual one. The
            shape of each message is then sent before it; one tensor of three dimensions per message.
        p2p_communicator, pg_collection: whose transport and groups to use in place of the mesh's. Both or neither;
            one pipeline rank reads no p2p_communicator.
        consumed_microbatches: how many this rank has trained on before, which names the randomness of our layers.
            Default: those of all steps on this mesh, whoever asked for them. Give it after a resume, where that begins
            at 0.
        force_all_reduce, pg_collection: handed on to config.finalize_model_grads_func; the mesh's groups if None.
        ours: stream, loss_scale, calculate_per_token_loss of the engine; the last two default to what
            config.grad_scale_func and config.calculate_per_token_loss say.
    Returns: loss_func's dict of every microbatch in order, on ranks whose stages hold the loss; else []. Without
        loss_func, which forward_only alone takes, the outputs.
    Raises: ConfigError for what does not fit, or is asked of a Megatron config and not implemented.
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
        engine = self._engine_for(len(modules), config, p2p_communicator, pg_collection)
        place = engine.table(num_microbatches).placement
        sync = GradSync(config, dict(zip(place.stages_on(engine.mesh.pp.rank), modules, strict=False)))
        check_config(config, engine.mesh)
        if adjust_tensor_shapes_fn is not None and engine.mesh.pp.size > 1:
            _check_shapes(adjust_tensor_shapes_fn, size_of(seq_length, micro_batch_size, config))
        if first_val_step is None or not forward_only or first_val_step:
            _tell_first_microbatch(modules)
        _begin(modules)
        told: list[Loss] = []
        ours = (
            {"on_loss": told.append, "averaged_over_cp": True}
            | _said_by(config)
            | self._stream(0 if forward_only else num_microbatches, consumed_microbatches, engine.mesh)
            | ours
        )
        if not forward_only:
            ours = {"around_last_backward": sync.around_last_backward, "on_stage_done": sync.on_stage_done} | ours
        with _timed(config), sync.off(not forward_only):
            results = engine(
                forward_step_func=forward_step_func,
                data_iterator=data_iterator,
                model=model,
                num_microbatches=num_microbatches,
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
                decoder_seq_length=decoder_seq_length if len(modules) == 1 else None,
                forward_only=forward_only,
                collect_non_loss_data=collect_non_loss_data,
                variable_seq_lengths=adjust_tensor_shapes_fn is not None,
                **ours,
            )
        if not forward_only:
            tokens = _tokens(told, engine.mesh) if ours.get("calculate_per_token_loss") else None
            sync.finalize(tokens, pg_collection or ProcessGroupCollection.of(engine.mesh), force_all_reduce)
        return results

    def check_size(self, mesh: ProcessMesh) -> None:
        """Raises: ConfigError if pp_size is not the mesh's."""
        if self.pp_size not in (None, mesh.pp.size):
            raise ConfigError(
                f"get_forward_backward_func: pp_size is {self.pp_size}, and the mesh has {mesh.pp.size} pipeline "
                "ranks. Leave pp_size out, or make the mesh with --pipeline-model-parallel-size of that size."
            )

    @property
    def _kept(self) -> dict[str, Any]:
        """Return what lasts from step to step: the mesh's, as Megatron's callers ask for a new function in each."""
        mesh = self.mesh or ProcessMesh.current()
        return self._alone if mesh is None else mesh.kept

    def _engine_for(self, chunks: int, config: Any, p2p_communicator: Any, pg_collection: Any) -> ForwardBackward:
        """Return the engine of an earlier step that was asked for the same, or make one.

        Making one is collective: ranks agree on their messages. So nothing may count here that one rank changes by
        itself, such as the chunk that parallel_state's callers are at.
        """
        group_size = getattr(config, "microbatch_group_size_per_vp_stage", None)
        values = (self.pp_size, self.vp_size, self.p2p_mode, self.variable_seq_lengths, chunks, group_size)
        objects = (self.schedule, self.config, p2p_communicator, pg_collection)
        engines: list[_Engine] = self._kept.setdefault("engines", [])
        for known in engines:
            if known.values == values and all(a is b for a, b in zip(known.objects, objects, strict=True)):
                return known.engine
        made = self._made(self.mesh or ProcessMesh.current(), p2p_communicator, pg_collection, chunks, group_size)
        engines[:] = [*engines[-_ENGINES + 1 :], _Engine(values, objects, made)]
        return made

    def _made(
        self, mesh: ProcessMesh | None, p2p: Any, pg_collection: Any, chunks: int, group_size: int | None
    ) -> ForwardBackward:
        if pg_collection is not None:
            mesh = mesh_of(pg_collection, getattr(p2p, "pp", None))
        mesh = mesh or ProcessMesh.required()
        self.check_size(mesh)
        if (p2p is None) != (pg_collection is None) and mesh.pp.size > 1:
            raise ConfigError("give both p2p_communicator and pg_collection, or neither")
        mode, variable = self.p2p_mode, self.variable_seq_lengths
        if p2p is not None:
            if not isinstance(p2p, P2PCommunicator):
                kind = type(p2p).__name__
                raise ConfigError(
                    f"p2p_communicator is a {kind}, not P2PCommunicator of megapipe.pipeline_parallel.contracts.p2p"
                )
            mode, variable = mode or p2p.transport.mode, variable or p2p.variable_seq_lengths
        table = self.schedule or usual(self.vp_size or chunks)
        entry = _entry(table)
        return ForwardBackward(
            mesh,
            table,
            chunks=self.vp_size or (chunks if entry and entry.any_chunks else None),
            p2p_mode=mode or P2PMode.PLAIN,
            config=self.config,
            variable_seq_lengths=variable,
            options=_group_size(table, group_size, chunks, mesh.pp.size),
        )

    def _stream(self, trained: int, consumed: int | None, mesh: ProcessMesh) -> dict[str, Any]:
        """Return the randomness of layers of megapipe: another for each microbatch, step and data-parallel rank.

        trained: microbatches of this step, 0 of an evaluation, which leaves the training's randomness alone.
        """
        kept = self._kept
        first = kept.get("microbatches", 0) if consumed is None else consumed
        if trained:
            kept["microbatches"] = first + trained
        return {"stream": lambda microbatch: Stream(0, (first + microbatch) * mesh.dp.size + mesh.dp.rank)}


def mesh_of(pg_collection: Any, pp: Axis | None = None) -> ProcessMesh:
    """The mesh that a Megatron ProcessGroupCollection describes: its groups tp and, if there, pp, dp, cp and dp_cp.

    Args:
        pp: the pipeline, where another group than the collection's is used. Without both there is one pipeline rank.
    Raises: ConfigError for a collection without tp.
    """
    groups = {name: getattr(pg_collection, name, None) for name in ("pp", "tp", "dp", "cp", "dp_cp")}
    axes: dict[str, Any] = {name: axis_of(group) for name, group in groups.items() if group is not None}
    if "tp" not in axes:
        raise ConfigError("pg_collection must have the group tp, and over several pipeline ranks pp")
    device = axes["tp"].device
    axes["pp"] = pp or axes.get("pp", Axis(device=device))
    if "dp" not in axes and "dp_cp" in axes:  # to draw random numbers by its rank
        both, cp = axes["dp_cp"], axes.get("cp", ALONE).size
        axes["dp"] = both if cp == 1 else Axis(both.rank // cp, both.size // cp, device=device)
    return ProcessMesh(**axes, device=device)


def _entry(table: Schedule | str) -> Entry | None:
    """The entry of a schedule, None for a table that is made already."""
    return None if isinstance(table, Schedule) or is_file(table) else entry_of(table)


def _group_size(table: Schedule | str, size: int | None, chunks: int, ranks: int) -> dict[str, int]:
    """config.microbatch_group_size_per_vp_stage for `schedule.build`. Raises: ConfigError where it can do nothing."""
    if size in (None, ranks) or chunks == 1:  # the number of pipeline ranks is Megatron's default
        return {}
    entry = _entry(table)
    if entry is None or not entry.grouped:
        given = table if isinstance(table, str) else table.name
        raise ConfigError(
            f"config.{GROUP_SIZE} is {size}, and the schedule {given} has no groups of microbatches. Leave it out, or "
            "take the schedule interleaved, interleaved-zb or group-interleaved by its name."
        )
    return {GROUP_SIZE: size}


def _said_by(config: Any) -> dict[str, Any]:
    """Settings of a Megatron config that our own engine is told by argument."""
    said: dict[str, Any] = {}
    if (per_token := getattr(config, "calculate_per_token_loss", None)) is not None:
        said["calculate_per_token_loss"] = per_token
    if (scale := getattr(config, "grad_scale_func", None)) is not None:
        said["loss_scale"] = lambda: float(scale(torch.ones(())))
    return said


def _tell_first_microbatch(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        if hasattr(module, "set_is_first_microbatch"):
            module.set_is_first_microbatch()  # type: ignore[operator]


def _begin(modules: Sequence[nn.Module]) -> None:
    """Let routers of experts forget the step before: what they saw is of one step, and would grow without end."""
    for module in modules:
        for part in module.modules():
            forget = getattr(part, "forget", None)
            if callable(forget):
                forget()


def _check_shapes(adjust: AdjustShapes, shape: tuple[int, ...]) -> None:
    for shapes in adjust([shape], [shape]):
        if len(shapes) != 1 or len(shapes[0]) != len(shape):
            raise ConfigError(f"adjust_tensor_shapes_fn: a message is one tensor of 3 dimensions, got shapes {shapes}")


def _tokens(losses: Sequence[Loss], mesh: ProcessMesh) -> Tensor:
    """The tokens of all microbatches whose loss is here."""
    counts = [loss.tokens for loss in losses if loss.tokens is not None]
    return torch.stack(counts).sum().int() if counts else torch.zeros((), dtype=torch.int, device=mesh.device)


@contextmanager
def _timed(config: Any) -> Iterator[None]:
    """Megatron's timer around a step."""
    timers = getattr(config, "timers", None)
    if timers is not None:
        timers("forward-backward", log_level=1).start(barrier=getattr(config, "barrier_with_L1_time", False))
    yield
    if timers is not None:
        timers("forward-backward").stop()
