"""Ranks that are threads of one process, with an emulated device each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist

from megapipe.config import ParallelConfig
from megapipe.distributed.axis import CPU
from megapipe.distributed.groups import num_links
from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.threads import OnHost, run_on
from megapipe.tensor_parallel import rng
from tools.proofs.gpu.emulated import nccl
from tools.proofs.gpu.emulated.streams import Library, running

T = TypeVar("T")


@contextmanager
def devices(
    *, late: bool = True, waits: Callable[[str], None] = lambda why: None, memory: int = 0
) -> Iterator[Library]:
    """Inside, ranks can train on devices, see `running`. Random numbers are a CPU's."""
    draw = rng.generator

    def drawn(device: torch.device, *name: object) -> torch.Generator:
        return draw(CPU, *name)

    with ExitStack() as stack:
        lib = stack.enter_context(running(waits, late=late, memory=memory))
        stack.enter_context(mock.patch.object(rng, "generator", drawn))
        stack.enter_context(mock.patch.object(dist, "P2POp", nccl.Call))
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", nccl.batch))
        yield lib


class OnDevices(OnHost):
    """A device for each rank, that of its number, and communicators with NCCL's rules.

    Args:
        num_links: see `groups.num_links`.
    """

    def __init__(self, num_links: int = 0) -> None:
        self.num_links = num_links
        self._shared, self._made = nccl.Shared(), list[nccl.Communicator]()

    def begin(self, rank: int) -> torch.device:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        return device

    # A communicator has what the package asks of a group.
    def group(self, gloo: dist.ProcessGroup, name: str, rank: int, device: torch.device) -> Any:
        made = nccl.Communicator(gloo, name, rank, self._shared, device)
        self._made.append(made)
        return made

    def end(self) -> None:
        torch.cuda.synchronize()

    def close(self) -> None:
        """Let the threads of all communicators end."""
        for made in self._made:
            made.close()


def run_ranks(
    body: Callable[[ProcessMesh], T],
    *,
    tp: int = 1,
    cp: int = 1,
    dp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    extra_links: int = 0,
    **given: Any,
) -> list[T]:
    """Call `body(mesh)` once for each rank, as `run_threads`, on devices.

    extra_links: communicators beside those of neighbours, see groups.links_of.
    """
    links = num_links(pp) + (extra_links if pp > 2 else 0)
    where = OnDevices(links if pp > 1 else 0)
    try:
        return run_on(where, body, ParallelConfig(tp, pp, cp, ep, etp), dp=dp, **given)
    finally:
        where.close()
