"""Where the optimizer keeps weights that wait on the host at the start."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from programs import ROOT

ON_A_GPU = """
from tools.proofs.gpu import fake_cuda
fake_cuda.load()
import torch
from torch import nn
from megapipe.optim.buffers import FlatBuffers

stage = nn.Linear(3, 2)
flat = FlatBuffers(dict(stage.named_parameters()), device=torch.device("cuda", 0))
for x in (flat.model, flat.grads, flat.main, *stage.parameters()):
    print(x.device.type)
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="the fake device is compiled")
def test_weights_that_wait_on_the_host_are_trained_on_the_device_though_nothing_is_sharded() -> None:
    """One data-parallel rank shards nothing, nor does the one rank of an expert: they were trained on the host."""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", ON_A_GPU], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["cuda"] * 5
