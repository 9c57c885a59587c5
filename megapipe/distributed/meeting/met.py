"""The ranks of a run after they have met and agreed, before they have process groups."""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from megapipe.config import ParallelConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.device import gpu_name
from megapipe.distributed.grid import Grids
from megapipe.distributed.groups import check_backend
from megapipe.distributed.meeting.agreement import agree, agree_in, taken
from megapipe.distributed.meeting.meeting import meet
from megapipe.errors import ConfigError, UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Met:
    """The ranks of a run after they have met at one store and agreed on their facts.

    Facts are values that must be equal on all ranks, such as sizes of axes. `of` waits for the
    ranks and compares the facts. `from_first` sends rank 0's result to all ranks before any group
    exists.

    Attributes:
        rank, world_size: this process's rank, and the number of processes.
        is_guest: whether the caller's program had initialised torch.distributed before.
        store: the store that all ranks share; None if `is_guest`, and for a single rank.
    """

    rank: int
    world_size: int
    is_guest: bool
    store: PrefixStore | None

    @staticmethod
    def of(
        parallel: ParallelConfig, device: torch.device, facts: Mapping[str, str] | None = None
    ) -> Met:
        """Wait for all ranks, as torchrun started them, and check that they agree.

        Args:
            parallel: the sizes of the axes, and the timeout.
            device: device of this process.
            facts: {name: value} that must be equal on all ranks; None for the sizes of the axes.
        Raises: ConfigError if the number of ranks is not a multiple of the sizes, or if ranks do
            not arrive in time. ConfigError if `facts` or the kind of device differ between ranks,
            or if two ranks have one GPU. ConfigError if torch.distributed was initialised with a
            backend that does not fit the device.
        """
        guest = dist.is_initialized()
        if guest:
            world_size = dist.get_world_size()
            rank = dist.get_rank()
        else:
            world_size = int(os.environ.get("WORLD_SIZE", "1"))
            rank = int(os.environ.get("RANK", "0"))
        grids = Grids.of(parallel, world_size)
        # Nobody to meet, and no groups: a single rank runs without torch.distributed.
        if world_size == 1:
            return Met(rank, world_size, guest, None)
        # A rank without its GPU would otherwise compute on a CPU, and hang the first collective.
        equal = {**(facts or grids.sizes), "the kind of device": device.type}
        if guest:
            check_backend(device)
            world = Axis(rank, world_size, tuple(range(world_size)), dist.group.WORLD, device)
            agree_in(world, equal)
            return Met(rank, world_size, guest, None)
        store = meet(rank, world_size, parallel.distributed_timeout_minutes * 60)
        gpu = taken(PrefixStore("gpus", store), gpu_name(device))
        agree(PrefixStore("agreement", store), rank, world_size, equal | gpu)
        return Met(rank, world_size, guest, store)

    def from_first(self, name: str, make: Callable[[], T]) -> T:
        """Call `make` on rank 0, and return its result there, and copies of it on other ranks.

        Args:
            name: a key of the store for the result; another one for each call.
            make: the function, whose result is pickled.
        Raises: the error of `make` on rank 0, and a ConfigError with its text on other ranks.
        """
        if self.world_size == 1:
            return make()
        if self.rank > 0:
            # Pickled by rank 0 of this run, and a plan of a large table is megabytes of repetition.
            result, problems = pickle.loads(zlib.decompress(self._receive(name)))
            if problems:
                raise ConfigError(problems)
            return result  # type: ignore[no-any-return]
        try:
            result = make()
        except Exception as error:
            found = error.problems if isinstance(error, UserError) else (f"on rank 0: {error!r}",)
            # The others wait for an answer, also for this one.
            self._send(name, zlib.compress(pickle.dumps((None, found))))
            raise
        self._send(name, zlib.compress(pickle.dumps((result, ()))))
        return result

    def _send(self, name: str, data: bytes) -> None:
        if self.store is None:
            dist.broadcast_object_list([data], src=0)
        else:
            # The store takes bytes as well as text, which torch's type does not say.
            self.store.set(f"from first: {name}", data)  # type: ignore[arg-type]

    def _receive(self, name: str) -> bytes:
        if self.store is None:
            received: list[bytes] = [b""]
            dist.broadcast_object_list(received, src=0)
            return received[0]
        return self.store.get(f"from first: {name}")
