"""Megatron-LM's initialize_model_parallel and destroy_model_parallel: the mesh is made and left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megapipe.config import ParallelConfig
from megapipe.distributed.device import pick_device
from megapipe.distributed.mesh import JOINT, ProcessMesh
from megapipe.errors import ConfigError

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
    "create_gloo_process_groups": (True, False),
    "high_priority_stream_groups": (None,),
    "sharp_enabled_group": (None,),
    "rank_offset": (0,),
    "local_world_size": (None,),
}
"""Arguments of Megatron's initialize_model_parallel that ask for nothing with these values."""


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
    """ProcessMesh.create with all of Megatron's groups, before or after init_process_group.

    Args:
        order: tp, then cp, then dp and pp either way.
        device: of this process; by default its GPU, or the CPU in a world of gloo.
        others: Megatron's, with values that ask for nothing.
    Raises: ConfigError for other values, an order that is not here, or sizes that do not divide the world.
    """
    if unknown := others.keys() - _NOTHING:
        raise TypeError(f"initialize_model_parallel() got an unexpected keyword argument {min(unknown)!r}")
    problems = [
        f"initialize_model_parallel: {name} is {value}, which megapipe does not implement"
        for name, value in others.items()
        if value not in _NOTHING[name]
    ]
    axes = [name for name in order.split("-") if name != "ep" and not (name == "cp" and context_parallel_size == 1)]
    inner = ["tp", "cp"] if context_parallel_size > 1 else ["tp"]
    if axes not in ([*inner, "dp", "pp"], [*inner, "pp", "dp"]):
        problems.append(f"initialize_model_parallel: order is {order}; megapipe has tp-cp-ep-dp-pp and tp-cp-ep-pp-dp")
    if problems:
        raise ConfigError(problems)
    parallel = ParallelConfig(
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        context_parallel_size=context_parallel_size,
        expert_model_parallel_size=expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size,
        use_tp_pp_dp_mapping=axes[-1] == "dp",
        distributed_timeout_minutes=distributed_timeout_minutes,
        distributed_backend="gloo" if dist.is_initialized() and dist.get_backend() == "gloo" else "auto",
    )
    mesh = ProcessMesh.create(parallel, device or pick_device(parallel), joint=JOINT)
    replace(mesh, virtual_size=virtual_pipeline_model_parallel_size).activate()


def destroy_model_parallel() -> None:
    """Leave the mesh; a world that was there before stays."""
    if (mesh := ProcessMesh.current()) is not None:
        mesh.close()
