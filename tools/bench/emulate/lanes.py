"""Copies to the host and back on emulated devices.

Each stream of copies is a thread that sleeps, and ranks that share a switch take turns.

A lane runs its copies one after the other in the order of the table, beside the passes. Ranks that
share one see in memory that all have mapped which of its copies are over.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Event

import numpy as np
import torch

from megapipe.distributed.mesh import ProcessMesh
from megapipe.schedule import Costs, Kind, Pass, Schedule
from megapipe.schedule.kinds import Lane
from tools.bench.emulate.device import Device, sharpen_sleep

_LOOK = 1e-4
"""Seconds between two looks at whether another rank's copy is over."""


class Lanes:
    """Streams of copies of a rank, and the copies of its stages."""

    def __init__(self, mesh: ProcessMesh, schedule: Schedule, costs: Costs, device: Device) -> None:
        place = schedule.placement
        self.seconds, self.device = costs.durations(place), device
        self.share = place.num_ranks / place.chain
        self._workers = {
            lane: ThreadPoolExecutor(1, initializer=sharpen_sleep) for lane in (Lane.D2H, Lane.H2D)
        }
        orders = [lane.order for lane in schedule.shared]
        self._number = {x: i for i, x in enumerate(x for order in orders for x in order)}
        self._before = {item: before for order in orders for before, item in pairwise(order)}
        self._over = (
            _seen_by_all(mesh, len(self._number)) if orders else np.zeros(0, dtype=np.uint8)
        )
        self._step = 0
        self._there: dict[tuple[int, int], Event] = {}

    def begin_step(self) -> None:
        """Begin a step: forget the copies of the last one."""
        self._step = self._step % 255 + 1
        self._there.clear()

    def offload(self, stage: int, microbatch: int) -> Callable[[], None]:
        """Begin the copy O to the host.

        The object that is returned does not wait: the copy back waits itself.
        """
        self._there[stage, microbatch] = there = Event()
        self._workers[Lane.D2H].submit(self._run, Pass(Kind.O, stage, microbatch), None, there)
        return lambda: None

    def load(self, stage: int, microbatch: int) -> Callable[[], None]:
        """Begin the copy L from the host. The object that is returned waits for its end."""
        back = Event()
        self._workers[Lane.H2D].submit(
            self._run, Pass(Kind.L, stage, microbatch), self._there.pop((stage, microbatch)), back
        )
        return lambda: (back.wait(), None)[1]

    def _run(self, item: Pass, after: Event | None, done: Event) -> None:
        if after is not None:
            after.wait()
        before = self._before.get(item)
        while before is not None and self._over[self._number[before]] != self._step:
            time.sleep(_LOOK)
        if item.kind is Kind.L:
            self.device.hold(self.share)
        time.sleep(self.seconds[item.kind][item.stage])
        if item.kind is Kind.O:
            self.device.hold(-self.share)
        if item in self._number:
            self._over[self._number[item]] = self._step
        done.set()


def _seen_by_all(mesh: ProcessMesh, size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Bytes that all ranks of the machine see, zero at first. Collective."""
    world, name = mesh.world, torch.zeros(256, dtype=torch.uint8)
    if world.rank == 0:
        handle, path = tempfile.mkstemp()
        os.ftruncate(handle, size)
        os.close(handle)
        name[: len(path)] = torch.tensor(list(os.fsencode(path)), dtype=torch.uint8)
    path = os.fsdecode(bytes(world.broadcast(name).tolist()).rstrip(b"\0"))
    seen: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = np.memmap(
        path, dtype=np.uint8, mode="r+", shape=(size,)
    )
    world.all_gather(torch.zeros(1))
    if world.rank == 0:
        os.unlink(path)
    return seen
