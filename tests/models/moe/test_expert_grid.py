"""One norm and one state over both grids: each element of the model once, wherever its experts lie."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from threading import get_ident
from typing import Any

import pytest
import torch
from tiny import LLAMA

from megapipe.config import Config, OptimizerConfig, ParallelConfig
from megapipe.convert.tensors import whole_model
from megapipe.distributed.layout import layout_of
from megapipe.distributed.mesh import ProcessMesh
from megapipe.models.moe.dispatch import AllToAllDispatcher
from megapipe.models.moe.router import Routing
from megapipe.models.provider import gpt_provider
from megapipe.optim.optimizer import Optimizer
from megapipe.partition.spans import partition
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import build

MODEL = replace(LLAMA, num_experts=4, moe_ffn_hidden_size=16, moe_layer_freq="2", disable_bias_linear=False)
ELEMENTS = sum(p.numel() for p in whole_model(MODEL).parameters())
LAYOUTS = [
    {"dp": 2, "ep": 2},
    {"dp": 4, "ep": 2},
    {"dp": 4, "ep": 4},
    {"dp": 2, "etp": 2},
    {"dp": 4, "ep": 2, "etp": 2},
    {"tp": 2},
    {"tp": 2, "ep": 2, "etp": 1},
    {"tp": 2, "etp": 1},
    {"tp": 2, "dp": 2, "ep": 2},
    {"tp": 2, "cp": 2, "ep": 4, "etp": 1},
    {"pp": 2, "dp": 2, "ep": 2},
    {"pp": 2, "tp": 2, "dp": 2, "ep": 2, "etp": 1},
]


def optimizer_of(mesh: ProcessMesh, name: str, *, distributed: bool) -> Optimizer:
    schedule = build(name, mesh.pp.size, 4)
    spans = partition(MODEL.layers, schedule.placement)
    own = schedule.placement.stages_on(mesh.pp.rank)
    model = replace(MODEL, sequence_parallel=mesh.tp.size > 1)
    stages = [gpt_provider(model, spans[stage], mesh.tp) for stage in own]
    return Optimizer(stages, OptimizerConfig(lr=0.1), mesh, distributed=distributed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_ones_have_the_norm_of_all_parameters(layout):
    def norm(mesh: ProcessMesh) -> float:
        optimizer = optimizer_of(mesh, "dualpipe" if mesh.pp.size > 1 else "1f1b", distributed=True)
        for param in optimizer.params.values():
            layout = layout_of(param)
            summed = mesh.edp.size if layout.experts else mesh.dp_cp.size * (mesh.tp.size if layout.sum_over_tp else 1)
            param.main_grad.fill_(1 / summed / mesh.twins.size)
        return optimizer.reduce().norm()

    sizes = {"tp": 1, "cp": 1, "dp": 1, "pp": 1} | layout
    for found in run_threads(norm, **sizes):  # one element more or less is 1e-5; rows are summed in float32
        assert found == pytest.approx(math.sqrt(ELEMENTS), rel=1e-8)


def test_rows_arrive_alike_by_gloo_and_through_shared_memory():
    """Rank r sends [r, n] its row n; some send nothing, and once nobody does."""
    tables = [[[1, 2, 0], [0, 0, 0], [3, 0, 1]], [[0] * 3] * 3]

    def moved(mesh: ProcessMesh) -> list[list[list[float]]]:
        found = []
        for rows in tables:
            here = sum(rows[mesh.dp.rank])
            x = torch.stack((torch.full((here,), float(mesh.dp.rank)), torch.arange(here).float()), 1)
            for axis in (mesh.experts, replace(mesh.experts, shared=None)):
                found.append(axis.start_all_to_all(x, rows).wait().tolist())
        return found

    for rank, (shared, by_gloo, *none) in enumerate(run_threads(moved, dp=3, ep=3)):
        rows = tables[0]
        sent = [[[float(r), float(n + sum(rows[r][:rank]))] for n in range(rows[r][rank])] for r in range(3)]
        assert shared == by_gloo == [row for rows in sent for row in rows]
        assert none == [[], []]


@pytest.mark.parametrize("dropping", [False, True])
@pytest.mark.parametrize("each, waits", [(None, 1), (4, 0)])
def test_the_host_waits_once_for_the_numbers_of_rows_and_not_for_fixed_ones(monkeypatch, each, waits, dropping):
    found = []

    def rank(mesh: ProcessMesh) -> list[str]:
        before = len(own())
        experts = torch.arange(8).view(4, 2) % 4
        kept = experts != mesh.dp.rank if dropping else None
        routing = Routing(experts, torch.ones(4, 1, 2), kept, each)
        way = AllToAllDispatcher(routing, replace(mesh.experts, shared=None), 1, 4, each)
        x = torch.ones(4, 1, 3)
        way.combine(way.dispatch(x).wait()).wait()
        way.combine_weights(way.dispatch_weights(routing.weights))
        return own()[before:]

    def own() -> list[str]:
        return [name for thread, name in found if thread == get_ident()]

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (found.append((get_ident(), name)), original(*args))[1]

    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, counting(name, getattr(torch.Tensor, name)))
    assert run_threads(rank, dp=2, ep=2) == [["tolist"] * waits] * 2


def test_a_rank_has_the_state_of_its_share_of_its_experts():
    """16 bytes a parameter less what is split: experts over ep, etp and then edp, the rest over dp and cp."""
    par = ParallelConfig(expert_model_parallel_size=2, expert_tensor_parallel_size=1, use_distributed_optimizer=True)
    experts = sum(p.numel() for p in whole_model(MODEL).parameters() if layout_of(p).experts)
    config = Config(model=MODEL, parallel=par, world_size=4)
    each = experts / (par.expert_model_parallel_size * 2) + (ELEMENTS - experts) / config.data_parallel_size

    def held(mesh: ProcessMesh) -> int:
        return sum(b.main.numel() for b in optimizer_of(mesh, "1f1b", distributed=True).owned)

    for elements in run_threads(held, dp=4, ep=par.expert_model_parallel_size, etp=par.expert_tensor_parallel_size):
        assert each <= elements <= each * 1.05  # each parameter begins at a multiple of 64 elements
