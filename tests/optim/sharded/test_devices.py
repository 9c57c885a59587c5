"""Where weights that wait on the host are kept at the start, and tensors that a checkpoint is read into."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from programs import ROOT

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the fake device is compiled")

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
print("----")

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
made = {}
for layout in (Layout((8, 8), 0), Layout((8, 8), 1), Layout((8, 8), 0, part=(0, 2))):
    for device in ("cpu", "cuda"):
        held = torch.zeros(layout.local(mesh.tp), device=device)
        shards._placed(held, layout, mesh, made).to_local().fill_(7)
        print(*layout.local(mesh.tp), held.device.type, held.sum().item() / held.numel())
"""


@pytest.fixture(scope="module")
def printed() -> list[list[str]]:
    """Return the lines of the two programs above; one process runs both, as each would import torch anew."""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", ON_A_GPU], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return [part.splitlines() for part in run.stdout.split("----\n")]


def test_weights_that_wait_on_the_host_are_trained_on_the_device_though_nothing_is_sharded(printed) -> None:
    """One data-parallel rank shards nothing, nor does the one rank of an expert: they were trained on the host."""
    assert printed[0] == ["cuda"] * 5


def test_what_is_read_on_a_gpu_reaches_state_on_the_host(printed) -> None:
    """A DTensor of a mesh of GPUs copies what lies on the host; the optimizer kept what it had."""
    shapes = ("4 8", "8 4", "2 8")
    assert printed[1] == [f"{shape} {device} 7.0" for shape in shapes for device in ("cpu", "cuda")]
