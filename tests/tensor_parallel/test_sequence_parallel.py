"""Sequence parallelism changes where activations lie, not what is computed."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from tiny import GPT2, LLAMA, WAITING, run_step

from megapipe.distributed.axis import Axis, Pending
from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import build
from megapipe.tensor_parallel import ColumnParallelLinear
from megapipe.tensor_parallel.collectives import Edge, across
from megapipe.tensor_parallel.rng import initialize

MICROBATCHES = 2
MODELS = {
    "gpt2": GPT2,
    "llama": replace(LLAMA, num_query_groups=4, qk_layernorm=True),
    "fused loss": replace(GPT2, cross_entropy_loss_fusion=True),
    "recompute": replace(GPT2, recompute_granularity="full"),
    "overlapped": replace(GPT2, tp_comm_overlap=True),
}


@cache
def whole(style: str):
    return run_step(ProcessMesh.single(), MODELS[style], build("naive", 1, MICROBATCHES))


LAYOUTS = [("1f1b", 2, 1), ("1f1b", 4, 2), ("zb-h1", 2, 2), ("zb-h1", 4, 1)]
# Each style once where W waits, and once where it does not.
SOME = {
    ("1f1b", 4, 2): ("llama", "recompute"),
    ("zb-h1", 2, 2): ("gpt2", "llama", "recompute"),
    ("zb-h1", 4, 1): ("overlapped", "fused loss"),
}
if os.environ.get("MEGAPIPE_NIGHTLY"):  # scripts/nightly.sh: each style in each layout
    SOME = {}
SPLITS = [(*layout, style, True) for layout in LAYOUTS for style in SOME.get(layout, MODELS)]


@pytest.mark.parametrize(
    "name, tp, pp, style, sequence_parallel",
    SPLITS + [(*layout, style, False) for layout, style in zip(LAYOUTS, MODELS, strict=False)],
)
def test_losses_and_gradients_equal_the_unsplit_model_with_its_dropout(name, tp, pp, style, sequence_parallel):
    losses, gradients = whole(style)
    model = replace(MODELS[style], sequence_parallel=sequence_parallel)
    schedule = WAITING if (name, pp) == ("zb-h1", 1) else build(name, pp, MICROBATCHES)
    ranks = run_threads(partial(run_step, model=model, schedule=schedule), tp=tp, pp=pp)

    assert [reported for reported, _ in ranks if reported] == [pytest.approx(losses, rel=1e-12)] * tp
    for rank, (_, local) in enumerate(ranks):
        for param, (gradient, dim, full) in local.items():
            expected = gradients[param][0].reshape(full)
            if dim is not None:
                expected = expected.chunk(tp, dim)[rank % tp]
            torch.testing.assert_close(gradient, expected.reshape(gradient.shape), rtol=1e-9, atol=1e-14)


def test_one_tensor_parallel_rank_has_nothing_to_share():
    on = run_step(ProcessMesh.single(), replace(GPT2, sequence_parallel=True), build("naive", 1, MICROBATCHES))
    assert on[0] == whole("gpt2")[0]
    assert all(torch.equal(gradient, whole("gpt2")[1][name][0]) for name, (gradient, _, _) in on[1].items())


def test_the_collective_of_the_input_gradient_is_under_way_during_the_weight_product(monkeypatch):
    events: list[str] = []

    class Work:
        def wait(self) -> None:
            events.append("wait")

    def start(grad: torch.Tensor) -> Pending:
        events.append("start")
        return Pending(grad, Work())

    monkeypatch.setattr("megapipe.tensor_parallel.products.add_product", lambda *_: events.append("product"))
    layer = ColumnParallelLinear(4, 4, tp=Axis(), bias=True)
    initialize(layer, 1, Axis())
    layer.weight.main_grad = torch.zeros(4, 4)
    layer._opens = Edge(backward=start)
    layer(torch.ones(3, 4, requires_grad=True)).sum().backward()
    assert events == ["start", "product", "wait"]


def test_a_collective_leaves_the_gradient_that_others_read_too_alone():
    shared = torch.ones(3, requires_grad=True)
    edge = Edge(backward=lambda grad: Pending(grad.mul_(4), None))  # in place, as an all-reduce is
    x = torch.ones(3, requires_grad=True)
    # The addition gives both its arguments the same tensor.
    (shared * 1 + across(x, edge)).backward(torch.ones(3))
    assert torch.equal(x.grad, torch.full((3,), 4.0))
    assert torch.equal(shared.grad, torch.ones(3))
