"""Megatron-LM's `parallel_state` by its names: a view of the current mesh, for code that is handed none.

It keeps nothing itself: what it answers is read from `ProcessMesh.current()`. What has no answer here (one group of
FP8's largest values, hybrid and hierarchical groups) raises one ConfigError that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megapipe.distributed.axis import CPU, Axis
from megapipe.distributed.initialize import destroy_model_parallel, initialize_model_parallel
from megapipe.distributed.mesh import JOINT, ProcessMesh
from megapipe.distributed.process_groups import Group, ProcessGroupCollection, group_of, joint_axis
from megapipe.errors import ConfigError

__all__ = ["ProcessGroupCollection", "destroy_model_parallel", "initialize_model_parallel"]

_NOT_HERE = {
    "amax": "megapipe reduces the largest values of FP8 over several axes, after a step",
    "hybrid": "megapipe has no hybrid context parallelism",
    "hierarchical": "megapipe has no hierarchical context parallelism",
    "gtp": "megapipe has no generalized tensor parallelism",
    "distributed_optimizer_instance": "megapipe has one instance of the distributed optimizer",
    "global_memory_buffer": "megapipe keeps no global memory buffer",
    "all_gather_groups": "megapipe gathers parameters over the data-parallel group",
}
"""Parts of a name, and why there is no answer."""


def is_initialized() -> bool:
    return ProcessMesh.current() is not None


model_parallel_is_initialized = is_initialized


def _current(check_initialized: bool) -> ProcessMesh | None:
    return ProcessMesh.required() if check_initialized else ProcessMesh.current()


def _group(axis: Callable[[ProcessMesh], Axis], check_initialized: bool) -> Group | None:
    mesh = _current(check_initialized)
    return None if mesh is None else group_of(mesh, axis(mesh))


def _joint(mesh: ProcessMesh, name: str) -> Axis:
    if (axis := joint_axis(mesh, name)) is None:
        raise ConfigError(
            f"parallel_state: the group {name} was not made with the mesh; make it by initialize_model_parallel, or by "
            f'ProcessMesh.create(..., joint=["{name}"])'
        )
    return axis


def _read(get: Callable[[ProcessMesh], int]) -> Callable[[], int]:
    """Return Megatron's function for a number that the mesh says."""
    return lambda: get(ProcessMesh.required())


def _size(name: str) -> Callable[[], int]:
    return _read(lambda mesh: getattr(mesh, name).size)


def _rank(name: str) -> Callable[[], int]:
    return _read(lambda mesh: getattr(mesh, name).rank)


def _group_of(name: str) -> Callable[..., Group | None]:
    """Megatron's function for an axis of the mesh, or of JOINT."""

    def get(check_initialized: bool = True) -> Group | None:
        return _group(lambda mesh: _joint(mesh, name) if name in JOINT else getattr(mesh, name), check_initialized)

    return get


get_tensor_model_parallel_group = _group_of("tp")
get_tensor_model_parallel_world_size, get_tensor_model_parallel_rank = _size("tp"), _rank("tp")
get_pipeline_model_parallel_group = _group_of("pp")
get_pipeline_model_parallel_world_size, get_pipeline_model_parallel_rank = _size("pp"), _rank("pp")
get_context_parallel_group = _group_of("cp")
get_context_parallel_world_size, get_context_parallel_rank = _size("cp"), _rank("cp")
get_expert_model_parallel_group = _group_of("ep")
get_expert_model_parallel_world_size, get_expert_model_parallel_rank = _size("ep"), _rank("ep")
get_expert_tensor_parallel_group = _group_of("etp")
get_expert_tensor_parallel_world_size, get_expert_tensor_parallel_rank = _size("etp"), _rank("etp")
get_expert_tensor_and_model_parallel_group = _group_of("experts")
get_expert_tensor_and_model_parallel_world_size, get_expert_tensor_and_model_parallel_rank = (
    _size("experts"),
    _rank("experts"),
)
get_model_parallel_group = _group_of("tp-pp")
get_tensor_and_context_parallel_group = _group_of("tp-cp")
get_expert_tensor_model_pipeline_parallel_group = _group_of("etp-ep-pp")


def get_data_parallel_group(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> Group:
    _one_instance(partial_data_parallel)
    return group_of(ProcessMesh.required(), _data(with_context_parallel))


def get_data_parallel_group_gloo(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> Group:
    _one_instance(partial_data_parallel)
    if ProcessMesh.required().device != CPU:
        raise ConfigError("parallel_state.get_data_parallel_group_gloo: megapipe makes no gloo groups beside NCCL's")
    return group_of(ProcessMesh.required(), _data(with_context_parallel))


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> Group | None:
    return _group(lambda mesh: _joint(mesh, "tp-dp-cp" if with_context_parallel else "tp-dp"), check_initialized)


def get_expert_data_parallel_group(
    check_initialized: bool = True, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> Group | None:
    _one_instance(partial_expert_data_parallel)
    return _group(lambda mesh: mesh.edp, check_initialized)


def get_embedding_group(check_initialized: bool = True) -> Group | None:
    """The group of the first and the last pipeline rank; None on the others."""
    if check_initialized and not is_rank_in_embedding_group():
        raise ConfigError("parallel_state.get_embedding_group: this rank is between the pipeline's first and last")
    return _group(lambda mesh: mesh.ends, check_initialized) if is_rank_in_embedding_group() else None


def get_position_embedding_group(check_initialized: bool = True) -> Group | None:
    """The group of the first pipeline rank; None on the others."""
    if check_initialized and not is_rank_in_position_embedding_group():
        raise ConfigError("parallel_state.get_position_embedding_group: this rank is not the pipeline's first")
    return _group(lambda mesh: Axis(), check_initialized) if is_rank_in_position_embedding_group() else None


def get_data_parallel_world_size(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    _one_instance(partial_data_parallel)
    return _data(with_context_parallel).size


def get_data_parallel_rank(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    _one_instance(partial_data_parallel)
    return _data(with_context_parallel).rank


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int] | None:
    mesh = _current(check_initialized)
    return list(mesh.cp.ranks) if mesh else None


def get_expert_data_parallel_world_size(with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False) -> int:
    _one_instance(partial_expert_data_parallel)
    return ProcessMesh.required().edp.size


def get_expert_data_parallel_rank(with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False) -> int:
    _one_instance(partial_expert_data_parallel)
    return ProcessMesh.required().edp.rank


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Return the global rank of the first of this rank's data-parallel group; so do those of other groups below."""
    return _data(with_context_parallel).ranks[0]


get_tensor_model_parallel_src_rank = _read(lambda mesh: mesh.tp.ranks[0])
get_expert_model_parallel_src_rank = _read(lambda mesh: mesh.ep.ranks[0])
get_model_parallel_src_rank = _read(lambda mesh: mesh.pp.ranks[0] - mesh.tp.ranks[mesh.tp.rank] + mesh.tp.ranks[0])
get_pipeline_model_parallel_first_rank = _read(lambda mesh: mesh.pp.ranks[0])
get_pipeline_model_parallel_last_rank = _read(lambda mesh: mesh.pp.ranks[-1])
get_pipeline_model_parallel_next_rank = _read(lambda mesh: mesh.pp.ranks[(mesh.pp.rank + 1) % mesh.pp.size])
get_pipeline_model_parallel_prev_rank = _read(lambda mesh: mesh.pp.ranks[mesh.pp.rank - 1])
get_tensor_and_context_parallel_world_size = _read(lambda mesh: mesh.tp.size * mesh.cp.size)
get_tensor_and_context_parallel_rank = _read(lambda mesh: mesh.tp.rank + mesh.tp.size * mesh.cp.rank)


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    return get_pipeline_model_parallel_rank() == 0 and _is_chunk(0, ignore_virtual, vp_stage)


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    pp, chunks = ProcessMesh.required().pp, ProcessMesh.required().virtual_size or 1
    return pp.rank == pp.size - 1 and _is_chunk(chunks - 1, ignore_virtual, vp_stage)


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    if (mesh := ProcessMesh.current()) is None:
        return False
    if mesh.pp.rank == 0:
        return is_pipeline_first_stage(ignore_virtual, vp_stage)
    return is_pipeline_last_stage(ignore_virtual, vp_stage)


def is_rank_in_position_embedding_group() -> bool:
    mesh = ProcessMesh.current()
    return mesh is not None and mesh.pp.rank == 0


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    mesh = ProcessMesh.current()
    return mesh.virtual_size if mesh else None


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    mesh = ProcessMesh.current()
    return mesh.virtual_rank if mesh else None


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """The current mesh is replaced by one that says so; as by the function below."""
    replace(ProcessMesh.required(), virtual_size=world_size).activate()


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    replace(ProcessMesh.required(), virtual_rank=rank).activate()


def _fixed(name: str) -> Callable[[int | None], None]:
    def setter(value: int | None) -> None:
        if value is not None:
            raise ConfigError(f"parallel_state.{name}({value}): the mesh says it, and nothing stands in its place")

    setter.__doc__ = "None is taken: nothing stands in the mesh's place."
    return setter


set_tensor_model_parallel_world_size = _fixed("set_tensor_model_parallel_world_size")
set_tensor_model_parallel_rank = _fixed("set_tensor_model_parallel_rank")
set_pipeline_model_parallel_world_size = _fixed("set_pipeline_model_parallel_world_size")
set_pipeline_model_parallel_rank = _fixed("set_pipeline_model_parallel_rank")
set_data_parallel_rank = _fixed("set_data_parallel_rank")
set_expert_model_parallel_world_size = _fixed("set_expert_model_parallel_world_size")
set_expert_model_parallel_rank = _fixed("set_expert_model_parallel_rank")
set_expert_tensor_parallel_world_size = _fixed("set_expert_tensor_parallel_world_size")
set_expert_tensor_parallel_rank = _fixed("set_expert_tensor_parallel_rank")


def __getattr__(name: str) -> Callable[..., Any]:
    """Megatron's functions without an answer here."""
    why = next((why for part, why in _NOT_HERE.items() if part in name), None)
    if why is None or name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError(f"parallel_state.{name}: {why}")

    return refuse


def _data(with_context_parallel: bool) -> Axis:
    mesh = ProcessMesh.required()
    return mesh.dp_cp if with_context_parallel else mesh.dp


def _one_instance(partial_data_parallel: bool) -> None:
    if partial_data_parallel:
        raise ConfigError("parallel_state: megapipe has one instance of the distributed optimizer, no partial group")


def _is_chunk(chunk: int, ignore_virtual: bool, vp_stage: int | None) -> bool:
    if ignore_virtual or ProcessMesh.required().virtual_size is None:
        return True
    if vp_stage is None:
        raise ConfigError("parallel_state: vp_stage must say which chunk is meant, as a rank has several")
    return vp_stage == chunk
