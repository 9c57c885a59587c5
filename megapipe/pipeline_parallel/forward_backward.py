"""`get_forward_backward_func`: Megatron-LM's way to ask for a schedule and its step's keywords, over the one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.engine import ForwardBackward
from megapipe.pipeline_parallel.grad_sync import GradSync, check_config
from megapipe.pipeline_parallel.loss import Loss
from megapipe.pipeline_parallel.p2p import P2PCommunicator, axis_of
from megapipe.pipeline_parallel.stage import ForwardStep, config_of
from megapipe.pipeline_parallel.transport import P2PMode
from megapipe.schedule import Schedule
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


@dataclass(eq=False)
class Step:
    """One rank's step, called as Megatron's train_step and evaluate call theirs. What is not named here is as in
    engine.Request.

    Keywords:
        first_val_step: is it the first of an evaluation? Then, and in training, a chunk that has
            set_is_first_microbatch is told (Transformer Engine converts its weights then).
        adjust_tensor_shapes_fn: gives the shapes that this rank receives and sends in place of the usual one. The
            shape of each message is then sent before it; one tensor of three dimensions per message.
        p2p_communicator, pg_collection: both or neither; whose transport and groups to use in place of the mesh's.
        force_all_reduce: handed on to config.finalize_model_grads_func.
        ours: stream, loss_scale, calculate_per_token_loss of the engine; the last two default to what
            config.grad_scale_func and config.calculate_per_token_loss say.
    Returns: loss_func's dict of every microbatch in order, on ranks whose stages hold the loss; else [].
    Raises: ConfigError for what does not fit, or is asked of a Megatron config and not implemented.
    """

    mesh: ProcessMesh | None
    schedule: Schedule | str | None
    pp_size: int | None
    vp_size: int | None
    p2p_mode: str | None
    config: Any
    variable_seq_lengths: bool
    engine: ForwardBackward | None = field(default=None, init=False)
    _steps: int = field(default=0, init=False)

    def __call__(
        self,
        *,
        forward_step_func: ForwardStep,
        data_iterator: Iterator[Any] | Sequence[Iterator[Any] | None] | None,
        model: nn.Module | Sequence[nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: AdjustShapes | None = None,
        p2p_communicator: P2PCommunicator | None = None,
        pg_collection: Any = None,
        force_all_reduce: bool = False,
        **ours: Any,
    ) -> list[dict[str, Any]]:
        """Run every microbatch through this rank's stages; see the class."""
        modules = list(model) if isinstance(model, Sequence) else [model]
        engine = self._engine(len(modules), p2p_communicator, pg_collection)
        config = config_of(modules[0]) if self.config is None else self.config
        place = engine.table(num_microbatches).placement
        sync = GradSync(config, dict(zip(place.stages_on(engine.mesh.pp.rank), modules, strict=False)))
        check_config(config, engine.mesh)
        if adjust_tensor_shapes_fn is not None:
            _check_shapes(adjust_tensor_shapes_fn, (seq_length, micro_batch_size, config.hidden_size))
        if first_val_step is None or not forward_only or first_val_step:
            _tell_first_microbatch(modules)
        told: list[Loss] = []
        ours = {"on_loss": told.append} | _said_by(config) | self._stream(num_microbatches, engine.mesh) | ours
        if not forward_only:
            ours = {"on_last_backward": sync.on_last_backward, "on_stage_done": sync.on_stage_done} | ours
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
                **ours,
            )
        if not forward_only:
            tokens = _tokens(told, engine.mesh) if ours.get("calculate_per_token_loss") else None
            sync.finalize(tokens, pg_collection, force_all_reduce)
        return results

    def check_size(self, mesh: ProcessMesh) -> None:
        """Raises: ConfigError if pp_size is not the mesh's."""
        if self.pp_size not in (None, mesh.pp.size):
            raise ConfigError(
                f"get_forward_backward_func: pp_size is {self.pp_size}, and the mesh has {mesh.pp.size} pipeline "
                "ranks. Leave pp_size out, or make the mesh with --pipeline-model-parallel-size of that size."
            )

    def _engine(self, chunks: int, p2p_communicator: P2PCommunicator | None, pg_collection: Any) -> ForwardBackward:
        if (p2p_communicator is None) != (pg_collection is None):
            raise ConfigError("give both p2p_communicator and pg_collection, or neither")
        if self.engine is not None:
            return self.engine
        mesh = self.mesh or (ProcessMesh.current() if pg_collection is None else mesh_of(pg_collection))
        if mesh is None:
            raise ConfigError(
                "there is no mesh: call ProcessMesh.create(ParallelConfig(...), device) at the start of the program, "
                "or give get_forward_backward_func mesh=..."
            )
        self.check_size(mesh)
        mode, variable = self.p2p_mode, self.variable_seq_lengths
        if p2p_communicator is not None:
            if not isinstance(p2p_communicator, P2PCommunicator):
                kind = type(p2p_communicator).__name__
                raise ConfigError(f"p2p_communicator is a {kind}, not a megapipe.pipeline_parallel.p2p.P2PCommunicator")
            mode = mode or p2p_communicator.transport.mode
            variable = variable or p2p_communicator.variable_seq_lengths
        table = self.schedule or ("interleaved" if (self.vp_size or chunks) > 1 else "1f1b")
        self.engine = ForwardBackward(
            mesh,
            table,
            chunks=self.vp_size or (chunks if table == "interleaved" else None),
            p2p_mode=mode or P2PMode.PLAIN,
            config=self.config,
            variable_seq_lengths=variable,
        )
        return self.engine

    def _stream(self, num_microbatches: int, mesh: ProcessMesh) -> dict[str, Any]:
        """Randomness of layers of megapipe: another for each microbatch of each step and data-parallel rank."""
        first = self._steps * num_microbatches
        self._steps += 1
        return {"stream": lambda microbatch: Stream(0, (first + microbatch) * mesh.dp.size + mesh.dp.rank)}


def mesh_of(pg_collection: Any) -> ProcessMesh:
    """The mesh that a Megatron ProcessGroupCollection describes: its groups pp, tp and, if there, dp, cp and dp_cp.

    Raises: ConfigError for a collection without pp or tp.
    """
    groups = {name: getattr(pg_collection, name, None) for name in ("pp", "tp", "dp", "cp", "dp_cp")}
    axes: dict[str, Any] = {name: axis_of(group) for name, group in groups.items() if group is not None}
    if "pp" not in axes or "tp" not in axes:
        raise ConfigError("pg_collection must have the groups pp and tp")
    return ProcessMesh(**axes, device=axes["pp"].device)


def _said_by(config: Any) -> dict[str, Any]:
    """What a Megatron config says and our own engine is told by argument."""
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


def _check_shapes(adjust: AdjustShapes, shape: tuple[int, ...]) -> None:
    for shapes in adjust([shape], [shape]):
        if len(shapes) != 1 or len(shapes[0]) != len(shape):
            raise ConfigError(f"adjust_tensor_shapes_fn: a message is one tensor of 3 dimensions, got shapes {shapes}")


def _tokens(losses: Sequence[Loss], mesh: ProcessMesh) -> Tensor:
    """Of all microbatches whose loss is here."""
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
