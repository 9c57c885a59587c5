"""Run all ranks of a mesh as threads of one process, over real gloo groups on loopback.

Nothing in megapipe is global, so a rank is just a ProcessMesh. A laptop tries a schedule in
milliseconds.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from time import monotonic
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from megapipe.config import ParallelConfig
from megapipe.distributed.axis import CPU
from megapipe.distributed.grid import Grids
from megapipe.distributed.groups import Sets
from megapipe.distributed.mesh import SHARES, ProcessMesh, build_mesh

T = TypeVar("T")
GRACE_S = 3.0
"""Seconds that the end of the process waits for ranks that still run after another one's error."""


class OnHost:
    """The device and groups of ranks that run as threads.

    They are the CPU and gloo here. Subclasses are for devices of another kind.

    Attributes:
        num_links: number of communicators for messages between neighbours in the pipeline.
    """

    num_links = 0

    def begin(self, rank: int) -> torch.device:
        """Make a rank's device the current one of the calling thread, and return the device."""
        return CPU

    def group(
        self, gloo: dist.ProcessGroup, name: str, rank: int, device: torch.device
    ) -> dist.ProcessGroup:
        """Return the group that a rank uses: here the gloo group itself.

        `name` has the name of an axis and its ranks, and `rank` is the position among them.
        """
        return gloo

    def end(self) -> None:
        """Wait for the device of the calling thread, whose rank has returned."""


def run_threads(
    body: Callable[[ProcessMesh], T],
    *,
    tp: int = 1,
    cp: int = 1,
    dp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    shares: Mapping[str, Sequence[int]] = SHARES,
    timeout_s: float = 60,
) -> list[T]:
    """Call `body(mesh)` in a thread for each rank of a mesh, and return the results.

    Args:
        body: the function that each rank runs.
        tp, cp, dp, pp: numbers of tensor-, context-, data- and pipeline-parallel ranks.
        ep, etp: sizes of the experts' mesh over the same ranks; etp is tp by default.
        shares: {name of a group: the pipeline ranks that hold equal weights}, as `Plan.shares`.
        timeout_s: timeout of each collective, in seconds.
    Returns: the results in the order of ranks.
    Raises: the first error of any rank, at once. Ranks that wait for the failed rank run into their
        timeouts.
    """
    sizes = ParallelConfig(tp, pp, cp, ep, etp)
    return run_on(OnHost(), body, sizes, dp=dp, shares=shares, timeout_s=timeout_s)


def run_on(
    where: OnHost,
    body: Callable[[ProcessMesh], T],
    sizes: ParallelConfig,
    *,
    dp: int = 1,
    shares: Mapping[str, Sequence[int]] = SHARES,
    timeout_s: float = 60,
) -> list[T]:
    """Call `body(mesh)` in a thread for each rank, as `run_threads`, on devices of any kind.

    Args:
        where: the devices and groups of the ranks.
        sizes: numbers of tensor-, context-, pipeline- and expert-parallel ranks.
        dp: number of data-parallel ranks.
        shares: {name of a group: the pipeline ranks that hold equal weights}, as `Plan.shares`.
    """
    # Experts lie over the same ranks: their sizes do not multiply.
    stages = sizes.pipeline_model_parallel_size
    world = sizes.tensor_model_parallel_size * sizes.context_parallel_size * stages * dp
    grids = Grids.of(sizes, world)
    store = HashStore()
    # Each device of gloo has a thread that wakes 100 times a second, so all groups share one. It is
    # on loopback: the default device is at the address of the machine's name, if it has one.
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._threads = 2
    options._timeout = timedelta(seconds=timeout_s)
    results: list[T | None] = [None] * world
    done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def rank_main(rank: int) -> None:
        device = CPU

        def make_group(name: str, sets: Sets) -> dist.ProcessGroup | None:
            ranks = next((ranks for ranks in sets if rank in ranks), None)
            if ranks is None:
                return None
            # torch.distributed.new_group would need the global state of one rank per process.
            prefix = PrefixStore(f"{name}{ranks}", store)
            position = ranks.index(rank)
            size = len(ranks)
            group = dist.ProcessGroup(prefix, position, size)
            gloo = ProcessGroupGloo(prefix, position, size, options)
            group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
            return where.group(group, f"{name} {list(ranks)}", position, device)

        # Any error, also of a test's assertion: the thread would only print it.
        try:
            device = where.begin(rank)
            links = where.num_links
            mesh = build_mesh(grids, rank, device, make_group, shares=shares, num_links=links)
            results[rank] = body(mesh.activate())
            where.end()
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
            # A thread that releases a tensor while Python ends aborts the process.
            atexit.register(_wait, threads)
            raise error
    # A thread that leaves its groups while the program ends would abort it too.
    for thread in threads:
        thread.join()
    return results  # type: ignore[return-value]


def _wait(threads: Sequence[threading.Thread]) -> None:
    """Wait until these threads have ended, for all together at most `GRACE_S` seconds."""
    until = monotonic() + GRACE_S
    for thread in threads:
        thread.join(max(until - monotonic(), 0))
