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
    small, large, sparse = json.loads(said)
    for row in small, large:
        assert row["kernels of a layer"] <= 30
        assert row["bytes of a layer over the least"] < 1.3
    assert small["step MFU"] > 0.52
    assert large["layer MFU"] > 0.60
    assert sparse["kernels of a layer"] <= 80  # 77 of which 40 are a router's choice and its order, small ones
    assert sparse["bytes of a layer over the least"] < 1.35
    assert sparse["layer MFU"] > 0.45
