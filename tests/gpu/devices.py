"""Programs on CUDA devices that are not there."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from programs import ROOT

NEEDS_A_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="the devices are compiled")


def run(*command: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", *command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    return ran.stdout
