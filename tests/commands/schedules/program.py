"""tools/schedules.py, run in this process."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

from megapipe.commands import schedules
from megapipe.flags.parse import run

SIZE = ("--pp", "4", "--microbatches", "8")
STEP = ("--pp", "8", "--microbatches", "16")


def tool(*args: str | Path, columns: int = 100) -> subprocess.CompletedProcess[str]:
    """What the program does, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        patch.object(sys, "argv", ["schedules.py", *map(str, args)]),
        patch.dict(os.environ, COLUMNS=str(columns)),
    ):
        try:
            status = run(schedules.main) or 0
        except SystemExit as stop:
            status = stop.code
    return subprocess.CompletedProcess(args, status, out.getvalue(), err.getvalue())
