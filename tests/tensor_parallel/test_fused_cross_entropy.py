"""Head and loss in one operation against torch's loss of the whole logits, in blocks small enough to matter."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

import megapipe.tensor_parallel.fused_cross_entropy as fused
from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megapipe.tensor_parallel.fused_cross_entropy import vocab_parallel_linear_cross_entropy
from megapipe.tensor_parallel.weight_grad import WeightGrads

TOKENS, HIDDEN, VOCAB = 40, 16, 256
IGNORE = -100


@pytest.fixture(autouse=True, params=[0, TOKENS * VOCAB], ids=["computed again", "kept"])
def _many_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "BLOCK_ELEMENTS", 1)  # the least block, 64 of the vocabulary
    monkeypatch.setattr(fused, "KEPT_ELEMENTS", request.param)


def case(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [s, b, h], head, targets with ignored ones, and a weight for each token's loss."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS // 2, 2, HIDDEN, generator=g, dtype=torch.float64)
    weight = torch.randn(VOCAB, HIDDEN, generator=g, dtype=torch.float64) * 0.3
    target = torch.randint(0, VOCAB, (TOKENS // 2, 2), generator=g)
    target[3, 1] = target[7, 0] = IGNORE
    scale = torch.rand(TOKENS // 2, 2, generator=g, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target, scale


def reference(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    logits = (x @ weight.t()).flatten(0, 1)
    return F.cross_entropy(logits, target.flatten(), reduction="none", ignore_index=IGNORE).view(target.shape)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_value_and_gradients_equal_torch(tp):
    x, weight, target, scale = case()
    expected = reference(x, weight, target)
    grads = torch.autograd.grad(expected, (x, weight), scale)

    def body(mesh: ProcessMesh):
        own = weight.detach().chunk(tp)[mesh.tp.rank].clone().requires_grad_()
        hidden = x.detach().clone().requires_grad_()
        losses = vocab_parallel_linear_cross_entropy(hidden, own, target, mesh.tp)
        losses.backward(scale)
        return losses.detach(), hidden.grad, own.grad

    for rank, (losses, grad_x, grad_weight) in enumerate(run_threads(body, tp=tp)):
        torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(grad_x, grads[0], rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(grad_weight, grads[1].chunk(tp)[rank], rtol=1e-10, atol=1e-13)


def test_float32_equals_float64_to_six_digits():
    wide, narrow = case(), case(torch.float32)
    for x, weight, target, scale in (wide, narrow):
        losses = vocab_parallel_linear_cross_entropy(x, weight, target, Axis())
        (losses * scale).sum().backward()
    torch.testing.assert_close(narrow[0].grad.double(), wide[0].grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(narrow[1].grad.double(), wide[1].grad, rtol=1e-5, atol=1e-6)


def test_bf16_gives_the_float32_loss_of_bf16_logits():
    x, weight, target, scale = case(torch.bfloat16)
    target = target.clamp(min=0)
    expected = vocab_parallel_cross_entropy(x @ weight.t(), target, Axis())
    losses = vocab_parallel_linear_cross_entropy(x, weight, target, Axis())
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    whole = torch.autograd.grad(expected, (x, weight), scale.float())
    blocks = torch.autograd.grad(losses, (x, weight), scale.float())
    for a, b in zip(whole, blocks, strict=True):
        assert (a.float() - b.float()).norm() < 0.01 * a.float().norm()


@pytest.mark.parametrize("released", [False, True])
def test_the_weight_gradient_waits_for_its_w_pass_though_the_weight_may_be_released_after_b(released):
    """Found by the covering array: W of ZeRO-3 read the weight whose memory had gone."""
    x, weight, target, scale = case()
    (expected,) = torch.autograd.grad(reference(x, weight, target), weight, scale)
    weight.main_grad = torch.zeros_like(weight)
    weight.is_dropped = released
    stage = WeightGrads()
    with stage.capturing():
        losses = vocab_parallel_linear_cross_entropy(x, weight, target, Axis())
    with stage.deferring(0):
        losses.backward(scale)
    assert x.grad is not None
    if released:
        weight.data.untyped_storage().resize_(0)
    else:
        assert not weight.main_grad.any()
    stage.run(0)
    torch.testing.assert_close(weight.main_grad, expected)


def test_only_a_block_of_logits_is_ever_one_tensor(monkeypatch):
    monkeypatch.setattr(fused, "BLOCK_ELEMENTS", TOKENS * 64)
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape[:1] == (TOKENS,):
                largest = max(largest, out.numel())
            return out

    x, weight, target, _ = case()
    with Sizes():
        vocab_parallel_linear_cross_entropy(x, weight, target, Axis()).sum().backward()
    assert largest == TOKENS * 64


@pytest.mark.parametrize("deferred", [False, True])
def test_the_logits_are_computed_once_if_kept_else_again_in_every_pass(monkeypatch, deferred):
    products = []

    def counted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        products.append(weight.shape)
        return F.linear(x, weight)

    monkeypatch.setattr(fused, "linear", counted)
    x, weight, target, scale = case()
    weight.main_grad = torch.zeros_like(weight)
    stage = WeightGrads()
    with stage.capturing():
        losses = vocab_parallel_linear_cross_entropy(x, weight, target, Axis())
    with stage.deferring(0) if deferred else nullcontext():
        losses.backward(scale)
    if deferred:
        stage.run(0)
    kept = fused.KEPT_ELEMENTS > 0
    assert products.count((64, HIDDEN)) == VOCAB // 64 * (1 if kept else 2 + deferred)


def test_a_gpu_gets_few_wide_blocks(monkeypatch):
    """A CPU's block of 256 columns made 197 of GPT-2's vocabulary, of 25 kernels each, and again in backward."""
    monkeypatch.setattr(fused, "BLOCK_ELEMENTS", 1 << 20)
    widths = {
        device: [b.stop - b.start for b in fused.blocks_of(torch.empty(4096, 8, device=device), 50304)]
        for device in ("cpu", "meta")  # meta stands for whatever is not a CPU
    }
    assert widths == {"cpu": [256] * 196 + [128], "meta": [50304]}
    odd = [b.stop - b.start for b in fused.blocks_of(torch.empty(3000, 8, device="meta"), 128256)]
    assert sum(odd) == 128256
    assert odd[0] % 64 == 0
    assert 3000 * max(odd) <= 1 << 28


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_a_gpus_regions_compute_what_the_blocks_of_a_cpu_do(backend):
    """The formulas that a compiler is given, in the place of kernels that no CPU has."""
    torch.compiler.reset()
    _, _, target, scale = case()
    logits = torch.randn(TOKENS, 96, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    labels, scale, space = target.flatten() - 32, scale.flatten(), torch.empty(logits.numel(), dtype=torch.float64)
    highest, total = logits.amax(1) - 1, torch.rand(TOKENS, dtype=torch.float64)
    with_block, gradient = (
        torch.compile(getattr(fused, name).__wrapped__, backend=backend) for name in ("_with_block", "_to_gradient_")
    )
    ours = with_block(logits, highest, total)
    torch.testing.assert_close(ours, fused.with_block(logits, highest, total, space), rtol=1e-13, atol=0)
    log_sum, here, there = ours[1].log() + ours[0], logits.clone(), logits.clone()
    gradient(here, log_sum, scale, labels)
    fused.to_gradient_(there, log_sum, scale, labels, space)
    torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-14)
    by_hand = (logits - log_sum[:, None]).exp() * scale[:, None]
    for row, label in enumerate(labels.tolist()):
        if 0 <= label < 96:
            by_hand[row, label] -= scale[row]
    torch.testing.assert_close(here, by_hand, rtol=1e-12, atol=1e-14)
