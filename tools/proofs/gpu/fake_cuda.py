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
from importlib.util import find_spec
from pathlib import Path

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
