"""Say the speeds of a device and its links, from which a plan's seconds are predicted."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path

from megapipe.config import Config
from megapipe.errors import ConfigError


@dataclass(frozen=True)
class Device:
    """The speeds of a device; all devices of a run are equal.

    The defaults are for an H100 SXM in a node of eight. The peak is NVIDIA's for dense bf16, and
    products of a GPT are assumed to reach half of it.

    Attributes:
        flops: FLOP/s that matrix products of this model reach.
        node: the number of devices that the fast links join.
        inside: bytes per second that a device sends within a node.
        outside: bytes per second that a device sends to another node.
        latency: seconds of each message and of each collective.
        overhead: seconds that each pass takes in addition to its work.
        peak: FLOP/s of the data sheet, in which MFU is measured.
        source: where these numbers come from, in words.
    """

    flops: float = 5e14
    node: int = 8
    inside: float = 3e11
    outside: float = 4e10
    latency: float = 1e-5
    overhead: float = 4e-4
    peak: float = 9.89e14
    source: str = "H100's data sheet"

    @property
    def links(self) -> str:
        """Return the bandwidths within and between nodes, and the latency, in words."""
        near = f"{self.inside / 1e9:g} GB/s among {self.node}"
        far = f"{self.outside / 1e9:g} GB/s beyond"
        return f"{near}, {far}, {self.latency * 1e6:g} us a message"

    @property
    def assumed(self) -> str:
        """Return all speeds in words, and where they come from."""
        products = f"{self.flops / 1e12:g} TFLOP/s of {self.peak / 1e12:g}"
        passes = f"{self.overhead * 1e6:g} us more a pass"
        return f"products at {products}, {passes}, {self.links} ({self.source})"

    def seconds(self, sent: float, extent: int, calls: int = 1) -> float:
        """Return the seconds that collectives or messages take.

        Args:
            sent: bytes that each rank sends in all of them together.
            extent: devices from the first to the last rank. Beyond a node, the slower links count.
            calls: the number of collectives, each with the latency of one.
        """
        if not sent:
            return 0.0
        return sent / self.speed(extent) + calls * self.latency

    def speed(self, extent: int) -> float:
        """Return the bytes per second that a device sends to another.

        Args:
            extent: devices from the first to the last rank. Beyond a node, the slower links count.
        """
        return self.inside if extent <= self.node else self.outside


NOTHING = Device(inside=inf, outside=inf, latency=0.0)
"""A device whose links take no time."""

DEVICES = {
    "h100": Device(),
    "h200": Device(source="H200's data sheet"),
    "h800": Device(inside=1.6e11, source="H800's data sheet"),
    "a100": Device(
        flops=1.9e14, inside=2.2e11, outside=2e10, peak=3.12e14, source="A100's data sheet"
    ),
    "b200": Device(flops=1.1e15, inside=6e11, peak=2.25e15, source="B200's data sheet"),
}
"""Devices by name, as --rates takes them.

Peaks are of dense bf16. Products are assumed to reach half of them, on an A100 60%. Links are
assumed to reach two thirds of what a device can send in one direction: over NVLink within a node,
and over one InfiniBand card a device beyond it (400 Gbit/s; with A100s 200).
"""


def load_device(flag: str, given: str) -> Device:
    """Return a device by name, or from a JSON object with some fields of Device.

    Fields that the object leaves out keep the defaults of an H100.

    Args:
        flag: the flag that gave it, for errors.
        given: a name of DEVICES, or the path of a .json.
    Raises: ConfigError that names the file and the field.
    """
    if given in DEVICES:
        return DEVICES[given]
    try:
        read = json.loads(Path(given).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{flag} {given} cannot be read: {error}. Give a .json, or one of {', '.join(DEVICES)}."
        ) from None
    names = [field.name for field in fields(Device)]
    if not isinstance(read, dict) or read.keys() - set(names):
        raise ConfigError(
            f"{flag} {given} must be a JSON object with only {', '.join(names)}, "
            'such as {"flops": 5e14, "node": 8}.'
        )
    for name, value in read.items():
        if name == "source":
            if not isinstance(value, str):
                raise ConfigError(f'{flag} {given}: source must be a text, such as "measured".')
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        may_be_zero = name in ("latency", "overhead")
        if not is_number or not (1e-30 <= value <= 1e30 or (value == 0 and may_be_zero)):
            raise ConfigError(
                f"{flag} {given}: {name} must be a number above 0, from 1e-30 to 1e30, "
                f"got {json.dumps(value)[:100]}."
            )
    return Device(**{"source": given, **read})


def device_of(config: Config) -> Device | None:
    """Return the device of --rates, by default an H100.

    Returns None for a run on CPUs, whose rates nobody knows, unless --rates gives them.
    Raises: ConfigError if the file of --rates cannot be read.
    """
    given = config.check.rates
    if given is not None:
        return load_device("--rates", given)
    if config.parallel.distributed_backend == "gloo":
        return None
    return DEVICES["h100"]
