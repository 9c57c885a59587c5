"""The world of ranks that a mesh is made in: what must hold of it before the first group is made."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from megapipe.config import ParallelConfig
from megapipe.distributed.device import backend_of
from megapipe.errors import ConfigError


def check_sizes(parallel: ParallelConfig, world_size: int) -> dict[str, str]:
    """The sizes of a replica by name. Raises: ConfigError if the world does not divide by them."""
    names = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    sizes = {name: getattr(parallel, name) for name in names}
    product = math.prod(sizes.values())
    if product < 1 or world_size % product:
        text = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(
            f"the world has {world_size} rank{'s' * (world_size > 1)}, no multiple of {text} = {product}. Start "
            f"{max(product, 1)} processes, or a multiple (torchrun --nproc-per-node), or take other sizes."
        )
    return {name: str(size) for name, size in sizes.items()}


def check_backend(device: torch.device) -> None:
    """Raises: ConfigError if the world that is there moves no tensors of the device."""
    world, needed = dist.distributed_c10d._get_default_group(), backend_of(device)
    kinds = {kind.type for kind in world._device_types}
    found = world._get_backend(torch.device(device.type)).name() if device.type in kinds else "no backend"
    if found != needed:
        raise ConfigError(
            f"torch.distributed was initialised with {found} for tensors on {device.type}, and stages send theirs over "
            f'{needed}. Call torch.distributed.init_process_group("{needed}"), or give ProcessMesh.create another '
            "device."
        )
