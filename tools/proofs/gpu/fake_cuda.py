"""A CUDA device on a machine without one: the code of a GPU runs, on the memory and the arithmetic
of a CPU.

`load` before torch is imported. FakeTensorMode can make tensors there too, of any size and without
data. Needs a C++ compiler; torch's headers come with its wheel.
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
from functools import cache, wraps
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

SOURCE = Path(__file__).with_suffix(".cpp")


def load() -> None:
    """Make the device known to this process, whose torch is not imported yet. Compiles for some
    seconds once.
    """
    known = _loaded.cache_info().currsize
    assert known or "torch" not in sys.modules, "torch asks for its devices when it is imported"
    _loaded()


@cache
def _loaded() -> tuple[ctypes.CDLL, Any]:
    """The library, and the operations that a CPU has not, which last as long as this."""
    spec = find_spec("torch")
    folder = Path((spec and spec.origin) or "torch is not installed").parent
    text = SOURCE.read_bytes() + SOURCE.with_name("allocator.h").read_bytes()
    key = hashlib.sha256(text + str(folder).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"megapipe-fake-cuda-{os.getuid()}-{key}.so"
    if not path.exists():
        made = path.with_suffix(f".{os.getpid()}")
        include = [f"-I{folder / 'include'}", f"-I{folder / 'include/torch/csrc/api/include'}"]
        links = [f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{folder / 'lib'}"]
        command = [
            "g++",
            "-std=c++20",
            "-w",
            "-shared",
            "-fPIC",
            *include,
            str(SOURCE),
            "-o",
            str(made),
            *links,
        ]
        subprocess.run(command, check=True)
        made.rename(path)
    library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    import torch

    @one_kernel
    def product(x: Any, a: Any, b: Any, dtype: Any, *, out: Any) -> Any:
        return torch.addmm(x, a.to(dtype), b.to(dtype), out=out)

    @one_kernel
    def softmax(x: Any, dim: int, to_float: bool) -> Any:
        # Routers in 16 bits take a softmax in float32, which only a GPU has as one operation.
        x = x.float() if to_float else x
        return torch.ops.aten._softmax.out(x, dim, False, out=torch.empty_like(x))

    @one_kernel
    def softmax_backward(grad: Any, output: Any, dim: int, dtype: Any) -> Any:
        into = torch.empty_like(grad)
        backward = torch.ops.aten._softmax_backward_data.out
        return backward(grad, output, dim, grad.dtype, grad_input=into).to(dtype)

    torch.cuda._initialized = True  # torch asks whether it was built for such devices
    kernels = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    kernels.impl("addmm.dtype_out", product, "CUDA")  # type: ignore[no-untyped-call]
    kernels.impl("_softmax", softmax, "CUDA")  # type: ignore[no-untyped-call]
    kernels.impl("_softmax_backward_data", softmax_backward, "CUDA")  # type: ignore[no-untyped-call]
    return library, kernels


def one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one kernel of the device: what it allocates within itself is in no peak."""

    @wraps(function)
    def run(*given: Any, **named: Any) -> Any:
        library, _ = _loaded()
        library.kernel(1)
        try:
            return function(*given, **named)
        finally:
            library.kernel(0)

    return run


def move_parameters() -> None:
    """Let `nn.Module.to` work under FakeTensorMode, where torch cannot exchange their data."""
    import torch

    def apply(module, function, recurse=True):  # type: ignore[no-untyped-def]
        for child in module.children():
            child._apply(function)
        for name, param in module._parameters.items():
            if param is not None:
                moved = torch.nn.Parameter(function(param.data), param.requires_grad)
                moved.__dict__.update(
                    param.__dict__ | moved.__dict__
                )  # its layout, not where it was
                module._parameters[name] = moved
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else function(buffer)
        return module

    torch.nn.Module._apply = apply  # type: ignore[method-assign]


class Event:
    """A torch.cuda.Event of a device that has always finished."""

    def __init__(self, **_: object) -> None:
        """Accept any kind of event."""

    def record(self, stream: object = None) -> None:
        """Do nothing: the event has happened already."""

    def elapsed_time(self, other: object) -> float:
        """Milliseconds."""
        return 1.0


class Stream:
    """torch.cuda.Stream of that device."""

    def __init__(self, device: object = None) -> None:
        """Accept any device."""

    def wait_stream(self, other: object) -> None:
        """Do nothing: the other stream has finished already."""

    def wait_event(self, event: object) -> None:
        """Do nothing: the event has happened already."""


class CUDAGraph:
    """A torch.cuda.CUDAGraph of that device: notes operations and runs them again as one launch."""

    launched = 0

    def capture_begin(self, **_: object) -> None:
        """In any pool."""
        from tools.proofs.gpu.captured import Noting

        self.noted = Noting()
        self.noted.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        """Nothing has been computed."""
        self.noted.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.noted.undo()

    def replay(self) -> None:
        """Whoever counts operations does not see them."""
        from torch.utils._python_dispatch import _disable_current_modes

        CUDAGraph.launched += 1
        with _disable_current_modes():
            self.noted.replay()


@contextmanager
def running(host_waits: Callable[[str], None]) -> Iterator[None]:
    """Inside, events, memory and names are there.

    Args:
        host_waits: called with the name of each operation for which the host of a GPU would wait.
    """
    import torch

    fakes: dict[str, Any] = {
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph_pool_handle": object,
        "Stream": Stream,
        "current_stream": Stream,
        "stream": nullcontext,
        "set_device": lambda device: None,  # there is one
        "synchronize": lambda device=None: host_waits("synchronize"),
        "memory_stats": lambda device=None: dict.fromkeys(_STATS, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=80 << 30),
        "get_device_name": lambda device=None: "NVIDIA H100 80GB HBM3",
    }
    heard = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda name: host_waits(name.decode()))
    with ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, fake))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream"))
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_"))  # its bytes stay
        stack.enter_context(mock.patch.object(torch.cuda.nccl, "version", return_value=(2, 27, 3)))
        library, _ = _loaded()
        library.tell_of_waits(heard)
        stack.callback(library.tell_of_waits, None)
        yield


_MOMENTS = ("reserved_bytes.all.current", "allocated_bytes.all.current")
_STATS = (
    *_MOMENTS,
    "allocated_bytes.all.peak",
    "reserved_bytes.all.peak",
    "allocation.all.current",
)
