"""Make process groups of the ranks of a mesh, and say how much memory NCCL takes for them."""

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
"""Sets of ranks without a common rank; each becomes a group."""


def check_backend(device: torch.device) -> None:
    """Raise ConfigError if torch.distributed's existing world cannot send tensors on a device."""
    world = dist.distributed_c10d._get_default_group()
    needed = backend_of(device)
    # A world may have a backend for each kind of device, as cpu:gloo,cuda:nccl does.
    kinds = {kind.type for kind in world._device_types}
    found = "no backend"
    if device.type in kinds:
        found = world._get_backend(torch.device(device.type)).name()
    if found != needed:
        raise ConfigError(
            f"torch.distributed was initialised with {found} for tensors on {device.type}, and "
            f'stages send theirs over {needed}. Call torch.distributed.init_process_group("{needed}'
            '"), or give ProcessMesh.create another device.'
        )


def device_mesh_of(grids: Grids, device: torch.device) -> DeviceMesh:
    """Make torch's DeviceMesh of the dense grid, with the axes pp, dp, cp and tp. Collective.

    cp is left out if its size is 1, because torch would make a group of one for every rank. `grids`
    has the ranks along all axes.
    """
    if grids.dense.sizes["cp"] > 1:
        names: tuple[str, ...] = ("pp", "dp", "cp", "tp")
        ranks = grids.dense.ranks(*names)
    else:
        names = ("pp", "dp", "tp")
        # The first dimension of this tensor is cp, of size 1.
        ranks = grids.dense.ranks(*names)[0]
    return DeviceMesh(device.type, ranks, mesh_dim_names=names)


def group_of_one(rank: int) -> dist.ProcessGroup:
    """Return a new group of this rank alone, without a call on the other ranks."""
    group: dist.ProcessGroup = dist.new_group([rank], use_local_synchronization=True)
    return group


LINK_CTAS = 2
"""Thread blocks of a kernel of a link, the communicator of one direction between two neighbours.

A receive that is posted early occupies this many multiprocessors of a GPU until its sender comes,
while passes compute. NCCL's own choice is up to 32 of 132. 32 MiB over two blocks take about a
millisecond.
"""

CTAS = 32
"""Most thread blocks, and thus channels with buffers, of another communicator within a node."""
CHANNEL_BYTES = 8 * (8 * 512 * 16 + 120 * 640 * 8) + (4 << 20)
"""Bytes of the buffers of one channel from one other rank, 9.19 MiB, on the receiving rank.

They are eight steps of NCCL's protocols LL (8 lines of 16 bytes for each of 512 threads) and LL128
(120 words of 8 bytes for each of 640 threads), and NCCL_BUFFSIZE for the simple protocol. See
computeBuffSizes in NCCL's src/init.cc, and p2pRecvSetup in src/transport/p2p.cc.
"""


def buffer_bytes(
    collectives: Iterable[int], exchanges: Iterable[int] = (), senders: int = 0
) -> int:
    """Return the most bytes that NCCL's communicators take on each GPU of a node.

    torch does not count this memory. NVLink SHARP would take more, which is not included.

    Args:
        collectives: number of ranks of each communicator for collectives.
        exchanges: number of ranks of each communicator for all-to-all, for which NCCL keeps
            separate channels.
        senders: number of ranks that send to this rank over links: communicators for one direction.
    """
    # From each of these ranks a channel receives; a sender's buffers lie on the receiver.
    others = sum(min(ranks - 1, 2) for ranks in collectives) + sum(ranks - 1 for ranks in exchanges)
    return CHANNEL_BYTES * (CTAS * others + LINK_CTAS * senders)


def group_of(
    sets: Sets, rank: int, device: torch.device, timeout: timedelta, *, is_link: bool = False
) -> dist.ProcessGroup | None:
    """Return the process group of the set that has this rank; None if no set has the rank.

    Every rank of the world must call this function with all sets.

    Args:
        sets: disjoint sets of global ranks.
        rank: this global rank.
        timeout: the timeout of the group's messages and collectives.
        is_link: whether the group is for pipeline messages in one direction. A GPU then spends only
            LINK_CTAS thread blocks on each message.
    """
    world = dist.distributed_c10d._get_default_group()
    # NCCL's communicators are split off the world's in one call for all sets. In one call for each
    # set, every rank of the world would have to take part in every call.
    if backend_of(device) == "nccl" and world.bound_device_id:
        # torch uses these options too when it is given none.
        options = copy.deepcopy(world._get_backend(device).options)
        if is_link:
            options.config.max_ctas = LINK_CTAS  # type: ignore[attr-defined]
        split_ranks = [list(ranks) for ranks in sets]
        return dist.split_group(split_ranks=split_ranks, timeout=timeout, pg_options=options)
    # Gloo connects only the members of a group.
    groups = {ranks: dist.new_group(list(ranks), timeout=timeout) for ranks in sets}
    return next((group for ranks, group in groups.items() if rank in ranks), None)


def links_of(parallel: ParallelConfig) -> int:
    """Return the number of communicators for messages within a pipeline.

    These are `num_links` communicators between neighbours. With --vocab-parallel-pipeline and more
    than two ranks there is another one, for messages to all ranks. The pipeline's own communicator
    is not used, because its receives would occupy more thread blocks while they wait for senders.
    """
    size = parallel.pipeline_model_parallel_size
    sends_to_all = parallel.vocab_parallel_pipeline and size > 2
    return num_links(size) + sends_to_all


def num_links(size: int) -> int:
    """Return the number of one-directional communicators that a ring of `size` ranks needs.

    NCCL runs the calls on one communicator one after another, so a receive whose sender is late
    holds up every message after it. With a communicator for each neighbour and direction, such a
    receive only holds up receives from the same neighbour. So receives can be posted early.
    """
    if size == 1:
        return 0
    if size == 2:
        return 2
    # Two directions for each colour, see `link`.
    return 4 + 2 * (size % 2)


def link(src: int, dst: int, size: int) -> int | None:
    """Return the index of the communicator from src to dst; None if they are not neighbours.

    The ranks are a ring. Its edges 0-1, 2-3, ... have no rank in common, so they share two
    communicators, one for each direction. Edges 1-2, 3-4, ... share two others. In a ring of odd
    size, the edge from the last rank to rank 0 has two more.

    Args:
        size: number of ranks in the ring.
    Returns: an index in 0..num_links(size) - 1.
    """
    low, high = sorted((src, dst))
    if high - low not in (1, size - 1):
        return None
    edge = low if high - low == 1 else high
    closes_odd_ring = size % 2 and edge == size - 1
    colour = 2 if closes_odd_ring else edge % 2
    return 2 * colour + (src < dst)


def host_group_of(sets: Sets, rank: int, minutes: float) -> dist.ProcessGroup | None:
    """Return a group for tensors on the host, of the set that has this rank.

    Every rank of the world must call this function with all sets.

    Args:
        sets: disjoint sets of global ranks.
        rank: this global rank.
        minutes: timeout of the group's messages.
    Returns: the group; None if no set has the rank.
    """
    timeout = timedelta(minutes=minutes)
    groups = {ranks: dist.new_group(list(ranks), timeout, backend="gloo") for ranks in sets}
    return next((group for ranks, group in groups.items() if rank in ranks), None)
