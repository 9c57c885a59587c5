"""Streams, events and devices of torch.cuda, over the devices of fake_cuda.cpp that are judged."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from megapipe.kernels import region
from tools.proofs.gpu import fake_cuda
from tools.proofs.gpu.emulated import attention

DEVICES = 8
"""As fake_cuda.cpp has; a rank has one."""
CUDA = 1  # c10's number of the type


class Library:
    """The functions of fake_cuda.cpp. lasting: what has to stay as long as the devices."""

    lasting: object = None

    def __init__(self) -> None:
        self.c, _ = fake_cuda._loaded()
        self.c.new_event.restype = ctypes.c_void_p
        self.c.fault_at.restype = ctypes.c_char_p
        self.c.event_ms.restype = ctypes.c_double
        self.c.memory_of.restype = ctypes.c_int64
        self.c.limit_memory.argtypes = [ctypes.c_int64]
        self.c.held_at_peak.restype = ctypes.c_char_p
        self.c.clock_of.restype = ctypes.c_char_p

    def faults(self) -> list[str]:
        """Return what a GPU would refuse, or compute wrongly without a word, since `judging`."""
        return [self.c.fault_at(i).decode() for i in range(self.c.number_of_faults())]

    def name_blocks(self) -> None:
        """From here on each block of memory has a name: its operation and place. That is slow."""
        self._asked = ctypes.CFUNCTYPE(None)(lambda: self.c.be_at(_place().encode()))
        self.c.name_blocks(self._asked)

    def held_at_peak(self, device: int) -> list[str]:
        """The blocks of a device at its peak, the largest first: bytes, number, and name."""
        return self.c.held_at_peak(device).decode().splitlines()  # type: ignore[no-any-return]

    def fault(self, text: str) -> None:
        """Note one more."""
        self.c.add_fault(text.encode())


def _place() -> str:
    """The lines of the package that the calling thread is in, the innermost first."""
    frame, lines = sys._getframe(1), list[str]()
    while frame is not None and len(lines) < 3:
        _, package, name = frame.f_code.co_filename.rpartition("/megapipe/")
        if package:
            lines.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(lines)


class Event:
    """torch.cuda.Event of an emulated device."""

    lib: Library

    def __init__(self, **_: object) -> None:
        """Accept any kind of event."""
        self._at = self.lib.c.new_event()

    def __del__(self) -> None:
        self.lib.c.drop_event(ctypes.c_void_p(self._at))

    def record(self, stream: Stream | None = None) -> None:
        """Stand behind what the stream has so far."""
        lane = self.lib.c.get_stream(-1) if stream is None else stream.lane
        self.lib.c.record_event(ctypes.c_void_p(self._at), lane)

    def wait(self, stream: Stream | None = None) -> None:
        """Let what the stream gets from here on come after the event."""
        lane = self.lib.c.get_stream(-1) if stream is None else stream.lane
        self.lib.c.wait_event(lane, ctypes.c_void_p(self._at))

    def clock(self) -> bytes:
        """Return the clock of the event, for `wait_clock` in another process."""
        return self.lib.c.clock_of(ctypes.c_void_p(self._at))  # type: ignore[no-any-return]

    def query(self) -> bool:
        """Return whether the host knows that it is over."""
        return bool(self.lib.c.over(ctypes.c_void_p(self._at)))

    def synchronize(self) -> None:
        """Let the host wait for it."""
        self.lib.c.host_waits_event(ctypes.c_void_p(self._at))

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds of the host."""
        times = [self.lib.c.event_ms(ctypes.c_void_p(x._at)) for x in (self, other)]
        return float(times[1] - times[0])


class Stream:
    """torch.cuda.Stream of an emulated device. lane: its number in fake_cuda.cpp."""

    lib: Library

    def __init__(self, device: Any = None, lane: int | None = None) -> None:
        if lane is None:
            index = self.lib.c.get_device() if device is None else torch.device(device).index
            lane = self.lib.c.new_stream(index)
        self.lane = lane

    @property
    def device_index(self) -> int:
        return int(self.lib.c.device_of(self.lane))

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.device_index)

    @property
    def stream_id(self) -> int:
        return 0 if self.lane < DEVICES else self.lane

    device_type = CUDA

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.lane == other.lane

    def __hash__(self) -> int:
        return hash(self.lane)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()


def wait_clock(clock: bytes) -> None:
    """Let what the current stream gets from here on come after an event of another process.

    clock: of the event, see `Event.clock`.
    """
    lib = Event.lib
    lib.c.wait_clock(lib.c.get_stream(-1), clock)


def _record_stream(x: torch.Tensor, stream: Stream) -> None:
    there = torch.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=CUDA
    )
    torch.ops.aten.record_stream(x, there)


def _resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return _resize_here(storage, size)
    Stream.lib.c.resize_storage(ctypes.c_void_p(storage._cdata), ctypes.c_size_t(size))
    return storage


_resize_here: Callable[[torch.UntypedStorage, int], torch.UntypedStorage]
_resize_here = torch.UntypedStorage.resize_


def _fakes(lib: Library, host_waits: Callable[[str], None]) -> dict[str, Any]:
    """What torch._C has in a build for CUDA."""

    def current(device: int) -> tuple[int, int, int]:
        stream = Stream(lane=lib.c.get_stream(device))
        return stream.stream_id, stream.device_index, CUDA

    def choose(*, stream_id: int, device_index: int, device_type: int) -> None:
        lib.c.set_stream(stream_id or device_index)

    def synchronize() -> None:
        host_waits("synchronize")
        lib.c.synchronize_device(lib.c.get_device())

    return {
        "_cuda_getDevice": lib.c.get_device,
        "_cuda_setDevice": lib.c.set_device,
        "_cuda_exchangeDevice": lib.c.exchange_device,
        "_cuda_maybeExchangeDevice": lib.c.exchange_device,
        "_cuda_getDeviceCount": lambda: DEVICES,
        "_cuda_getCurrentStream": current,
        "_cuda_setStream": choose,
        "_cuda_synchronize": synchronize,
    }


def _index(lib: Library, device: Any) -> int:
    index = None if device is None else torch.device(device).index
    return int(lib.c.get_device() if index is None else index)


def _memory(lib: Library, device: Any = None) -> dict[str, int]:
    """What torch.cuda.memory_stats says of a device."""
    names = (
        "allocated_bytes.all.current",
        "allocated_bytes.all.peak",
        "reserved_bytes.all.current",
        "reserved_bytes.all.peak",
        "allocation.all.current",
    )
    index = _index(lib, device)
    return {name: int(lib.c.memory_of(index, n)) for n, name in enumerate(names)}


def _current_stream(device: Any = None) -> Stream:
    index = -1 if device is None else torch.device(device).index
    return Stream(lane=Stream.lib.c.get_stream(-1 if index is None else index))


@contextmanager
def running(
    host_waits: Callable[[str], None] = lambda why: None, *, late: bool = True, memory: int = 0
) -> Iterator[Library]:
    """Inside, there are devices, streams and events, and faults are noted.

    Args:
        host_waits: called with the name of each operation for which the host of a GPU would wait.
        late: copies that do not block run when somebody waits for them; else at once.
        memory: bytes of a device; 0 for no limit.
    """
    lib = Library()
    Event.lib = Stream.lib = lib
    heard = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda name: host_waits(name.decode()))
    fakes: dict[str, Any] = {
        "Event": Event,
        "Stream": Stream,
        "current_stream": _current_stream,
        "set_stream": lambda stream: lib.c.set_stream(stream.lane),
        "CUDAGraph": fake_cuda.CUDAGraph,
        "graph_pool_handle": object,
        "_exchange_device": lib.c.exchange_device,
        "_maybe_exchange_device": lib.c.exchange_device,
        "memory_stats": partial(_memory, lib),
        "reset_peak_memory_stats": lambda device=None: lib.c.reset_peak(_index(lib, device)),
        "empty_cache": lambda: lib.c.empty_cache(lib.c.get_device()),
        "get_device_properties": lambda device=None: SimpleNamespace(
            total_memory=memory or 80 << 30, uuid=str(device)
        ),
        "get_device_name": lambda device=None: "NVIDIA H100 80GB HBM3",
        "get_device_capability": lambda device=None: (9, 0),
    }
    with ExitStack() as stack:
        for name, fake in _fakes(lib, host_waits).items():
            stack.enter_context(mock.patch.object(torch._C, name, fake, create=True))
        for name, fake in fakes.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, fake, create=True))
        stack.enter_context(mock.patch.object(region, "find_spec", bool))
        stack.enter_context(mock.patch.object(torch, "compile", fake_cuda.one_kernel))
        attention.register()
        stack.enter_context(
            mock.patch.object(F, "scaled_dot_product_attention", attention.attention)
        )
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", _record_stream))
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", _resize))
        stack.enter_context(mock.patch.object(torch.cuda.nccl, "version", return_value=(2, 27, 3)))
        lib.c.tell_of_waits(heard)
        stack.callback(lib.c.tell_of_waits, None)
        lib.c.limit_memory(memory)
        stack.callback(lib.c.limit_memory, 0)
        lib.c.judge(1, int(late))
        stack.callback(lib.c.judge, 0, 1)
        yield lib
