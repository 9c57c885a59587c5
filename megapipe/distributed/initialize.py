"""Make and leave a mesh by Megatron-LM's initialize_model_parallel and destroy_model_parallel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from megapipe.config import ParallelConfig
from megapipe.distributed.device import pick_device
from megapipe.distributed.mesh import JOINT, ProcessMesh
from megapipe.errors import ConfigError

# Further arguments of Megatron's initialize_model_parallel, with the values that ask for nothing.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "pipeline_model_parallel_comm_backend": (None,),
    "use_sharp": (False,),
    "hierarchical_context_parallel_sizes": (None,),
    "hybrid_context_parallel": (False,),
    "gtp_remat_size": (1,),
    "expert_gtp_remat_size": (1,),
    "num_distributed_optimizer_instances": (1,),
    "nccl_communicator_config_path": (None,),
    "get_embedding_ranks": (None,),
    "get_position_embedding_ranks": (None,),
    # Either value: a mesh has one backend, and gloo groups only on a CPU.
    "create_gloo_process_groups": (True, False),
    "high_priority_stream_groups": (None,),
    "sharp_enabled_group": (None,),
    "rank_offset": (0,),
    "local_world_size": (None,),
}


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    distributed_timeout_minutes: float = 30,
    order: str = "tp-cp-ep-dp-pp",
    device: torch.device | None = None,
    **others: Any,
) -> None:
    """Make the mesh of this process, with all of Megatron's groups.

    Call this before or after torch.distributed.init_process_group. The arguments are Megatron's.

    Args:
        virtual_pipeline_model_parallel_size: number of model chunks on each rank. The number is
            only stored, for `parallel_state`.
        distributed_timeout_minutes: the timeout of messages and collectives.
        order: the order of the axes: tp, then cp, then dp and pp in either order. ep may be
            anywhere.
        device: device of this process; by default its GPU, or the CPU without GPUs or in a gloo
            world.
        others: Megatron's other arguments, accepted only with values that have no effect.
    Raises: ConfigError for other values, another order, or a world size that is not a multiple of
        the sizes. TypeError for an argument that Megatron does not have.
    """
    unknown = others.keys() - _NOTHING
    if unknown:
        # As Python says it of a misspelt argument, which `others` would take.
        raise TypeError(
            f"initialize_model_parallel() got an unexpected keyword argument {min(unknown)!r}"
        )
    # An argument that megapipe would ignore is refused, so that nobody relies on its effect.
    problems = [
        f"initialize_model_parallel: {name} is {value}, which megapipe does not implement"
        for name, value in others.items()
        if value not in _NOTHING[name]
    ]
    # An axis of size 1 may stand anywhere, and the experts' grid has an order of its own.
    inner = ["tp", "cp"] if context_parallel_size > 1 else ["tp"]
    ignored = {"ep", "cp"} if context_parallel_size == 1 else {"ep"}
    axes = [name for name in order.split("-") if name not in ignored]
    if axes not in ([*inner, "dp", "pp"], [*inner, "pp", "dp"]):
        problems.append(
            f"initialize_model_parallel: order is {order}; megapipe has tp-cp-ep-dp-pp and "
            "tp-cp-ep-pp-dp"
        )
    if problems:
        raise ConfigError(problems)
    backend: Literal["auto", "gloo"] = "auto"
    # A gloo world cannot move tensors of a GPU, so the CPU is chosen even if there is one.
    if dist.is_initialized() and dist.get_backend() == "gloo":
        backend = "gloo"
    parallel = ParallelConfig(
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        context_parallel_size=context_parallel_size,
        expert_model_parallel_size=expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size,
        use_tp_pp_dp_mapping=axes[-1] == "dp",
        distributed_timeout_minutes=distributed_timeout_minutes,
        distributed_backend=backend,
    )
    mesh = ProcessMesh.create(parallel, device or pick_device(parallel), joint=JOINT)
    replace(mesh, virtual_size=virtual_pipeline_model_parallel_size).activate()


def destroy_model_parallel() -> None:
    """Leave the current mesh and destroy its groups. Without a mesh do nothing.

    A torch.distributed world that existed before the mesh stays initialised.
    """
    mesh = ProcessMesh.current()
    if mesh is not None:
        mesh.close()
