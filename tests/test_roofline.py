"""What the code of a GPU starts, counted on a CUDA device that is not there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from programs import ROOT


@pytest.mark.skipif(shutil.which("g++") is None, reason="the fake device is compiled")
def test_a_layer_is_at_most_thirty_kernels_and_a_step_above_half_of_the_peak():
    """73 kernels and 36% of an H100's peak before, by the same rates; a review counted them with a tool of its own."""
    said = subprocess.run(
        [sys.executable, "-m", "tools.proofs.gpu", "--json"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    small, large = json.loads(said)
    for row in small, large:
        assert row["kernels of a layer"] <= 30
        assert row["bytes of a layer over the least"] < 1.3
    assert small["step MFU"] > 0.52
    assert large["layer MFU"] > 0.60
