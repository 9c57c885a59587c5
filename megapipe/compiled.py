"""Compile C sources on the machine that runs them.

It takes a second or two, once: later processes of the user load the library that was kept.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import Any


def c_fields(*declarations: str) -> list[tuple[str, Any]]:
    """Return the fields of a C struct, for the attribute _fields_ of a ctypes.Structure.

    Args:
        declarations: a type and the names of fields, in C's order: "int* row next" for two pointers
            to integers.
    """
    fields = []
    for text in declarations:
        kind, *names = text.split()
        its = getattr(ctypes, f"c_{kind.removesuffix('*')}")
        if kind.endswith("*"):
            its = ctypes.POINTER(its)
        fields += [(name, its) for name in names]
    return fields


def compiled(name: str, sources: Sequence[Path], flags: Sequence[str]) -> ctypes.CDLL | None:
    """Return the library of these C files. Compile it if no earlier process has.

    Args:
        name: the library's file is NAME-DIGEST.so in the user's cache folder.
        sources: the .c files and the headers that they include.
        flags: the flags of the compiler.
    Returns: None if the library cannot be made: the compiler ($CC, or cc) is missing or fails, or
        the cache folder cannot be written.
    """
    compiler = which(os.environ.get("CC") or "cc")
    kept = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "megapipe"
    # Machines may share a home, and -march=native code runs on one kind of processor only. So the
    # processor is a part of the name, in addition to everything that the code depends on.
    text = repr((flags, _processor(), platform.libc_ver(), [path.read_text() for path in sources]))
    made = kept / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    try:
        if not made.exists():
            if compiler is None:
                return None
            # For this user alone: a process loads and runs what lies here.
            kept.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Under its final name the file is complete, as other ranks may load it meanwhile.
            with TemporaryDirectory(dir=kept) as folder:
                out = Path(folder) / made.name
                given = [str(path) for path in sources if path.suffix == ".c"]
                command = [compiler, *flags, *given, "-o", str(out)]
                subprocess.run(command, check=True, capture_output=True, timeout=60)
                out.replace(made)
        return ctypes.CDLL(str(made))
    except (OSError, RuntimeError, subprocess.SubprocessError):
        # RuntimeError: the user has no home. The caller has another way in every case.
        return None


def _processor() -> tuple[str, ...]:
    """Return the processor's kind and, if the system lists them, its instruction sets."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = []
    if cpuinfo.exists():
        lines = cpuinfo.read_text(errors="replace").splitlines()
    return platform.machine(), *sorted({x for x in lines if x.startswith(("flags", "Features"))})
