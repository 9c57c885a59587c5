"""Megatron-LM's `parallel_state` as a view of the current mesh, for code that is given no mesh.

This module keeps no state: its functions read `ProcessMesh.current()` and have Megatron's names,
arguments and results. A function for something that megapipe does not have, such as hierarchical
groups, raises a ConfigError that names it. Without a mesh, functions raise ConfigError if they do
not say otherwise, and return None with check_initialized=False. with_gtp_remat is ignored. A chunk
is one of several stages of a rank.
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

# Part of a function's name -> why megapipe has no such function.
_NOT_HERE = {
    "amax": "megapipe reduces the largest values of FP8 over several axes, after a step",
    "hybrid": "megapipe has no hybrid context parallelism",
    "hierarchical": "megapipe has no hierarchical context parallelism",
    "gtp": "megapipe has no generalized tensor parallelism",
    "distributed_optimizer_instance": "megapipe has one instance of the distributed optimizer",
    "global_memory_buffer": "megapipe keeps no global memory buffer",
    "all_gather_groups": "megapipe gathers parameters over the data-parallel group",
}


def is_initialized() -> bool:
    """Return whether this process or thread has a current mesh."""
    return ProcessMesh.current() is not None


# Megatron asks both of the world and of its groups; a mesh is both.
model_parallel_is_initialized = is_initialized


def _current(check_initialized: bool) -> ProcessMesh | None:
    """Return the current mesh. Without one, return None, or raise ConfigError if it is checked."""
    if check_initialized:
        return ProcessMesh.required()
    return ProcessMesh.current()


def _group(axis: Callable[[ProcessMesh], Axis], check_initialized: bool) -> Group | None:
    """Return the process group of an axis of the current mesh; `axis` takes the mesh."""
    mesh = _current(check_initialized)
    return None if mesh is None else group_of(mesh, axis(mesh))


def _joint(mesh: ProcessMesh, name: str) -> Axis:
    """Return the axis over several others, given its name, such as "tp-dp-cp".

    Raises: ConfigError if the mesh was made without that axis.
    """
    axis = joint_axis(mesh, name)
    if axis is None:
        raise ConfigError(
            f"parallel_state: the group {name} was not made with the mesh; make it by "
            f'initialize_model_parallel, or by ProcessMesh.create(..., joint=["{name}"])'
        )
    return axis


def _read(get: Callable[[ProcessMesh], int]) -> Callable[[], int]:
    """Return a function without arguments that applies `get` to the current mesh."""
    return lambda: get(ProcessMesh.required())


def _size(name: str) -> Callable[[], int]:
    """Return a function that returns the number of ranks on the axis called `name`."""
    return _read(lambda mesh: getattr(mesh, name).size)


def _rank(name: str) -> Callable[[], int]:
    """Return a function that returns this rank's position on the axis called `name`."""
    return _read(lambda mesh: getattr(mesh, name).rank)


def _group_of(name: str) -> Callable[..., Group | None]:
    """Return a function that returns the group of an axis such as "tp" or, from JOINT, "tp-cp"."""

    def axis(mesh: ProcessMesh) -> Axis:
        if name in JOINT:
            return _joint(mesh, name)
        found: Axis = getattr(mesh, name)
        return found

    def get(check_initialized: bool = True) -> Group | None:
        return _group(axis, check_initialized)

    return get


# For each axis Megatron's three functions: its group, its size and this rank's position.
get_tensor_model_parallel_group = _group_of("tp")
get_tensor_model_parallel_world_size = _size("tp")
get_tensor_model_parallel_rank = _rank("tp")
get_pipeline_model_parallel_group = _group_of("pp")
get_pipeline_model_parallel_world_size = _size("pp")
get_pipeline_model_parallel_rank = _rank("pp")
get_context_parallel_group = _group_of("cp")
get_context_parallel_world_size = _size("cp")
get_context_parallel_rank = _rank("cp")
get_expert_model_parallel_group = _group_of("ep")
get_expert_model_parallel_world_size = _size("ep")
get_expert_model_parallel_rank = _rank("ep")
get_expert_tensor_parallel_group = _group_of("etp")
get_expert_tensor_parallel_world_size = _size("etp")
get_expert_tensor_parallel_rank = _rank("etp")
get_expert_tensor_and_model_parallel_group = _group_of("experts")
get_expert_tensor_and_model_parallel_world_size = _size("experts")
get_expert_tensor_and_model_parallel_rank = _rank("experts")
get_model_parallel_group = _group_of("tp-pp")
get_tensor_and_context_parallel_group = _group_of("tp-cp")
get_expert_tensor_model_pipeline_parallel_group = _group_of("etp-ep-pp")


def get_data_parallel_group(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
) -> Group:
    """Return the data-parallel group; with_context_parallel adds the context-parallel ranks.

    with_gtp_remat has no effect here. partial_data_parallel=True raises ConfigError.
    """
    _one_instance(partial_data_parallel)
    return group_of(ProcessMesh.required(), _data(with_context_parallel))


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> Group:
    """Return the data-parallel group of a mesh on the CPU. On a GPU it raises ConfigError."""
    _one_instance(partial_data_parallel)
    if ProcessMesh.required().device != CPU:
        raise ConfigError(
            "parallel_state.get_data_parallel_group_gloo: megapipe makes no gloo groups in "
            "addition to NCCL's"
        )
    return group_of(ProcessMesh.required(), _data(with_context_parallel))


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> Group | None:
    """Return the group over tp and dp; with_context_parallel adds cp to it."""
    name = "tp-dp-cp" if with_context_parallel else "tp-dp"
    return _group(lambda mesh: _joint(mesh, name), check_initialized)


def get_expert_data_parallel_group(
    check_initialized: bool = True,
    with_gtp_remat: bool = True,
    partial_expert_data_parallel: bool = False,
) -> Group | None:
    """Return the group of the ranks with equal experts."""
    _one_instance(partial_expert_data_parallel)
    return _group(lambda mesh: mesh.edp, check_initialized)


def get_embedding_group(check_initialized: bool = True) -> Group | None:
    """Return the group of the first and the last pipeline rank, and ranks that tie weights to them.

    On ranks between it raises ConfigError, or returns None with check_initialized=False.
    """
    # A rank between both ends has no use for the group, and Megatron-LM asserts the same.
    is_member = _current(check_initialized) is not None and is_rank_in_embedding_group()
    if check_initialized and not is_member:
        raise ConfigError(
            "parallel_state.get_embedding_group: this rank is between the pipeline's first and last"
        )
    if not is_member:
        return None
    return _group(lambda mesh: mesh.ends, check_initialized)


def get_position_embedding_group(check_initialized: bool = True) -> Group | None:
    """Return the group of the first pipeline rank, this rank alone.

    On other ranks it raises ConfigError, or returns None with check_initialized=False.
    """
    # Learned positions are added on the first rank alone, so no other has a gradient of them.
    is_member = _current(check_initialized) is not None and is_rank_in_position_embedding_group()
    if check_initialized and not is_member:
        raise ConfigError(
            "parallel_state.get_position_embedding_group: this rank is not the pipeline's first"
        )
    if not is_member:
        return None
    return _group(lambda mesh: Axis(), check_initialized)


def get_data_parallel_world_size(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
) -> int:
    """Return the number of data-parallel ranks; with_context_parallel counts cp ranks too."""
    _one_instance(partial_data_parallel)
    return _data(with_context_parallel).size


def get_data_parallel_rank(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
) -> int:
    """Return this rank's data-parallel position; with_context_parallel counts cp ranks too."""
    _one_instance(partial_data_parallel)
    return _data(with_context_parallel).rank


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int] | None:
    """Return the global ranks of the context-parallel group."""
    mesh = _current(check_initialized)
    return list(mesh.cp.ranks) if mesh else None


def get_expert_data_parallel_world_size(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """Return the number of ranks with the same experts. with_gtp_remat has no effect."""
    _one_instance(partial_expert_data_parallel)
    return ProcessMesh.required().edp.size


def get_expert_data_parallel_rank(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """Return this rank's position among ranks with equal experts. with_gtp_remat has no effect."""
    _one_instance(partial_expert_data_parallel)
    return ProcessMesh.required().edp.rank


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Return the first global rank of the data-parallel group, or with cp of both axes."""
    return _data(with_context_parallel).ranks[0]


# The same for other groups. Neighbours are those on the ring that the pipeline's ranks form.
get_tensor_model_parallel_src_rank = _read(lambda mesh: mesh.tp.ranks[0])
get_expert_model_parallel_src_rank = _read(lambda mesh: mesh.ep.ranks[0])
# Ranks are numbered along tp first: the first stage's rank, less this rank's distance along tp.
get_model_parallel_src_rank = _read(
    lambda mesh: mesh.pp.ranks[0] - mesh.tp.ranks[mesh.tp.rank] + mesh.tp.ranks[0]
)
get_pipeline_model_parallel_first_rank = _read(lambda mesh: mesh.pp.ranks[0])
get_pipeline_model_parallel_last_rank = _read(lambda mesh: mesh.pp.ranks[-1])
get_pipeline_model_parallel_next_rank = _read(
    lambda mesh: mesh.pp.ranks[(mesh.pp.rank + 1) % mesh.pp.size]
)
get_pipeline_model_parallel_prev_rank = _read(lambda mesh: mesh.pp.ranks[mesh.pp.rank - 1])
get_tensor_and_context_parallel_world_size = _read(lambda mesh: mesh.tp.size * mesh.cp.size)
get_tensor_and_context_parallel_rank = _read(
    lambda mesh: mesh.tp.rank + mesh.tp.size * mesh.cp.rank
)


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this is the first pipeline rank and, unless ignored, its first chunk.

    Args:
        ignore_virtual: do not look at the chunk.
        vp_stage: the chunk; None if a rank has only one, or with ignore_virtual.
    """
    return get_pipeline_model_parallel_rank() == 0 and _is_chunk(0, ignore_virtual, vp_stage)


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this is the last pipeline rank and, unless ignored, its last chunk.

    Args:
        ignore_virtual: do not look at the chunk.
        vp_stage: the chunk; None if a rank has only one, or with ignore_virtual.
    """
    mesh = ProcessMesh.required()
    last_chunk = (mesh.virtual_size or 1) - 1
    is_last = mesh.pp.rank == mesh.pp.size - 1
    return is_last and _is_chunk(last_chunk, ignore_virtual, vp_stage)


# Chunks matter here too: only the first chunk of the first rank embeds, and only the last chunk of
# the last rank has the head.
def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this is the pipeline's first or last stage; False without a mesh.

    With ignore_virtual only the rank counts, else also `vp_stage`, the chunk.
    """
    mesh = ProcessMesh.current()
    if mesh is None:
        return False
    if mesh.pp.rank == 0:
        return is_pipeline_first_stage(ignore_virtual, vp_stage)
    return is_pipeline_last_stage(ignore_virtual, vp_stage)


def is_rank_in_position_embedding_group() -> bool:
    """Return whether this is the first pipeline rank; False without a mesh."""
    mesh = ProcessMesh.current()
    return mesh is not None and mesh.pp.rank == 0


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Return the number of chunks per rank; None if it is not set or there is no mesh."""
    mesh = ProcessMesh.current()
    return mesh.virtual_size if mesh else None


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Return the chunk that was set last; None if none was or there is no mesh."""
    mesh = ProcessMesh.current()
    return mesh.virtual_rank if mesh else None


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Replace the current mesh by a copy with this number of chunks per rank; None for unknown."""
    # A mesh is frozen. The copy shares its groups and what code keeps in it.
    replace(ProcessMesh.required(), virtual_size=world_size).activate()


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Replace the current mesh by a copy in which `rank` is the current chunk, or None."""
    replace(ProcessMesh.required(), virtual_rank=rank).activate()


def _fixed(name: str) -> Callable[[int | None], None]:
    """Return a setter `name` that does nothing for None and raises ConfigError for a number."""

    def setter(value: int | None) -> None:
        if value is not None:
            raise ConfigError(
                f"parallel_state.{name}({value}): the mesh says it, and nothing stands in its place"
            )

    setter.__doc__ = "Accept None, and raise ConfigError for a number: the mesh decides."
    return setter


# Megatron lets callers override these numbers; here they would contradict the process groups.
set_tensor_model_parallel_world_size = _fixed("set_tensor_model_parallel_world_size")
set_tensor_model_parallel_rank = _fixed("set_tensor_model_parallel_rank")
set_pipeline_model_parallel_world_size = _fixed("set_pipeline_model_parallel_world_size")
set_pipeline_model_parallel_rank = _fixed("set_pipeline_model_parallel_rank")
set_data_parallel_rank = _fixed("set_data_parallel_rank")
set_expert_model_parallel_world_size = _fixed("set_expert_model_parallel_world_size")
set_expert_model_parallel_rank = _fixed("set_expert_model_parallel_rank")
set_expert_tensor_parallel_world_size = _fixed("set_expert_tensor_parallel_world_size")
set_expert_tensor_parallel_rank = _fixed("set_expert_tensor_parallel_rank")


# Called by Python for names that the module does not define.
def __getattr__(name: str) -> Callable[..., Any]:
    """Return a function that raises ConfigError, for Megatron's functions that are missing here."""
    why = next((why for part, why in _NOT_HERE.items() if part in name), None)
    if why is None or name.startswith("_"):
        # Neither ours nor Megatron's: the error of any module, which hasattr and import expect.
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError(f"parallel_state.{name}: {why}")

    return refuse


def _data(with_context_parallel: bool) -> Axis:
    """Return the data-parallel axis; with_context_parallel includes context-parallel ranks."""
    mesh = ProcessMesh.required()
    return mesh.dp_cp if with_context_parallel else mesh.dp


def _one_instance(partial_data_parallel: bool) -> None:
    """Raise ConfigError if partial_data_parallel asks for one of several optimizer instances."""
    if partial_data_parallel:
        raise ConfigError(
            "parallel_state: megapipe has one instance of the distributed optimizer, no partial "
            "group"
        )


def _is_chunk(chunk: int, ignore_virtual: bool, vp_stage: int | None) -> bool:
    """Return whether vp_stage is this chunk; True if chunks are ignored, or were not set.

    Raises: ConfigError if vp_stage is needed and missing.
    """
    if ignore_virtual or ProcessMesh.required().virtual_size is None:
        return True
    if vp_stage is None:
        raise ConfigError(
            "parallel_state: vp_stage must say which chunk is meant, as a rank has several"
        )
    return vp_stage == chunk
