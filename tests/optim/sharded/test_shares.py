"""Shares of gradients and weights: a rank has the whole only while a run of passes uses it, and trains the same."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from whole_step import take_step

from megapipe.config import OptimizerConfig
from megapipe.distributed.mesh import ProcessMesh
from megapipe.optim.optimizer import Optimizer
from megapipe.pipeline_parallel.threads import run_threads

SIZE, STEPS, ZERO_2, ZERO_3 = 64, 3, {"shards_grads": True}, {"shards_grads": True, "shards_weights": True}
PARAMETERS = 2 * (SIZE * SIZE + SIZE)  # whole rows of 64, so that nothing is padded


def model(dtype: torch.dtype) -> nn.Module:
    net, dice = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)), torch.Generator()
    for p in net.parameters():  # torch's own generator is one for both ranks, which are threads
        nn.init.normal_(p, std=0.1, generator=dice)
    return net.to(dtype)


def inputs(step: int, rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(2, 4, SIZE, generator=torch.Generator().manual_seed(2 * step + rank)).to(dtype)


def trained(mesh: ProcessMesh, shards: dict[str, bool], dtype: torch.dtype, *, often: bool = False):
    """Norm of every step, the weights, and most bytes that were whole. often: gradients are reduced twice a step."""
    net = model(dtype)
    optimizer = Optimizer([net], OptimizerConfig(clip_grad=0.5), mesh, distributed=True, **shards)
    gathers, norms = optimizer.gathers, []
    for step in range(STEPS):
        reduction = optimizer.reduction()
        assert not optimizer.live.bytes
        optimizer.zero_grad()
        graphs = []
        for x in inputs(step, mesh.dp.rank, dtype):
            gathers.start(0)()
            graphs.append(net(x).square().sum())
            gathers.drop(0)  # what the graph has saved of the weights is gone with them
        for number, graph in enumerate(graphs):
            gathers.start(0)()
            reduction.begin(0)
            graph.backward()
            gathers.drop(0)
            if often or number == 1:
                reduction.start(0)()
        norms.append(take_step(optimizer, 0.01, 1 / mesh.dp.size, sums=reduction).grad_norm)
    with gathers.whole():
        weights = torch.cat([p.detach().flatten() for p in net.parameters()]).clone()
    assert optimizer.live.bytes == 0
    return norms, weights, optimizer.live.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", [ZERO_2, ZERO_3])
def test_the_bits_are_those_of_zero_1(shards, dtype):
    plain, split = (run_threads(partial(trained, shards=flags, dtype=dtype), dp=2) for flags in ({}, shards))
    for (norms, weights, _), (ours, theirs, _) in zip(plain, split, strict=True):
        assert norms == ours
        assert min(norms) > 0.5, "clipped"
        assert torch.equal(weights, theirs)


@pytest.mark.parametrize(("shards", "whole"), [({}, 0), (ZERO_2, 4), (ZERO_3, 4 + 2)])
def test_a_step_holds_the_whole_of_what_it_uses(shards, whole):
    """A float32 gradient and a bf16 weight for each parameter, and nothing between steps."""
    for *_, peak in run_threads(partial(trained, shards=shards, dtype=torch.bfloat16), dp=2):
        assert peak == whole * PARAMETERS


def test_sums_of_several_reductions_are_the_whole_gradient():
    """Of float64, beside plain torch on the inputs of both ranks."""
    net = model(torch.float64)
    groups = [{"params": [p], "weight_decay": 0.01 * (p.ndim > 1)} for p in net.parameters()]
    rule, norms = torch.optim.AdamW(groups, lr=0.01), []
    for step in range(STEPS):
        rule.zero_grad()
        for x in (x for rank in range(2) for x in inputs(step, rank, torch.float64)):
            (net(x).square().sum() / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5).item())
        rule.step()
    for ours, *_ in run_threads(partial(trained, shards=ZERO_3, dtype=torch.float64, often=True), dp=2):
        assert ours == pytest.approx(norms, rel=1e-12)
