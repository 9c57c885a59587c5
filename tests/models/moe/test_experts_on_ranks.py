"""A layer of experts on several tensor-parallel, expert-parallel and context-parallel ranks, beside the same on one."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from expert_layers import CASES, B, inputs, layer_of
from torch import Tensor

from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.threads import run_threads


@pytest.mark.parametrize("name", ["softmax after", "gelu with biases", "sigmoid", "padding", "shared with a gate"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_compute_what_one_computes(name, sequence_parallel):
    model = replace(CASES[name], sequence_parallel=sequence_parallel)
    if model.capacity_factor:  # capacity is of each rank's tokens: all of them fit
        model = replace(model, moe_expert_capacity_factor=9.0)
    x, dy = (torch.cat((part, part[:1])) for part in inputs())  # 8 positions

    def run(mesh: ProcessMesh) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        layer = layer_of(model, mesh.tp)
        mine, grad = ((t.chunk(mesh.tp.size)[mesh.tp.rank] if sequence_parallel else t) for t in (x, dy))
        mine = mine.clone().requires_grad_()
        y = layer(mine)
        y.backward(grad)
        parts = {}
        for p in layer.parameters():
            if p.mesh_layout.sum_over_tp:
                mesh.tp.all_reduce(p.grad)
            if p.mesh_layout.dim is not None:
                local = p.grad.view(p.mesh_layout.local(mesh.tp))
                parts[id(p)] = torch.cat(list(mesh.tp.all_gather(local[None].contiguous())), p.mesh_layout.dim)
        named = {name: parts.get(id(p), p.grad).flatten() for name, p in layer.named_parameters()}
        whole = [mesh.tp.all_gather(t.detach().contiguous()) if sequence_parallel else t for t in (y, mine.grad)]
        return whole[0], whole[1], named

    (want,) = run_threads(run, tp=1)
    for got in run_threads(run, tp=2):
        torch.testing.assert_close(got[0], want[0], rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(got[1], want[1], rtol=1e-10, atol=1e-11)
        for key, value in want[2].items():
            torch.testing.assert_close(got[2][key], value, rtol=1e-9, atol=1e-10)


LAYOUTS = {
    "ep": {"dp": 2, "ep": 2},
    "ep 3": {"dp": 3, "ep": 3},
    "ep and edp": {"dp": 4, "ep": 2},
    "etp over dp": {"dp": 2, "etp": 2},
    "ep within tp": {"tp": 2, "dp": 2, "ep": 2, "etp": 1},
    "ep and tp": {"tp": 2, "dp": 2, "ep": 2},
    "whole experts under tp": {"tp": 2, "etp": 1},
    "ep over cp": {"cp": 2, "ep": 2},
}


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gelu with biases", "padding", "dropping", "shared with a gate"])
def test_experts_on_several_ranks_compute_what_one_rank_computes(name, layout, dispatcher):
    """Each rank has tokens of its own; of every expert the gradients of all tokens are summed over its replicas."""
    split = LAYOUTS[layout].get("tp", 1) > 1
    model = replace(
        CASES[name],
        sequence_parallel=split,
        moe_token_dispatcher_type=dispatcher,
        moe_aux_loss_coeff=(0.0,),
        moe_z_loss_coeff=None,
    )
    world = math.prod(size for axis, size in LAYOUTS[layout].items() if axis in ("tp", "cp", "dp"))
    draw = torch.Generator().manual_seed(4)
    x, dy = (torch.randn(world, 4, B, 16, dtype=torch.float64, generator=draw) for _ in range(2))

    def run(mesh: ProcessMesh) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        layer = layer_of(model, mesh.tp)
        mine = x[mesh.world.rank].clone().requires_grad_()
        y = layer(mine)
        y.backward(dy[mesh.world.rank])
        for p in layer.parameters():
            if p.mesh_layout.sum_over_tp:
                mesh.tp.all_reduce(p.grad)
            (mesh.edp if p.mesh_layout.experts else mesh.dp_cp).all_reduce(p.grad)
        grads = {name: (p.mesh_layout.pieces(mesh.tp), p.grad) for name, p in layer.named_parameters()}
        return y.detach(), mine.grad, grads

    whole = layer_of(replace(model, sequence_parallel=False))
    wanted_y, wanted_x = [], []
    for mine, grad in zip(x, dy, strict=True):  # capacity is of a rank's tokens
        mine = mine.clone().requires_grad_()
        y = whole(mine)
        y.backward(grad)
        wanted_y.append(y.detach())
        wanted_x.append(mine.grad)
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    for rank, (y, d_x, grads) in enumerate(run_threads(run, **LAYOUTS[layout])):
        close(y, wanted_y[rank])
        close(d_x, wanted_x[rank])
        for name, p in whole.named_parameters():
            pieces, got = grads[name]
            want = p.grad.view(p.mesh_layout.full)
            for dim, (i, n) in pieces.items():
                want = want.chunk(n, dim)[i]
            close(got, want.reshape(got.shape))
