"""The only module that touches CUDA; all others take the device and the backend they are given."""

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

# Options of mallopt, from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def has_cuda() -> bool:
    """Return whether torch can use one GPU for each rank of this machine, as NCCL needs.

    A process that sees a single GPU is assumed to be its only user: schedulers that give each task
    a GPU hide the other GPUs.
    """
    gpus = _num_gpus()
    return gpus == 1 or gpus >= max(1, _ranks_here())


def _num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cores() -> int:
    """Return the number of CPU cores of this machine per rank that runs on it, at least 1."""
    # A container or a scheduler may allow this process some of the machine's cores only.
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    else:
        usable = os.cpu_count() or 1
    return max(1, usable // _ranks_here())


def built_for_cpus() -> bool:
    """Return whether this build of torch can use no GPU, whatever the machine has."""
    return torch.version.cuda is None and torch.version.hip is None


def pick_device(parallel: ParallelConfig) -> torch.device:
    """Return this process's device: its own GPU, or the CPU if there are no GPUs or with gloo.

    The GPU becomes torch's current device. Raises: ConfigError if this machine has GPUs, but not
    one for each rank: no rank may train on the CPU although nobody asked for that.
    """
    gpus = _num_gpus()
    if not gpus or parallel.distributed_backend == "gloo":
        return torch.device("cpu")
    if not has_cuda():
        raise ConfigError(
            f"--nproc-per-node {_ranks_here()}, on a machine of {gpus} GPUs: start at most {gpus} "
            f"ranks there (torchrun --nproc-per-node {gpus}), or compute on the CPU with "
            "--distributed-backend gloo."
        )
    # Activations, and the tensors that W passes keep, outlive temporaries. Blocks of fixed size
    # would fragment the memory.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # torch advises to batch messages. Links post single messages in one direction each, where the
    # advice does not hold.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    # A scheduler that shows one GPU to each rank numbers it 0 on every rank.
    index = int(os.environ.get("LOCAL_RANK", "0")) if gpus > 1 else 0
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def gpu_name(device: torch.device) -> str | None:
    """Return the UUID of a GPU, which is equal on ranks that share the GPU; None for a CPU."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def require_fp8(device: torch.device, asked: str | None) -> None:
    """Raise ConfigError if FP8 is asked for and a GPU cannot multiply 8-bit numbers.

    A CPU emulates this in float32. `asked` is the value of --fp8-format; None for no check.
    """
    if asked is not None and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < (8, 9):
            raise ConfigError(
                f"--fp8-format {asked} needs a GPU of compute capability 8.9 or more, and "
                f"{torch.cuda.get_device_name(device)} has {major}.{minor}. Leave it out."
            )


def memory_of(device: torch.device) -> int | None:
    """Return the bytes of a GPU's memory; None for a CPU, whose memory other programs use too."""
    if device.type == "cpu":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error says that no memory can hold a tensor, on a GPU or the host."""
    # torch has no exception class for missing memory of the host or NCCL's, or too large a size.
    pattern = "allocate memory|out of memory|[Oo]verflow|Failed to (CUDA )?(host |[cm])alloc"
    return isinstance(error, MemoryError) or bool(re.search(pattern, str(error)))


def waits_for_kernels() -> bool:
    """Return whether CUDA_LAUNCH_BLOCKING is set: the host then waits for each kernel."""
    return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")


def keep_freed_memory() -> None:
    """Let glibc keep up to 2 GiB of freed memory, in blocks of up to 32 MiB; no effect elsewhere.

    A step on a CPU allocates the same tensors as the step before. If their memory went back to the
    system in between, the system would clear each page again. This costs 1 to 5% of a step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # 32 MiB is the largest value that glibc takes; it starts with 128 KiB.
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, (2 << 30) - 1)


def backend_of(device: torch.device) -> str:
    """Return the torch.distributed backend of a device, "nccl" or "gloo"."""
    return "nccl" if device.type == "cuda" else "gloo"


def device_name(device: torch.device) -> str:
    """Return the device and its backend in words."""
    return "CUDA (nccl)" if device.type == "cuda" else "CPU (gloo)"


def be_deterministic() -> None:
    """Make torch refuse kernels whose results differ between runs. Call it before any GPU work."""
    # cuBLAS repeats its sums bitwise only with a workspace of fixed size.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def synchronize(device: torch.device) -> None:
    """Wait for all work on a GPU; return at once for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def same_stream(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function f for another thread, which uses this CUDA stream in `with f():`."""
    if device.type != "cuda":
        return nullcontext
    stream = torch.cuda.current_stream(device)

    @contextmanager
    def entered() -> Iterator[None]:
        # A thread starts with device 0. Leaving the stream would return there and create a CUDA
        # context on device 0.
        torch.cuda.set_device(device)
        with torch.cuda.stream(stream):
            yield

    return entered


class DeviceClock:
    """A clock that measures a device's time without waiting for the device.

    `mark` marks the current place in the device's queue of work. `seconds` returns the time of a
    mark, once the work before it is done. A GPU's queue must be empty when the clock is created.
    """

    def __init__(self, device: torch.device) -> None:
        # An event has no time of its own, only a distance from another event. The first one ties
        # all others to the host's clock.
        self._at = time.perf_counter()
        self._origin = _event() if device.type == "cuda" else None

    def mark(self) -> Any:
        """Return a mark of the current place in the device's queue of work, for `seconds`."""
        return time.perf_counter() if self._origin is None else _event()

    def seconds(self, mark: Any) -> float:
        """Return the time of a mark in seconds of the host's `time.perf_counter`."""
        if self._origin is None:
            return float(mark)
        return float(self._at + self._origin.elapsed_time(mark) / 1e3)


class CopyLane:
    """A stream of copies in one direction between a device and the host.

    The copies run one after another, while the device computes: on a CUDA stream, or for a CPU in a
    thread. `span` returns when they ran. No GPU has run this.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # The thread starts with the first copy.
        self._thread = ThreadPoolExecutor(1, "copies")
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def buffer(self, size: int) -> Tensor:
        """Return a buffer of `size` bytes on the host. For a GPU it is page-locked."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)

    def begin(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Iterable[Any]) -> Any:
        """Start copies, which wait for the device's work so far.

        Args:
            pairs: (destination, source) of each copy.
            after: results of earlier calls of `begin`, whose copies must be over first. None is
                skipped.
        Returns: the started copies, for `wait` and `span`.
        """
        previous = [other for other in after if other is not None]
        if self._stream is None:
            return self._thread.submit(_copied, pairs, previous)
        # A copy must not start before the kernels that write its source.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        for _, ended in previous:
            self._stream.wait_event(ended)
        with torch.cuda.stream(self._stream):
            began = _event()
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
                # Tell the allocator not to reuse this memory before the copy is done.
                on_gpu = to if to.is_cuda else source
                on_gpu.record_stream(self._stream)
            return began, _event()

    def wait(self, begun: Any) -> None:
        """Make the device's further work wait for the copies `begun`, a result of `begin`."""
        if self._stream is None:
            begun.result()
        else:
            torch.cuda.current_stream(self.device).wait_event(begun[1])

    def span(self, begun: Any) -> tuple[Any, Any]:
        """Return (begin, end), for `DeviceClock.seconds`, of `begun` copies that are over."""
        return begun.result() if self._stream is None else begun  # type: ignore[no-any-return]


def _copied(
    pairs: Sequence[tuple[Tensor, Tensor]], previous: Sequence[Future[Any]]
) -> tuple[float, float]:
    """Copy (destination, source) pairs after the `previous` copies; return (begin, end).

    Begin and end are in seconds of time.perf_counter().
    """
    for other in previous:
        other.result()
    began = time.perf_counter()
    for to, source in pairs:
        to.copy_(source)
    return began, time.perf_counter()


# One stream per device for all captures: cuBLAS keeps a workspace for every stream.
_capture_stream = cache(lambda device: torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
Capture = Callable[[Callable[[], Sequence[Tensor]]], tuple[Sequence[Tensor], Callable[[], None]]]
"""capture(function) -> (results, replay).

The memory of the results stays, and replay() runs the function's kernels again on that memory.
"""


def graph_pool(device: torch.device) -> Capture:
    """Return a function that captures CUDA graphs, which share a new private memory pool.

    Captures must not overlap. No GPU has run this.
    """
    pool = torch.cuda.graph_pool_handle()
    stream = _capture_stream(device)

    # torch.cuda.graph would wait for the whole device. The mode thread_local lets other threads use
    # the GPU meanwhile, such as NCCL's watchdog.
    def capture(
        function: Callable[[], Sequence[Tensor]],
    ) -> tuple[Sequence[Tensor], Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                made = function()
            except BaseException:
                # capture_end also complains about the broken capture; the first error says why.
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(stream)
        return made, graph.replay

    return capture


def _event() -> torch.cuda.Event:
    """Return a new timing event, recorded on the current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


# Dense 16-bit TFLOP/s from the data sheets, by a part of the device's name. The longest part of a
# name counts.
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


def peak_tflops(device: torch.device) -> float | None:
    """Return a GPU's peak of dense 16-bit matrix products in TFLOP/s, by its data sheet.

    Returns None for a CPU, and for a GPU that is not in the table.
    """
    return None if device.type != "cuda" else peak_by_name(torch.cuda.get_device_name(device))


def peak_by_name(name: str) -> float | None:
    """Return the 16-bit peak in TFLOP/s of a GPU by its name in the driver; None if unknown."""
    words = name.replace("-", " ").split()
    fitting = [part for part in _PEAK_TFLOPS if set(part.split()) <= set(words)]
    if not fitting:
        return None
    # "H100 PCIe" is slower than "H100", which fits its name too.
    return _PEAK_TFLOPS[max(fitting, key=len)]


def versions(device: torch.device) -> str:
    """Return the versions of torch and of the libraries that it uses on this device."""
    if device.type != "cuda":
        return f"torch {torch.__version__}"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {cudnn}, NCCL {nccl}"


@dataclass(eq=False)
class Gauge:
    """A counter of the bytes that all stages of a rank use for one purpose. `add` changes it.

    Attributes:
        bytes: the number of bytes in use now.
        peak: the largest number so far.
    """

    bytes: int = 0
    peak: int = 0

    def add(self, size: int) -> None:
        """Add bytes, or subtract them if `size` is negative."""
        self.bytes += size
        self.peak = max(self.peak, self.bytes)


def memory_bytes(device: torch.device) -> dict[str, int]:
    """Return {Megatron's TensorBoard tag: bytes, or count} of a GPU's memory; {} on a CPU."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {
        "mem-reserved-bytes": stats["reserved_bytes.all.current"],
        "mem-allocated-bytes": stats["allocated_bytes.all.current"],
        "mem-max-allocated-bytes": stats["allocated_bytes.all.peak"],
        "mem-allocated-count": stats["allocation.all.current"],
    }
