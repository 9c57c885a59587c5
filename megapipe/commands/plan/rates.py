"""Measure the rates of this machine for --rates: products by size, memory, messages by size.

A rehearsal gives the FLOP/s that passes of a whole model reach, and the host's time between passes.
Lone products then say how these FLOP/s change with the size of products.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megapipe.commands.plan.forecast import Forecast
from megapipe.commands.ranks import run_ranks
from megapipe.config import Config
from megapipe.data.files import write_complete
from megapipe.distributed.device import memory_of, peak_tflops, pick_device, synchronize
from megapipe.flags.stop import say
from megapipe.plan import Plan
from megapipe.plan.seconds.device import Device, Sizes
from megapipe.plan.seconds.step import mean_product, work_of

_SIDES = {"cpu": (32, 64, 128, 256, 512, 1024), "cuda": (256, 512, 1024, 2048, 4096, 8192)}
"""Rows, columns and inner size of the measured products, which are cubes."""
_COPIED = {"cpu": 2**25, "cuda": 2**30}
"""Bytes of the measured copy, which no cache holds."""
_MESSAGES = (2**10, 2**14, 2**17, 2**20, 2**23, 2**26)
"""Bytes of the measured messages."""
_SECONDS = 0.05
"""Least time of a measurement, in seconds."""


class Alone(NamedTuple):
    """The measured speeds of this machine's matrix products, copies and messages.

    Attributes:
        products: for each measured size, (FLOP of the product, FLOP/s).
        memory: bytes per second of a copy; read and written bytes both count.
        messages: for each measured size, (bytes, seconds) of a message between two devices; ()
            with a single GPU.
        device: the device's name.
        peak: FLOP/s by the data sheet; None for a device that is not known.
        capacity: bytes of the device's memory; None for a CPU.
    """

    products: Sizes
    memory: float
    messages: Sizes
    device: str
    peak: float | None
    capacity: int | None = None


def save_rates(path: str, config: Config, plan: Plan, found: Forecast) -> None:
    """Measure this machine, and write its rates to the .json at `path`.

    Args:
        found: the predicted times of a step of this run, where communication takes no time.
    """
    # Processes of their own: this one must have no CUDA context, as it forks others.
    backend = config.parallel.distributed_backend
    ranks = 2
    if torch.cuda.is_available() and backend != "gloo":
        ranks = min(2, torch.cuda.device_count())
    given = (config, _dtype(config))
    alone = run_ranks(ranks, _measure, *given, preload=("megapipe.commands.plan.rates",))[0]
    write_complete(path, json.dumps(rates_of(alone, config, plan, found), indent=1))
    say(f"rates of this machine: {path}, for --rates of megapipe plan, check and rehearse")


def rates_of(alone: Alone, config: Config, plan: Plan, found: Forecast) -> dict[str, Any]:
    """Return the content of a file for --rates.

    Args:
        alone: the measured speeds of this machine.
        found: the predicted times of a step of this run, where communication takes no time.
    """
    tp = config.parallel.tensor_model_parallel_size
    # FLOP/s of the rehearsed passes, of all stages together.
    flops = work_of(plan.pieces.costs(plan.counts)) / tp / work_of(found.costs)
    product = mean_product(plan) / tp
    share = flops / Device(by_product=alone.products).rate(product)
    rates: dict[str, Any] = {
        "source": f"measured by megapipe rehearse on {alone.device}",
        # A pass does more than products, so it reaches a share of a lone product's FLOP/s.
        "flops": [[size, share * rate] for size, rate in alone.products],
        "peak": alone.peak or max(rate for _, rate in alone.products),
        "memory": alone.memory,
        "overhead": found.costs.overhead,
        "host": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    # Ranks on a CPU share the memory of the host.
    rates["capacity"] = alone.capacity or rates["host"]
    if alone.messages:
        rates["inside"] = [list(row) for row in alone.messages]
        rates["node"] = max(2, torch.cuda.device_count())
    if config.parallel.distributed_backend == "gloo":
        # All ranks of a rehearsal on a CPU are processes of this machine.
        rates["node"] = max(2, os.cpu_count() or 1)
        rates["outside"] = rates["inside"]
    return rates


def _dtype(config: Config) -> torch.dtype:
    """Return the type of the run's products."""
    if config.precision.bf16:
        return torch.bfloat16
    if config.precision.fp16:
        return torch.float16
    return torch.float32


def _measure(config: Config, dtype: torch.dtype) -> Alone:
    """Return the rates of this process's device, as one of two ranks or alone.

    Args:
        dtype: the type of the numbers in products.
    """
    threads = (os.environ.get("OMP_NUM_THREADS") or "1").split(",")[0]
    torch.set_num_threads(int(threads))
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    device = pick_device(config.parallel)
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    ranks = int(os.environ["WORLD_SIZE"])
    messages: Sizes = ()
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        messages = _messages(device)
        dist.destroy_process_group()
    # The other rank has ended, or sleeps: products and copies have the machine to themselves.
    products: Sizes = ()
    memory = 0.0
    if os.environ["RANK"] == "0":
        products = tuple(_product(side, dtype, device) for side in _SIDES[device.type])
        memory = _copied(device)
    peak = peak_tflops(device)
    stated = peak * 1e12 if peak else None
    return Alone(products, memory, messages, name, stated, memory_of(device))


def _product(side: int, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Return (FLOP, FLOP/s) of a product of two square matrices.

    Args:
        side: rows and columns of each matrix.
    """
    a = torch.randn(side, side, device=device).to(dtype)
    b = torch.randn(side, side, device=device).to(dtype)
    flop = 2.0 * side**3
    return flop, flop / _seconds(partial(torch.mm, a, b), device)


def _copied(device: torch.device) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.zeros(_COPIED[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)


def _messages(device: torch.device) -> Sizes:
    """Return (bytes, seconds) of a message between the two ranks, for several sizes.

    The seconds are half the time of a message there and back.

    Both ranks call this function.
    """
    found: list[tuple[float, float]] = []
    for size in _MESSAGES:
        x = torch.zeros(size // 4, device=device)
        # Both ranks must send as often, so the number does not depend on a clock.
        count = max(3, min(50, 2**24 // size))
        _there_and_back(x)
        times = []
        for _ in range(count):
            synchronize(device)
            began = time.perf_counter()
            _there_and_back(x)
            synchronize(device)
            times.append((time.perf_counter() - began) / 2)
        found.append((float(size), median(times)))
    # No message takes longer than a larger one: another program has slowed the smaller one down.
    seconds = [*accumulate(reversed([seconds for _, seconds in found]), min)]
    return tuple(zip((size for size, _ in found), reversed(seconds), strict=True))


def _there_and_back(x: torch.Tensor) -> None:
    """Send a tensor from rank 0 to rank 1 and back."""
    first = dist.get_rank() == 0
    for sends in (first, not first):
        if sends:
            dist.send(x, 1 - dist.get_rank())
        else:
            dist.recv(x, 1 - dist.get_rank())


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call: the median of five measurements of many calls each."""
    call()
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    count = max(3, int(_SECONDS / max(1e-7, time.perf_counter() - began)))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(count):
            call()
        synchronize(device)
        times.append((time.perf_counter() - began) / count)
    return median(times)
