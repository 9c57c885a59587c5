"""Attention with dropout against the formula in float64: its masks are read off, then everything follows from them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import ProcessMesh
from megapipe.distributed.tokens import Documents
from megapipe.models.attention import blocks
from megapipe.models.attention.blocks import MaskSpec
from megapipe.models.attention.context import context_attention
from megapipe.models.attention.cpu import causal_attention
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.tensor_parallel.rng import MicrobatchContext

B, HEADS, S, P = 2, 4, 40, 0.3
LENGTHS = ((17, 23), (40,))


@pytest.fixture(autouse=True)
def _many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_SCORES", 1)  # the least block, 16 queries


def tensors(groups: int, d: int = S, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v and the gradient of the result."""
    generator = torch.Generator().manual_seed(groups)
    heads = (HEADS, groups, groups, HEADS)
    return [torch.randn(B, n, S, d, dtype=torch.float64, generator=generator).to(dtype) for n in heads]


def attend(q: Tensor, k: Tensor, v: Tensor, sample: int = 3, tp: Axis | None = None, **how) -> Tensor:
    mask = MaskSpec(q.shape[2], MicrobatchContext(1, sample), p=P, site=(5, "attention"), heads=tp or Axis(), **how)
    return context_attention(q, k, v, mask)


def dropped(q: Tensor, k: Tensor, **how) -> Tensor:
    """[b, heads, s, s]: the probabilities after dropout, which times the identity are themselves."""
    eye = torch.eye(S, dtype=q.dtype).expand(B, k.shape[1], S, S)
    return attend(q, k, eye, **how)


def seen(window: int | None, documents: Documents | None) -> Tensor:
    mask = torch.ones(S, S).tril().triu(-S if window is None else -window).bool().expand(B, 1, S, S)
    if documents is not None:
        number = torch.stack([torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in documents.lengths])
        mask = mask & (number[:, None, :, None] == number[:, None, None, :])
    return mask


def softmax(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    k = k.repeat_interleave(HEADS // k.shape[1], dim=1)
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf")).softmax(-1)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("documents", [None, Documents(LENGTHS, isolate=True, restart=False)])
def test_it_is_the_formula_with_some_probabilities_zero(groups, window, documents):
    (q, k, v, grad), how = tensors(groups), {"window": window, "documents": documents}
    mask = seen(window, documents)
    keep = dropped(q, k, **how) != 0
    assert not (keep & ~mask).any()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    probs = softmax(q, k, mask) * keep / (1 - P)
    expected = probs @ v.repeat_interleave(HEADS // groups, dim=1)
    out = attend(q, k, v, **how)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    for mine, theirs in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_masks_drop_the_share_they_should_and_are_no_two_alike():
    q, k, *_ = tensors(4)
    past = seen(None, None).expand(B, HEADS, S, S)
    masks = {sample: (dropped(q, k, sample=sample) == 0) & past for sample in range(20)}
    share = sum(int(mask.sum()) for mask in masks.values()) / (20 * int(past.sum()))
    assert share == pytest.approx(P, abs=4 * (P * (1 - P) / (20 * int(past.sum()))) ** 0.5)
    rows = [mask[:, :, first : first + 16, :8] for mask in masks.values() for first in (8, 16)]
    assert len({tuple(row[b, h].flatten().tolist()) for row in rows for b in range(B) for h in range(HEADS)}) == 320


@pytest.mark.parametrize("tp", [2, 4])
def test_a_tensor_parallel_rank_has_the_masks_of_its_heads(tp):
    q, k, v, grad = tensors(4)

    def local(mesh: ProcessMesh) -> tuple[Tensor, ...]:
        own = [x.chunk(tp, dim=1)[mesh.tp.rank].clone().requires_grad_() for x in (q, k, v)]
        out = attend(*own, tp=mesh.tp)
        return out.detach(), *torch.autograd.grad(out, own, grad.chunk(tp, dim=1)[mesh.tp.rank])

    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    whole = (out.detach(), *torch.autograd.grad(out, leaves, grad))
    for rank, mine in enumerate(run_threads(local, tp=tp)):
        for a, b in zip(mine, whole, strict=True):
            torch.testing.assert_close(a, b.chunk(tp, dim=1)[rank], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_types_round_as_they_should(dtype):
    (q, k, v, grad), exact = tensors(2, 16, dtype), [x.double() for x in tensors(2, 16, dtype)]
    found, expected = [], []
    for parts, into in (((q, k, v, grad), found), (exact, expected)):
        leaves = [x.requires_grad_() for x in parts[:3]]
        out = attend(*leaves)
        into += [out, *torch.autograd.grad(out, leaves, parts[3])]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == dtype
        error = (mine.double() - theirs).norm() / theirs.norm()
        assert error < {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-6}[dtype]


@pytest.mark.parametrize("size", [30.0, 200.0])
def test_scores_beyond_the_range_of_fp16_are_finite(size):
    """30 x 30 x 128 is more than 65504: the product was rounded before it was scaled, and attention was nan.
    200 x 200 x 128 / sqrt(128) is more than that even when scaled."""
    q = torch.full((1, 1, 4, 128), size).half().requires_grad_()
    out = causal_attention(q, q, q)
    torch.testing.assert_close(out, q)
    out = attend(q, q, q)
    assert out.isfinite().all()
    assert torch.autograd.grad(out.float().mean(), q)[0].isfinite().all()
