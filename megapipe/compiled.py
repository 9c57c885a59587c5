"""C sources compiled on the machine that runs them: once, in a second or two, for all later processes of the user."""

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


def compiled(name: str, sources: Sequence[Path], flags: Sequence[str]) -> ctypes.CDLL | None:
    """The library of these C files; None where there is no compiler ($CC, or cc) that takes the flags, or no place to
    keep what it makes.

    Headers are among the sources. What is made for one processor (-march=native) is not taken for another one, as on
    machines that share a home.
    """
    compiler = which(os.environ.get("CC") or "cc")
    kept = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "megapipe"
    text = repr((flags, _processor(), platform.libc_ver(), [path.read_text() for path in sources]))
    made = kept / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    try:
        if not made.exists():
            if compiler is None:
                return None
            kept.mkdir(mode=0o700, parents=True, exist_ok=True)
            with TemporaryDirectory(dir=kept) as folder:  # other processes see it when it is whole
                out = Path(folder) / made.name
                given = [str(path) for path in sources if path.suffix == ".c"]
                subprocess.run([compiler, *flags, *given, "-o", str(out)], check=True, capture_output=True, timeout=60)
                out.replace(made)
        return ctypes.CDLL(str(made))
    except (OSError, RuntimeError, subprocess.SubprocessError):  # RuntimeError: a user without a home
        return None


def _processor() -> tuple[str, ...]:
    """The processor's kind and, where the system tells them, its instructions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    return platform.machine(), *sorted({line for line in lines if line.startswith(("flags", "Features"))})
