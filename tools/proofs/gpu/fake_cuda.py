"""A CUDA device on a machine without one: the code of a GPU runs, and tensors have shapes and no data.

`load` before torch is imported; then FakeTensorMode makes tensors on "cuda". Needs a C++ compiler; torch's headers come
with its wheel.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

SOURCE = Path(__file__).with_suffix(".cpp")


def load() -> None:
    """Make the device known to this process, whose torch is not imported yet. Compiles for half a minute once."""
    assert "torch" not in sys.modules, "torch asks for its devices when it is imported"
    spec = find_spec("torch")
    torch = Path((spec and spec.origin) or "torch is not installed").parent
    key = hashlib.sha256(SOURCE.read_bytes() + str(torch).encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"megapipe-fake-cuda-{os.getuid()}-{key}.so"
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        links = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
        command = ["g++", "-std=c++20", "-w", "-shared", "-fPIC", *include, str(SOURCE), "-o", str(made), *links]
        subprocess.run(command, check=True)
        made.rename(library)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def move_parameters() -> None:
    """Let `nn.Module.to` work under FakeTensorMode, where torch cannot exchange a parameter's data."""
    import torch

    def apply(module, function, recurse=True):  # type: ignore[no-untyped-def]
        for child in module.children():
            child._apply(function)
        for name, param in module._parameters.items():
            if param is not None:
                moved = torch.nn.Parameter(function(param.data), param.requires_grad)
                moved.__dict__.update(param.__dict__ | moved.__dict__)  # its layout, not where it was
                module._parameters[name] = moved
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else function(buffer)
        return module

    torch.nn.Module._apply = apply  # type: ignore[method-assign]


class Event:
    """torch.cuda.Event of a device that is never behind."""

    def __init__(self, **_: object) -> None:
        """Of any kind."""

    def record(self, stream: object = None) -> None:
        """It has happened."""

    def elapsed_time(self, other: object) -> float:
        """Milliseconds."""
        return 1.0


class Stream:
    """torch.cuda.Stream of that device."""

    def __init__(self, device: object = None) -> None:
        """Of any device."""

    def wait_stream(self, other: object) -> None:
        """It is never behind."""

    def wait_event(self, event: object) -> None:
        """It has happened."""


@contextmanager
def running(host_waits: Callable[[str], None], counted: int = 0) -> Iterator[None]:
    """Inside, tensors without data are zeros to a host that reads them, and events, memory and names are there.

    Args:
        counted: what lists of whole numbers have in place of zeros.
        host_waits: called with the name of each call in which the host of a GPU would wait for it.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    reads: dict[str, Callable[[torch.Tensor], Any]] = {
        "tolist": lambda x: _nested(x.shape, 0.0 if x.is_floating_point() else counted),
        "item": lambda x: 0.0 if x.is_floating_point() else 0,
        "cpu": lambda x: torch.empty_like(x, device="cpu"),
        "__bool__": lambda x: False,
        "__int__": lambda x: 0,
        "__index__": lambda x: 0,
        "__float__": lambda x: 0.0,
    }

    def read(name: str) -> Callable[..., Any]:
        real = getattr(torch.Tensor, name)

        def call(x: torch.Tensor, *args: Any) -> Any:
            if x.is_cuda:
                host_waits(name)
            return reads[name](x) if isinstance(x, FakeTensor) else real(x, *args)

        return call

    fakes: dict[str, Any] = {
        "Event": Event,
        "Stream": Stream,
        "current_stream": Stream,
        "stream": nullcontext,
        "synchronize": lambda device=None: host_waits("synchronize"),
        "memory_stats": lambda device=None: dict.fromkeys(_STATS, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=80 << 30),
        "get_device_name": lambda device=None: "NVIDIA H100 80GB HBM3",
    }
    with ExitStack() as stack:
        for name in reads:
            owner = FakeTensor if name in FakeTensor.__dict__ else torch.Tensor
            stack.enter_context(mock.patch.object(owner, name, read(name)))
        for name, fake in fakes.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, fake))
        stack.enter_context(mock.patch.object(torch.cuda.nccl, "version", return_value=(2, 27, 3)))
        yield


_MOMENTS = ("reserved_bytes.all.current", "allocated_bytes.all.current")
_STATS = (*_MOMENTS, "allocated_bytes.all.peak", "allocation.all.current")


def _nested(shape: tuple[int, ...], value: float) -> Any:
    return [_nested(shape[1:], value) for _ in range(shape[0])] if shape else value
