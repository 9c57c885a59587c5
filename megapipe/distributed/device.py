"""The only module that touches CUDA. Everything else takes the device and backend it is given."""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megapipe.config import ParallelConfig
from megapipe.errors import ConfigError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def has_cuda() -> bool:
    """Is there a GPU that torch can use for each rank of this machine? NCCL refuses two ranks on one.

    One GPU in sight of several ranks is taken for each one's own: a scheduler that binds a GPU to each task hides the
    others from it. `ProcessMesh.create` asks whether it was the same one.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return gpus == 1 or gpus >= max(1, _ranks_here())


def _ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cores() -> int:
    """Cores of this machine for each rank that runs on it."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, here // _ranks_here())


def built_for_cpus() -> bool:
    """Can this build of torch use no GPU, whatever the machine has?"""
    return torch.version.cuda is None and torch.version.hip is None


def pick_device(parallel: ParallelConfig) -> torch.device:
    """This process's device: its own GPU, or the CPU where there is none or gloo was asked for.

    Raises: ConfigError if this machine has GPUs, but not one for each rank: none trains on the CPU unasked.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus or parallel.distributed_backend == "gloo":
        return torch.device("cpu")
    if not has_cuda():
        raise ConfigError(
            f"--nproc-per-node {_ranks_here()}, on a machine of {gpus} GPUs: start at most {gpus} ranks there "
            f"(torchrun --nproc-per-node {gpus}), or compute on the CPU with --distributed-backend gloo."
        )
    # A stage's activations and what its W passes keep outlive temporaries: blocks of fixed size fall to pieces.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # Plain mode posts messages alone on communicators of one way, where torch's advice to batch them does not hold.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) if gpus > 1 else 0)
    torch.cuda.set_device(device)
    return device


def gpu_name(device: torch.device) -> str | None:
    """A GPU's name among all of the world's: two ranks that say the same one share it. None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def require_fp8(device: torch.device, asked: str | None) -> None:
    """Raises: ConfigError if a GPU has no products of eight bits; a CPU computes the same in float32.

    asked: by --fp8-format.
    """
    if asked is not None and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < (8, 9):
            raise ConfigError(
                f"--fp8-format {asked} needs a GPU of compute capability 8.9 or more, and "
                f"{torch.cuda.get_device_name(device)} has {major}.{minor}. Leave it out."
            )


def memory_of(device: torch.device) -> int | None:
    """Bytes of a GPU's memory; None for a CPU, which shares its own with all else."""
    return None if device.type == "cpu" else int(torch.cuda.get_device_properties(device).total_memory)


def lacks_memory(error: Exception) -> bool:
    """Return whether a tensor had no room. torch has no class of its own for the host's memory."""
    return isinstance(error, MemoryError) or bool(re.search("allocate memory|out of memory|[Oo]verflow", str(error)))


def waits_for_kernels() -> bool:
    """Does the host wait for each kernel that it starts? Set by who looks for the one that fails."""
    return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next allocation, up to 2 GiB, where it is glibc's.

    A step on a CPU allocates the same tensors as the last one. Given back in between, each page of them would be
    cleared by the system again: 1 to 5% of a step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most that it takes; its own rule starts with 128 KiB
        mallopt(_M_TRIM_THRESHOLD, (2 << 30) - 1)


def backend_of(device: torch.device) -> str:
    """The torch.distributed backend of a device."""
    return "nccl" if device.type == "cuda" else "gloo"


def device_name(device: torch.device) -> str:
    """Device and backend in words."""
    return "CUDA (nccl)" if device.type == "cuda" else "CPU (gloo)"


def be_deterministic() -> None:
    """Let torch refuse kernels whose results differ from run to run. Call it before any work on a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats its sums with a fixed workspace only
    torch.use_deterministic_algorithms(True)


def synchronize(device: torch.device) -> None:
    """Wait for all work on the device; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def same_stream(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """The context that another thread enters, so that its work on the device follows this one's in one queue."""
    if device.type != "cuda":
        return nullcontext
    stream = torch.cuda.current_stream(device)

    @contextmanager
    def entered() -> Iterator[None]:
        # A thread begins with device 0. Leaving the stream would go back there, and make a context on it.
        torch.cuda.set_device(device)
        with torch.cuda.stream(stream):
            yield

    return entered


class Clock:
    """A device's time without waiting for it: `mark` now, and `seconds` once what was marked is over.

    Of a GPU marks are events in the order of its work, counted from the making of the clock; for that its queue should
    be empty.
    """

    def __init__(self, device: torch.device) -> None:
        self._at = time.perf_counter()
        self._origin = _event() if device.type == "cuda" else None

    def mark(self) -> Any:
        return time.perf_counter() if self._origin is None else _event()

    def seconds(self, mark: Any) -> float:
        """The host's seconds of a mark, by `time.perf_counter`."""
        return float(mark if self._origin is None else self._at + self._origin.elapsed_time(mark) / 1e3)


class CopyLane:
    """Copies in one direction between a device and the host: one after the other, beside the device's own work.

    On a CPU a thread makes them. The streams and events of a GPU have never been run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._thread = device, ThreadPoolExecutor(1, "copies")  # which begins with the first copy
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def buffer(self, size: int) -> Tensor:
        """Bytes on the host, where a GPU can copy to and from them by itself."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)

    def begin(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Iterable[Any]) -> Any:
        """Copy (to, from) behind the device's work so far and the copies `after`: what `wait` and `span` take."""
        behind = [other for other in after if other is not None]
        if self._stream is None:
            return self._thread.submit(_copied, pairs, behind)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        for _, ended in behind:
            self._stream.wait_event(ended)
        with torch.cuda.stream(self._stream):
            began = _event()
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
                # The allocator gives this memory to no one else before the copy is done.
                (to if to.is_cuda else source).record_stream(self._stream)
            return began, _event()

    def wait(self, begun: Any) -> None:
        """The device's further work waits for these copies."""
        if self._stream is None:
            begun.result()
        else:
            torch.cuda.current_stream(self.device).wait_event(begun[1])

    def span(self, begun: Any) -> tuple[Any, Any]:
        """Marks, as of Clock, of the beginning and the end of these copies, once they are over."""
        return begun.result() if self._stream is None else begun  # type: ignore[no-any-return]


def _copied(pairs: Sequence[tuple[Tensor, Tensor]], behind: Sequence[Future[Any]]) -> tuple[float, float]:
    for other in behind:
        other.result()
    began = time.perf_counter()
    for to, source in pairs:
        to.copy_(source)
    return began, time.perf_counter()


# One stream: cuBLAS keeps memory for each.
_stream_beside = cache(lambda device: torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
Capture = Callable[[Callable[[], Sequence[Tensor]]], tuple[Sequence[Tensor], Callable[[], None]]]
"""function -> its results, whose memory stays, and what runs its kernels again, on the same memory."""


def graph_pool(device: torch.device) -> Capture:
    """A private pool of memory, in which it captures functions as CUDA graphs, one after the other. No GPU has run it.

    torch's own context would wait for the whole device. Other threads may go on meanwhile, as NCCL's watchdog does.
    """
    pool, side = torch.cuda.graph_pool_handle(), _stream_beside(device)

    def capture(function: Callable[[], Sequence[Tensor]]) -> tuple[Sequence[Tensor], Callable[[], None]]:
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                made = function()
            except BaseException:
                with suppress(RuntimeError):  # that the capture is broken; what broke it is told
                    graph.capture_end()
                raise
            graph.capture_end()
        here.wait_stream(side)
        return made, graph.replay

    return capture


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


_PEAK_TFLOPS = {
    "V100": 125.0,
    "A100": 312.0,
    "A800": 312.0,
    "A10": 125.0,
    "A40": 149.7,
    "L40S": 362.0,
    "L4": 121.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H800": 989.4,
    "H200": 989.4,
    "GH200": 989.4,
    "B200": 2250.0,
    "GB200": 2500.0,
}
"""Dense 16-bit products, from the makers' data sheets, by a part of the device's name; the longest that fits."""


def peak_tflops(device: torch.device) -> float | None:
    """The most TFLOP/s that a device's data sheet names for dense 16-bit products; None if it is not in the table."""
    return None if device.type != "cuda" else peak_by_name(torch.cuda.get_device_name(device))


def peak_by_name(name: str) -> float | None:
    """The peak of a device by what its driver calls it: NVIDIA H100 80GB HBM3. See `peak_tflops`."""
    words = name.replace("-", " ")
    fitting = [part for part in _PEAK_TFLOPS if set(part.split()) <= set(words.split())]
    return _PEAK_TFLOPS[max(fitting, key=len)] if fitting else None


def versions(device: torch.device) -> str:
    """Versions of torch and of the libraries that it computes with on this device."""
    if device.type != "cuda":
        return f"torch {torch.__version__}"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    cuda, cudnn = torch.version.cuda, torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return f"torch {torch.__version__}, CUDA {cuda}, cuDNN {cudnn}, NCCL {nccl}"


@dataclass(eq=False)
class Gauge:
    """Bytes of one use of memory, of all stages of a rank, and the most that they were."""

    bytes: int = 0
    peak: int = 0

    def add(self, size: int) -> None:
        """Count more bytes, or fewer."""
        self.bytes += size
        self.peak = max(self.peak, self.bytes)


def memory_bytes(device: torch.device) -> dict[str, int]:
    """Reserved and allocated device memory under TensorBoard's tag names; empty on a CPU."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {
        "mem-reserved-bytes": stats["reserved_bytes.all.current"],
        "mem-allocated-bytes": stats["allocated_bytes.all.current"],
        "mem-max-allocated-bytes": stats["allocated_bytes.all.peak"],
        "mem-allocated-count": stats["allocation.all.current"],
    }
