"""Both ways to compute the loss have one rule for labels outside of the vocabulary; the plain one works in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megapipe.tensor_parallel.fused_cross_entropy import vocab_parallel_linear_cross_entropy

HIDDEN, VOCAB = 8, 16
LABELS = torch.tensor([[3, -100, 15], [0, 99, -1], [16, 8, 7]])


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("fused", [False, True])
def test_a_label_outside_of_the_vocabulary_costs_nothing(fused, tp):
    """-100 once cost log(denominator) without --cross-entropy-loss-fusion and 0 with it; 99 of 16 ids 6.13 and 0.93."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*LABELS.shape, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    known = LABELS.where((LABELS >= 0) & (LABELS < VOCAB), -100)
    expected = F.cross_entropy((x @ weight.t()).flatten(0, 1), known.flatten(), reduction="none", ignore_index=-100)
    assert (expected == 0).sum() == 4
    grads = torch.autograd.grad(expected.sum(), (x, weight))

    def body(mesh: ProcessMesh) -> tuple[Tensor, ...]:
        own = weight.detach().chunk(tp)[mesh.tp.rank].clone().requires_grad_()
        hidden = x.detach().clone().requires_grad_()
        if fused:
            losses = vocab_parallel_linear_cross_entropy(hidden, own, LABELS, mesh.tp)
        else:
            losses = vocab_parallel_cross_entropy(hidden @ own.t(), LABELS, mesh.tp)
        grad_x, grad_own = torch.autograd.grad(losses.sum(), (hidden, own))
        return losses.detach(), grad_x if fused else mesh.tp.all_reduce(grad_x), grad_own

    for rank, (losses, grad_x, grad_own) in enumerate(run_threads(body, tp=tp)):
        torch.testing.assert_close(losses.flatten(), expected.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(grad_x, grads[0], rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(grad_own, grads[1].chunk(tp)[rank], rtol=1e-10, atol=1e-14)


def peak(work: Callable[[], Tensor]) -> tuple[int, int, Tensor]:
    """Bytes that the allocator had given out at most, and at the end, beside those of before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        out = work()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest, now, out


@pytest.mark.parametrize(("dtype", "in_backward"), [(torch.bfloat16, 4 + 2), (torch.float32, 4)])
def test_the_plain_loss_holds_four_bytes_per_logit(dtype, in_backward):
    """8 in forward and 10 in backward once: nothing was in place."""
    logits, target = torch.randn(128, 1, 4096).to(dtype).requires_grad_(), torch.zeros(128, 1, dtype=torch.int64)
    highest, held, losses = peak(lambda: vocab_parallel_cross_entropy(logits, target, Axis()))
    assert highest / logits.numel() == pytest.approx(4, rel=0.01)
    more, _, _ = peak(lambda: torch.autograd.grad(losses.sum(), logits)[0])
    assert (held + more) / logits.numel() == pytest.approx(in_backward, rel=0.01)


def test_a_second_backward_is_refused_as_the_first_used_its_memory():
    logits = torch.randn(2, 1, 8, requires_grad=True)
    losses = vocab_parallel_cross_entropy(logits, torch.zeros(2, 1, dtype=torch.int64), Axis())
    losses.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


def test_logits_are_left_as_they_are():
    logits = torch.randn(2, 1, 8)
    before = logits.clone()
    vocab_parallel_cross_entropy(logits, torch.zeros(2, 1, dtype=torch.int64), Axis())
    assert torch.equal(logits, before)
