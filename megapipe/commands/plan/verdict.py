"""Say whether a plan fits: in the memory of a device, and in the memory of a node's host.

A plan counts weights, gradients, optimizer state and activations. Some memory of a device is
reserved for what it does not count. Whatever ranks keep on the host, all ranks of a node share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from megapipe.config import Config
from megapipe.plan import GIB, Plan, pieces_of
from megapipe.plan.logits import FREE
from megapipe.plan.seconds.device import DEVICES, Device, sizes_of
from megapipe.plan.seconds.messages import expert_extent
from megapipe.plan.seconds.step import TimedPlan
from megapipe.plan.table import fits, host_line, host_of

MEMORY = 80.0
"""GiB of a device, an H100's, if --rates does not know the memory of its device."""
RESERVED = (
    f"reserved: {FREE:.0%} of a device or --reserved-gib, for CUDA, NCCL's buffers, workspaces and "
    "fragments"
)
HOST = (
    "on a host: saved state, sharded weights at the start, copies; --no-save-optim saves weights "
    "alone"
)
_BUSY = 1.3
"""Tokens of the busiest rank's experts over the mean, for which a plan says what they need.

docs/experts.md shows where the log of a run has its own number.
"""
_PUBLISHED = ((1.90, 1.35), (3.42, 1.69))
"""Two layouts of experts between nodes: (predicted, measured) times of one within nodes.

docs/log/performance.md has these published runs.
"""
NO_HOST = "without room on the host to start, or for a save and copied activations"


@dataclass(frozen=True)
class Machine:
    """The memory of a device and of its node's host.

    `has_room` and `refuses` judge a plan. `fits` does so in words, and `assumed` for a memory that
    nobody gave.

    Attributes:
        device: bytes of a device.
        reserved: the part of these that plans must leave free.
        host: bytes of memory of a node's host.
        ranks: number of ranks that share a host.
    """

    device: float
    reserved: float = 0.0
    host: float = inf
    ranks: int = 1

    def __str__(self) -> str:
        text = f"{self.device / GIB:g} GiB, {self.reserved / GIB:.3g} of them reserved"
        if self.host < inf:
            text += f"; {self.ranks} on a host of {self.host / GIB:,.5g} GiB"
        return text

    @property
    def limit(self) -> float:
        """Return the bytes of a device that a plan may count."""
        return self.device - self.reserved

    def refuses(self, plan: Plan, config: Config) -> str:
        """Return why a run of a plan could not start or save, or an empty text."""
        return NO_HOST * (self.ranks * host_of(plan, config).most > self.host)

    def has_room(self, x: TimedPlan) -> bool:
        """Return whether a plan fits a device, and could start and save on a host."""
        return x.peak <= self.limit and not self.refuses(x.plan, x.config)

    def fits(self, plan: Plan, config: Config) -> str:
        """Return, in words, what a plan needs on a device and on a host, and whether it fits."""
        of_device = fits(plan, self.device, self.reserved)
        return f"{of_device}; {host_line(plan, config, self.ranks, self.host)}"

    def assumed(self, plan: Plan, config: Config) -> str:
        """Return `fits` for an assumed memory, without the host where it has room."""
        of_device = fits(plan, self.device, self.reserved)
        text = f"assumed: {self.device / GIB:g} GiB a device; {of_device}"
        if self.refuses(plan, config):
            text += f"; {host_line(plan, config, self.ranks, self.host)}"
        return text


def other_device(memory_gib: float | None, device: Device) -> list[str]:
    """Return a line if --memory-gib is not the memory of the device whose speeds are assumed.

    Without --memory-gib the line says whether the memory of this device is not known. Less memory
    by up to a tenth is taken for what a device of this name shows.

    Args:
        memory_gib: the value of --memory-gib; None if it is not given.
        device: the device of --rates.
    """
    known = device.capacity / GIB
    if memory_gib is None and not known and device != Device():
        another = " or ".join([*(f"--rates {name}" for name in sizes_of(device)), "--memory-gib"])
        return [
            f"the memory of a device is not known ({device.source}): {MEMORY:g} GiB are assumed, "
            f"and {another} says another"
        ]
    if memory_gib is None or not known or 0.9 * known <= memory_gib <= known:
        return []
    equal = [name for name, x in DEVICES.items() if x.capacity == memory_gib * GIB]
    names = " or ".join(equal) or f"one of {', '.join(DEVICES)}, or a .json"
    return [
        f"{memory_gib:g} GiB is not the memory of the device whose speeds are assumed, {known:g} "
        f"GiB ({device.source}): name yours by --rates {names}"
    ]


@dataclass(frozen=True)
class MemoryFlags:
    """The flags of `megapipe plan` on memory. `machine` returns what they say."""

    memory_gib: float | None = None
    """Memory of a device, to say what fits. Default: the memory of the device that --rates names;
    80 where that is not known."""
    reserved_gib: float | None = None
    """Memory of a device that plans leave free for what they do not count: CUDA's context, NCCL's
    buffers, workspaces, fragments. Default: a tenth of --memory-gib."""
    host_memory_gib: float | None = None
    """Memory of a node's host. Default: host of --rates, 2,048 for an H100."""

    def machine(self, device: Device, ranks: int) -> Machine:
        """Return the memory of a device and of a host.

        Args:
            device: has the number of devices of a node, and by default the memory of its host.
            ranks: the number of processes of the run.
        """
        memory = self._gib(device) * GIB
        reserved = FREE * memory if self.reserved_gib is None else self.reserved_gib * GIB
        host = device.host if self.host_memory_gib is None else self.host_memory_gib * GIB
        return Machine(memory, reserved, host, min(device.node, ranks))

    def _gib(self, device: Device) -> float:
        return self.memory_gib or device.capacity / GIB or MEMORY

    def wrong_sizes(self, device: Device) -> Iterator[str]:
        """Yield a text for each number out of range.

        Args:
            device: the device of --rates.
        """
        for flag, size in (
            ("--memory-gib", self.memory_gib),
            ("--host-memory-gib", self.host_memory_gib),
        ):
            if size is not None and not 0 < size < inf:
                yield f"{flag} must be a number above 0, got {size:g}."
        reserved = self.reserved_gib
        memory = self._gib(device)
        if reserved is not None and not 0 <= reserved < memory:
            yield f"--reserved-gib must be from 0 to less than {memory:g}, got {reserved:g}."


def of_busy_experts(plan: Plan, config: Config) -> float:
    """Return the bytes that an uneven load of the experts adds to the peak of a plan.

    The busiest rank has _BUSY times the mean of the tokens. The result is 0 if the load changes no
    rank's memory: each rank has all experts, or experts are padded to their capacity.
    """
    load = _load(config)
    if config.parallel.expert_model_parallel_size == 1 or load <= 1:
        return 0.0
    # Experts that are padded to this capacity hold what the busiest ones hold.
    busy = config.with_fields(
        moe_expert_capacity_factor=load, moe_pad_expert_input_to_capacity=True
    )
    peaks = replace(plan, pieces=pieces_of(busy, busy.model)).peak_bytes
    return max(peaks) - max(plan.peak_bytes)


def _load(config: Config) -> float:
    """Return the tokens of the busiest rank's experts over the mean; 1 for padded experts."""
    capacity = config.model.capacity_factor
    if not config.model.has_experts or config.model.moe_pad_expert_input_to_capacity:
        return 1.0
    return _BUSY if capacity is None else min(_BUSY, capacity)


def load_line(plan: Plan, config: Config, limit: float = inf) -> str:
    """Return a line on the memory that an uneven load of the experts adds to a plan.

    A plan assumes an even load. The line is "" if the load changes no rank's memory.

    Args:
        limit: bytes of a device that the plan may take.
    """
    more = of_busy_experts(plan, config)
    if not more:
        return ""
    text = (
        f"an even load of the experts is assumed: with {_load(config):g} x the mean of the tokens "
        f"a rank needs up to {more / GIB:.3g} GiB more, and its passes take longer"
    )
    short = max(plan.peak_bytes) + more - limit
    if short <= 0 or max(plan.peak_bytes) > limit:
        return text
    return f"{text}. That is {short / GIB:.3g} more than it may take"


def crosses(config: Config, device: Device) -> bool:
    """Return whether the experts of a layout exchange tokens between nodes."""
    return config.model.has_experts and expert_extent(config) > device.node


def crossing_line(config: Config, device: Device) -> str:
    """Return a line that warns of the predicted time of experts' messages between nodes.

    The line is "" if these messages stay within a node, or if there are no experts.
    """
    if not crosses(config, device):
        return ""
    told = " and ".join(f"{predicted:.2f}" for predicted, _ in _PUBLISHED)
    took = " and ".join(f"{measured:.2f}" for _, measured in _PUBLISHED)
    return (
        f"its experts exchange tokens between nodes. Two such layouts took {took} times as long as "
        f"one within nodes in published runs, where {told} times were predicted: so this plan may "
        "be much faster than is said here, and a layout within nodes gain less"
    )


def published_range(x: TimedPlan, other: TimedPlan, device: Device) -> str:
    """Return how much longer a plan may take than another one by the two published pairs.

    The text is such as "1.3 to 1.9 times as long". It is "" unless experts exchange tokens between
    nodes in the first plan alone: how far the ratio of two other plans is off is not known.
    """
    if not crosses(x.config, device) or crosses(other.config, device):
        return ""
    ratio = x.step / other.step
    low, high = sorted(ratio * measured / told for told, measured in _PUBLISHED)
    return f"{low:.1f} to {high:.1f} times as long"
