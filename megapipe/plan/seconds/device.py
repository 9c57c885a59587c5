"""The speeds of a device and its links, from which a plan's seconds are predicted."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.plan.families.offload import FLOPS_PER_BYTE

Sizes = tuple[tuple[float, float], ...]
"""(size, its rate or its time) by ascending size."""


@dataclass(frozen=True)
class Device:
    """The speeds of a device and its links. All devices of a run are equal.

    The defaults are for an H100 SXM in a node of eight. The peak is NVIDIA's for dense bf16, and
    matrix products are assumed to reach half of it. `seconds` returns the time of collectives,
    `rate` the FLOP/s of products, and `speed` the bytes per second of a link. `links`, `assumed`
    and `to_host` return text for a reader.

    Attributes:
        flops: FLOP/s that matrix products of this model reach, at most.
        node: number of devices in a node, which fast links connect.
        inside: bytes per second that a device sends within a node.
        outside: bytes per second that a device sends to another node.
        latency: seconds of each message and of each collective.
        overhead: seconds that each pass takes in addition to its work.
        peak: FLOP/s of the data sheet, in which MFU is measured.
        source: where these numbers come from, in words that can stand in parentheses.
        memory: memory bandwidth, in bytes per second that an update reads and writes; 0 if updates
            are to take no time.
        host: bytes of memory of a node's host. The default is a DGX H100's, 2 TiB.
        disk: bytes per second that all ranks together write of a checkpoint; 0 if not known.
        capacity: bytes of the device's memory; 0 if not known. If it is equal to `host`, the
            device is a CPU, whose ranks share this memory: see `among`.
        by_product: pairs (FLOP of a matrix product, its FLOP/s); () if products of every size reach
            `flops`.
        by_message: pairs (bytes of a message within a node, its seconds); () to use `inside` and
            `latency`.
        by_far_message: the same for messages to another node; () to use `outside`.
    """

    flops: float = 5e14
    node: int = 8
    inside: float = 3e11
    outside: float = 4e10
    latency: float = 1e-5
    overhead: float = 4e-4
    peak: float = 9.89e14
    source: str = "H100's data sheet"
    memory: float = 0.0
    host: float = 2.0**41
    disk: float = 0.0
    capacity: float = 0.0
    by_product: Sizes = ()
    by_message: Sizes = ()
    by_far_message: Sizes = ()

    def among(self, ranks: int) -> Device:
        """Return this device for a run of `ranks`: on a CPU each has an equal part of the host."""
        if self.capacity != self.host:
            return self
        return replace(self, capacity=self.host / min(self.node, ranks))

    @property
    def links(self) -> str:
        """Return, in words, the bandwidths within and between nodes, and the latency."""
        near = f"{self.inside / 1e9:.4g} GB/s among {self.node}"
        far = f"{self.outside / 1e9:.4g} GB/s beyond"
        return f"{near}, {far}, {self.latency * 1e6:.4g} us a message"

    @property
    def assumed(self) -> str:
        """Return, in words, all speeds and where they come from."""
        products = f"{self.flops / 1e12:.4g} TFLOP/s of {self.peak / 1e12:.4g}"
        if self.by_product:
            products = f"{self.by_product[0][1] / 1e12:.4g} to {products} by their size"
        passes = f"{self.overhead * 1e6:.4g} us more a pass"
        return f"products at {products}, {passes}, {self.links} ({self.source})"

    @property
    def to_host(self) -> str:
        """Return, in words, the bandwidth of copies of activations between device and host."""
        return f"{self.flops / FLOPS_PER_BYTE / 1e9:.4g} GB/s to the host"

    def seconds(self, sent: float, extent: int, calls: int = 1) -> float:
        """Return the seconds that collectives or messages take.

        Args:
            sent: bytes that each rank sends, summed over all `calls`.
            extent: number of devices from the first to the last rank of the group, both included.
                If it exceeds a node, the slower links between nodes count.
            calls: number of collectives. Each adds the latency.
        """
        if not sent:
            return 0.0
        times = self.by_message if extent <= self.node else self.by_far_message
        if times:
            return calls * _time_of(sent / calls, times)
        return sent / self.speed(extent) + calls * self.latency

    def rate(self, product: float) -> float:
        """Return the FLOP/s of passes, given the size of their matrix products.

        Args:
            product: FLOP of one product, as a mean over the products.
        """
        if not self.by_product:
            return self.flops
        return _between(product, self.by_product)

    def speed(self, extent: int) -> float:
        """Return the bytes per second that a device sends to another device.

        Args:
            extent: number of devices from the first to the last rank of their group, both included.
                If it exceeds a node, the slower links between nodes count.
        """
        return self.inside if extent <= self.node else self.outside


def _between(size: float, known: Sizes) -> float:
    """Return a value for `size`, by linear interpolation between known sizes.

    Sizes below the smallest known one have the value of the smallest, sizes above the largest one
    the value of the largest.

    Args:
        known: pairs (size, value), ascending.
    """
    if size <= known[0][0]:
        return known[0][1]
    for (less, before), (more, after) in pairwise(known):
        if size <= more:
            return before + (after - before) * (size - less) / (more - less)
    return known[-1][1]


def _time_of(size: float, known: Sizes) -> float:
    """Return the seconds of a message of `size` bytes.

    Above the largest known size, bytes per second stay the same.

    Args:
        known: pairs (bytes, seconds), ascending.
    """
    largest, _ = known[-1]
    return _between(size, known) * max(1.0, size / largest)


NOTHING = Device(inside=inf, outside=inf, latency=0.0)
"""A device whose links take no time."""

_A100 = Device(flops=1.9e14, inside=2.2e11, outside=2e10, peak=3.12e14, source="A100's data sheet")
DEVICES = {
    "h100": Device(capacity=80 * 2.0**30),
    "h200": Device(source="H200's data sheet", capacity=141 * 2.0**30),
    "h800": Device(inside=1.6e11, source="H800's data sheet", capacity=80 * 2.0**30),
    "a100": _A100,
    "a100-40": replace(_A100, capacity=40 * 2.0**30),
    "a100-80": replace(_A100, capacity=80 * 2.0**30),
    "b200": Device(
        flops=1.1e15,
        inside=6e11,
        peak=2.25e15,
        source="B200's data sheet",
        capacity=180 * 2.0**30,
    ),
    # "NVIDIA Ada GPU architecture", appendix A: 165.2 TFLOP/s with sums in float32, 24 GB, PCIe 4.0
    # x16 of 32 GB/s in one direction. No peer access: a message goes through the host.
    "rtx4090": Device(
        flops=1e14,
        inside=1.1e10,
        outside=1.25e9,
        peak=1.652e14,
        source="RTX 4090's data sheet",
        host=2.0**38,
        capacity=24 * 2.0**30,
    ),
    # "NVIDIA L40S", data sheet: 362.05 TFLOP/s, 48 GB, PCIe 4.0 x16 of 64 GB/s in both directions.
    "l40s": Device(
        flops=1.8e14,
        inside=2.1e10,
        outside=1e10,
        peak=3.62e14,
        source="L40S's data sheet",
        host=2.0**40,
        capacity=48 * 2.0**30,
    ),
    # "AMD Instinct MI300X accelerator", data sheet: 1307.4 TFLOP/s, 192 GB, seven links of 128 GB/s
    # in both directions.
    "mi300x": Device(
        flops=6.5e14,
        peak=1.307e15,
        source="MI300X's data sheet",
        capacity=192 * 2.0**30,
    ),
}
"""Devices by name, as --rates takes them.

Peaks are of dense bf16. Products are assumed to reach half of them, on an A100 and an RTX 4090 60%.
Links are assumed to reach two thirds of what a device can send in one direction: over NVLink within
a node, and over one InfiniBand card a device beyond it (400 Gbit/s; with A100s 200, with L40S 100).
An RTX 4090 is assumed to reach one third within a node, where each byte crosses the host's memory,
and its node of eight to share a card of 100 Gbit/s. An A100 has 40 or 80 GiB: its plain name leaves
the capacity open.
"""


def load_device(flag: str, given: str) -> Device:
    """Return a device, given by its name or by a JSON file with some fields of `Device`.

    Fields that the file leaves out keep the defaults of an H100, but a missing capacity is 0.

    Args:
        flag: the flag that gave the name or file, for errors.
        given: a name of DEVICES, or the path of a .json.
    Raises: ConfigError that names the file and the field.
    """
    # The name as its maker writes it is meant too, such as RTX 4090 or A100 80GB.
    name = re.sub("[ -]|gi?b$", "", given.lower())
    for known_as, device in DEVICES.items():
        if name == known_as.replace("-", ""):
            return device
    try:
        read = json.loads(Path(given).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{flag} {given} is neither a device that is known by name ({', '.join(DEVICES)}) nor "
            "a file. Give one of these names, or a .json."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{flag} {given} cannot be read: {error}. Give a .json, or one of {', '.join(DEVICES)}."
        ) from None
    names = [field.name for field in fields(Device) if not field.name.startswith("by_")]
    if not isinstance(read, dict) or read.keys() - set(names):
        raise ConfigError(
            f"{flag} {given} must be a JSON object with only {', '.join(names)}, "
            'such as {"flops": 5e14, "node": 8}.'
        )
    known = dict[str, Any]()
    for name, value in read.items():
        if name == "source":
            if not isinstance(value, str):
                raise ConfigError(f'{flag} {given}: source must be a text, such as "measured".')
            known[name] = value
        elif name in _BY_SIZE and isinstance(value, list):
            known = _by_size(f"{flag} {given}: {name}", name, value) | known
        else:
            if not _is_number(value, or_zero=name in ("latency", "overhead")):
                raise ConfigError(
                    f"{flag} {given}: {name} must be a number above 0, from 1e-30 to 1e30, "
                    f"got {json.dumps(value)[:100]}."
                )
            known[name] = value
    source = given
    if missing := [name for name in ("flops", "peak", "inside", "outside") if name not in known]:
        source = f"{given}, with an H100's {', '.join(missing)}"
    return Device(**{"source": source, **known})


_BY_SIZE = {"flops": "by_product", "inside": "by_message", "outside": "by_far_message"}
"""Fields that a file may give by size, and the fields of Device that keep the list."""


def _is_number(value: object, *, or_zero: bool = False) -> bool:
    """Return whether parsed JSON is a positive number, or zero if `or_zero`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 1e-30 <= value <= 1e30 or (or_zero and value == 0)


def _by_size(where: str, name: str, rows: Sequence[object]) -> dict[str, Any]:
    """Return {field of `Device`: value} for a field that a file gives as a list by size.

    For "flops" the fields are `by_product`, the list itself, and `flops`, its largest speed. For
    links they are the list, the largest speed of a message, and within nodes also `latency`.

    Args:
        where: flag, file and field in words, for errors.
        name: "flops", "inside" or "outside".
        rows: for "flops" pairs (FLOP of a product, FLOP/s), else pairs (bytes of a message,
            seconds).
    Raises: ConfigError if `rows` are no pairs in ascending order.
    """
    pairs: list[tuple[float, float]] = []
    for row in rows:
        if not isinstance(row, list) or len(row) != 2 or not all(map(_is_number, row)):
            pairs = []
            break
        pairs.append((float(row[0]), float(row[1])))
    ascends = all(a[0] < b[0] and (a[1] <= b[1] or name == "flops") for a, b in pairwise(pairs))
    if not pairs or not ascends:
        example = "[[1e6, 1e12], [1e9, 4e14]]"
        what = "[FLOP of a product, FLOP/s]"
        if name != "flops":
            example = "[[1e3, 1e-5], [1e6, 2e-5]]"
            what = "[bytes of a message, seconds]"
        raise ConfigError(
            f"{where} must be a number above 0, or pairs {what} by ascending size, with no message "
            f"faster than a smaller one, such as {example}."
        )
    found: dict[str, Any] = {_BY_SIZE[name]: tuple(pairs)}
    if name == "flops":
        found[name] = max(rate for _, rate in pairs)
    else:
        found[name] = max(size / seconds for size, seconds in pairs)
    if name == "inside":
        # For the words that describe a device: the time of a small message.
        found["latency"] = pairs[0][1]
    return found


def device_of(config: Config) -> Device | None:
    """Return the device that --rates describes.

    Without the flag it is an H100 for a run on GPUs, and None for a run on CPUs, because their
    rates are not known.

    Raises: ConfigError if the file of --rates cannot be read.
    """
    given = config.check.rates
    if given is not None:
        return load_device("--rates", given).among(config.check.world_size or config.world_size)
    if config.parallel.distributed_backend == "gloo":
        return None
    return DEVICES["h100"]


def sizes_of(device: Device) -> list[str]:
    """Return the names of DEVICES with the speeds of this device whose memory is known."""
    return [name for name, x in DEVICES.items() if x.capacity and x.source == device.source]


def capacity_of(config: Config) -> float:
    """Return the bytes of a device that --rates describes; 0 if they are not known.

    They count under --memory-limit-gib alone, and without it no file is read.
    """
    if config.check.rates is None or config.parallel.memory_limit_gib is None:
        return 0.0
    device = device_of(config)
    assert device is not None
    return device.capacity
