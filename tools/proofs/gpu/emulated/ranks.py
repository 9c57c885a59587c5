"""Ranks as threads with an emulated device each, as megapipe.pipeline_parallel.threads runs them
on a CPU.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from megapipe.config import ParallelConfig
from megapipe.distributed.axis import CPU
from megapipe.distributed.grid import Grids
from megapipe.distributed.groups import Sets, num_links
from megapipe.distributed.mesh import SHARES, ProcessMesh, build_mesh
from megapipe.tensor_parallel import rng
from tools.proofs.gpu.emulated import nccl
from tools.proofs.gpu.emulated.streams import Library, running

T = TypeVar("T")


@contextmanager
def devices(
    *, late: bool = True, waits: Callable[[str], None] = lambda why: None
) -> Iterator[Library]:
    """Inside, ranks can train on devices. Random numbers are a CPU's."""
    draw = rng.generator

    def drawn(device: torch.device, *name: object) -> torch.Generator:
        return draw(CPU, *name)

    with ExitStack() as stack:
        lib = stack.enter_context(running(waits, late=late))
        stack.enter_context(mock.patch.object(rng, "generator", drawn))
        stack.enter_context(mock.patch.object(dist, "P2POp", nccl.Call))
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", nccl.batch))
        yield lib


def run_ranks(
    body: Callable[[ProcessMesh], T],
    *,
    tp: int = 1,
    cp: int = 1,
    dp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    shares: Mapping[str, Sequence[int]] = SHARES,
    extra_links: int = 0,
    timeout_s: float = 30.0,
) -> list[T]:
    """Call `body(mesh)` once for each rank, whose device is that of its number. See run_threads.

    extra_links: communicators beside those of neighbours, see groups.links_of.
    """
    world = tp * cp * dp * pp
    grids = Grids.of(ParallelConfig(tp, pp, cp, ep, etp), world)
    store, known = HashStore(), nccl.Shared()
    results: list[Any] = [None] * world
    done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def rank_main(rank: int) -> None:
        device = torch.device("cuda", rank)

        def make_group(name: str, sets: Sets) -> Any:
            ranks = next((ranks for ranks in sets if rank in ranks), None)
            if ranks is None:
                return None
            prefix = PrefixStore(f"{name}{ranks}", store)
            position, size = ranks.index(rank), len(ranks)
            group = dist.ProcessGroup(prefix, position, size)
            gloo = ProcessGroupGloo(prefix, position, size, timedelta(seconds=timeout_s))
            group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
            title = f"{name} {list(ranks)}"
            return nccl.Communicator(group, title, position, known, device)

        try:
            torch.cuda.set_device(device)
            links = num_links(pp) + (extra_links if pp > 2 else 0)
            mesh = build_mesh(
                grids, rank, device, make_group, shares=shares, num_links=links if pp > 1 else 0
            )
            results[rank] = body(mesh.activate())
            torch.cuda.synchronize()
            done.put(None)
        except BaseException as error:
            error.add_note(f"on rank {rank} of {world}")
            done.put(error)

    threads = [
        threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world)
    ]
    for thread in threads:
        thread.start()
    for _ in range(world):
        error = done.get()
        if error is not None:
            raise error
    for thread in threads:
        thread.join()
    return results
