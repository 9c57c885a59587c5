"""Where tensors lie that a checkpoint is read into."""

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
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from megapipe.checkpoint import shards
from megapipe.config import ParallelConfig
from megapipe.distributed.grid import Grids
from megapipe.distributed.groups import device_mesh_of
from megapipe.distributed.layout import Layout
from megapipe.distributed.mesh import build_mesh

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
gpu, grids = torch.device("cuda", 0), Grids.of(ParallelConfig(2, 2), 4)
of_torch = device_mesh_of(grids, gpu)

def group(name, sets):
    return of_torch.get_group(name) if name in ("pp", "tp") else dist.group.WORLD

mesh = build_mesh(grids, 0, gpu, group, of_torch)
for layout in (Layout((8, 8), 0), Layout((8, 8), 1), Layout((8, 8), 0, part=(0, 2))):
    for device in ("cpu", "cuda"):
        held = torch.zeros(layout.local(mesh.tp), device=device)
        shards._placed(held, layout, mesh).to_local().fill_(7)
        print(*layout.local(mesh.tp), held.device.type, held.sum().item() / held.numel())
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="the fake device is compiled")
def test_what_is_read_on_a_gpu_reaches_state_on_the_host() -> None:
    """A DTensor of a mesh of GPUs copies what lies on the host; the optimizer kept what it had."""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", ON_A_GPU], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    shapes = ("4 8", "8 4", "2 8")
    assert run.stdout.splitlines() == [f"{shape} {device} 7.0" for shape in shapes for device in ("cpu", "cuda")]
