"""The world of ranks that a mesh is made in: what must hold of it, and the groups that are made of its ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megapipe.config import ParallelConfig
from megapipe.distributed.device import backend_of
from megapipe.distributed.grid import Grids
from megapipe.errors import ConfigError

Sets = Sequence[tuple[int, ...]]


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


def device_mesh_of(grids: Grids, device: torch.device) -> DeviceMesh:
    """torch's view of the dense grid. It would make a group of each rank alone for an axis of size 1."""
    names = ("pp", "dp", "cp", "tp") if grids.dense.sizes["cp"] > 1 else ("pp", "dp", "tp")
    ranks = grids.dense.ranks(*names)
    return DeviceMesh(device.type, ranks if len(names) == 4 else ranks[0], mesh_dim_names=names)


def group_of_one(rank: int) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group([rank], use_local_synchronization=True)
    return group


LINK_CTAS = 2
"""Blocks of a link's kernels. A receive that is posted ahead of its turn lies on as many multiprocessors of a GPU until
its sender comes, beside the passes: up to 32 of 132 by NCCL's own choice. 32 MiB over two take about a millisecond."""

CTAS = 32
"""Blocks that NCCL gives at most to any other communicator between GPUs of one node: as many channels of buffers."""
CHANNEL_BYTES = 8 * (8 * 512 * 16 + 120 * 640 * 8) + (4 << 20)
"""Buffers of a channel from one other rank, 9.19 MiB: eight steps of NCCL's protocol LL (8 lines of 16 bytes of each of
512 threads) and of LL128 (120 words of 8 bytes of each of 640), and NCCL_BUFFSIZE of the simple one. By NCCL's source
(computeBuffSizes in src/init.cc); the rank that receives has them (p2pRecvSetup in src/transport/p2p.cc)."""


def buffer_bytes(collectives: Iterable[int], exchanges: Iterable[int] = (), senders: int = 0) -> int:
    """Memory of each GPU of a node that NCCL's communicators take beside torch's, at most and without NVLink SHARP's.

    Args:
        collectives: ranks of each communicator: rings and trees of a node have the ranks before and behind.
        exchanges: ranks of each in which all send rows to all, for which NCCL keeps channels of their own.
        senders: ranks from which messages come over communicators of LINK_CTAS blocks.
    """
    others = sum(min(ranks - 1, 2) for ranks in collectives) + sum(ranks - 1 for ranks in exchanges)
    return CHANNEL_BYTES * (CTAS * others + LINK_CTAS * senders)


def group_of(
    sets: Sets, rank: int, device: torch.device, timeout: timedelta, *, is_link: bool = False
) -> dist.ProcessGroup | None:
    """The group of the set with this rank: every rank of the world calls it, with all sets.

    NCCL's communicators are split off the world's, in one call for all sets; in calls of their own, every rank of the
    world would take part in each. A gloo group concerns its members alone.
    """
    world = dist.distributed_c10d._get_default_group()
    if backend_of(device) == "nccl" and world.bound_device_id:
        options = copy.deepcopy(world._get_backend(device).options)  # as torch takes them where none are given
        if is_link:
            options.config.max_ctas = LINK_CTAS  # type: ignore[attr-defined]
        return dist.split_group(split_ranks=[list(ranks) for ranks in sets], timeout=timeout, pg_options=options)
    groups = {ranks: dist.new_group(list(ranks), timeout=timeout) for ranks in sets}
    return next((group for ranks, group in groups.items() if rank in ranks), None)


def links_of(parallel: ParallelConfig) -> int:
    """The number of communicators for messages of a pipeline: its links, and one for messages beyond neighbours.

    Those of a shared vocabulary go to every rank. On the pipeline's own communicator their receives would wait on all
    blocks that NCCL gives it, and have buffers for as many from each rank.
    """
    size = parallel.pipeline_model_parallel_size
    return num_links(size) + (parallel.vocab_parallel_pipeline and size > 2)


def num_links(size: int) -> int:
    """The number of communicators of one way each that the links of a ring of `size` ranks need.

    NCCL runs what is posted on one communicator one after another: a receive that waits for its sender would hold up
    every message behind it. Where each communicator of a rank serves one neighbour, one way, a waiting receive holds up
    only receives from the same neighbour, and may be posted before its turn.
    """
    return 0 if size == 1 else 2 if size == 2 else 4 + 2 * (size % 2)


def link(src: int, dst: int, size: int) -> int | None:
    """The communicator from src to dst, 0..num_links-1; None if they are not neighbours on the ring.

    The links of a chain take two colours in turn, the one that closes an odd ring a third; each colour has two ways.
    """
    low, high = sorted((src, dst))
    if high - low not in (1, size - 1):
        return None
    place = low if high - low == 1 else high
    colour = 2 if size % 2 and place == size - 1 else place % 2
    return 2 * colour + (src < dst)
