"""Sinkhorn's choice of experts against its definition, and against the same tokens in one process."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch
from tiny import LLAMA

from megapipe.distributed.axis import Pending, at_waits
from megapipe.distributed.mesh import ProcessMesh
from megapipe.models.moe.choice import best, sinkhorn
from megapipe.models.moe.router import Router
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.tensor_parallel.rng import MicrobatchContext, initialize

TOKENS, EXPERTS = 24, 4


def logits() -> torch.Tensor:
    """All tokens want the first expert most."""
    x = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return x + torch.tensor([3.0, 1, 0, -1], dtype=torch.float64)


def test_all_experts_are_wanted_alike_and_all_tokens_count_alike():
    scaled = sinkhorn(logits(), TOKENS, lambda x: x)
    ratio = scaled / logits().exp()
    torch.testing.assert_close(
        scaled.sum(0), torch.full((EXPERTS,), 1 / EXPERTS, dtype=torch.float64), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(scaled.sum(1), torch.full((TOKENS,), 1 / TOKENS, dtype=torch.float64), atol=1e-4, rtol=0)
    torch.testing.assert_close(
        ratio * ratio[0, 0], ratio[:, :1] * ratio[:1], rtol=1e-10, atol=0
    )  # rows and columns alone
    assert (best(logits(), 1) == 0).float().mean() > 0.6
    assert torch.bincount(best(scaled, 1).flatten(), minlength=EXPERTS).max() < TOKENS / 2


def test_a_number_that_is_none_ends_it():
    assert sinkhorn(logits() * float("nan"), TOKENS, lambda x: x).isnan().all()


def test_no_other_pass_goes_on_while_it_iterates():
    """Ranks iterate as often as their tokens need. Where a pass that ran together with it went on at each wait, the
    experts' ranks exchanged rows in different orders."""
    turns: list[str] = []

    def total(x: torch.Tensor) -> torch.Tensor:
        return Pending(x, SimpleNamespace(wait=lambda: turns.append("waited"))).wait()

    with at_waits.do(lambda: turns.append("another goes on"), None):
        sinkhorn(logits(), TOKENS, total)
    assert len(turns) > 3
    assert set(turns) == {"waited"}


def test_weights_are_the_routers_own_and_the_choice_is_that_of_all_tokens_on_any_number_of_ranks():
    model = replace(
        LLAMA,
        num_experts=EXPERTS,
        moe_router_topk=1,
        moe_router_load_balancing_type=("sinkhorn",),
        sequence_parallel=True,
    )
    x = torch.randn(8, 3, model.hidden, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def route(mesh: ProcessMesh):
        router = Router(model, mesh.tp, 0).double()
        initialize(router, 1, mesh.tp)
        with MicrobatchContext(1, 0).active():
            mine = router(x.chunk(mesh.tp.size)[mesh.tp.rank])
        return mine.experts, mine.weights, router.weight

    ((experts, weights, matrix),) = run_threads(route, tp=1)
    by_hand = x.view(TOKENS, -1) @ matrix.t()
    assert torch.equal(experts, best(sinkhorn(by_hand, TOKENS, lambda x: x), 1))
    torch.testing.assert_close(weights.view(TOKENS, 1), by_hand.sigmoid().gather(1, experts))
    shared = run_threads(route, tp=2)
    assert torch.equal(torch.cat([part for part, _, _ in shared]), experts)
    torch.testing.assert_close(torch.cat([part for _, part, _ in shared]), weights)
