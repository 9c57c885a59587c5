"""Say whether a plan has room: in a device's memory, in a host's, and on the disk of --save."""

from __future__ import annotations

from pathlib import Path

import torch

from megapipe.checkpoint.commit import refuse_without_room
from megapipe.checks.inputs import ask
from megapipe.config import Config
from megapipe.data.files import nearest_folder
from megapipe.distributed.device import has_cuda, memory_of
from megapipe.plan import GIB, Plan
from megapipe.plan.seconds.device import device_of, sizes_of
from megapipe.plan.seconds.page import save_seconds
from megapipe.plan.table import checkpoint_bytes, fits_line, host_line, host_of


def memory_here() -> int | None:
    """Return the bytes of memory of this machine's first GPU; None without GPUs."""
    return memory_of(torch.device("cuda", 0)) if has_cuda() else None


def device_line(config: Config, plan: Plan) -> str:
    """Return the line of a launch on whether the plan fits the memory of a device.

    The device is this machine's first GPU, or the one of --rates where it is given or there is no
    GPU. The text is empty for a run on CPUs without --rates. For a device whose memory is not
    known, it says so.
    """
    device = device_of(config)
    if device is None:
        return ""
    here = memory_here()
    if here is not None and config.check.rates is None:
        return fits_line(plan, here, "this GPU")
    if not device.capacity:
        names = " or ".join(f"--rates {name}" for name in sizes_of(device))
        remedy = f"Give {names}" if names else "Add it to the file"
        return (
            f"the memory of a device is not known: --rates ({device.source}) has no capacity "
            f"(bytes). {remedy}; megapipe plan --memory-gib 80 says whether it fits too"
        )
    return fits_line(plan, device.capacity, f"a device by --rates ({device.source})")


def no_host_line(config: Config, plan: Plan) -> str:
    """Return a line if a node's host is too small for its ranks; "" if they fit.

    The host is the one of the device that --rates names.
    """
    device = device_of(config)
    if device is None:
        return ""
    ranks = min(device.node, config.world_size)
    if ranks * host_of(plan, config).most <= device.host:
        return ""
    text = host_line(plan, config, ranks, device.host)
    return f"memory of a host by --rates ({device.source}), {device.host / GIB:,.4g} GiB: {text}"


def disk_problems(config: Config, plan: Plan) -> list[str]:
    """Return a text if the disk of --save has no room for a checkpoint; an empty list if it has."""
    save = config.checkpoint.save
    if save is None:
        return []
    size, _ = checkpoint_bytes(plan, config)
    return ask(lambda: refuse_without_room(Path(save), size, nearest_folder(save)))


def save_line(config: Config, plan: Plan) -> str:
    """Return a line on the time of the first save, which steps wait for; "" without --save."""
    if config.checkpoint.save is None:
        return ""
    size, _ = checkpoint_bytes(plan, config)
    return f"seconds of the first save: {save_seconds(size, device_of(config))}"
