"""Attention by a processor's tiles and attention in float64, on a machine that has them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megapipe.kernels import attention as kernels
from megapipe.models.attention import cpu

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no tiles, or no C compiler here")


def attention(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    if q.dtype == torch.float64:
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    else:
        out = cpu.causal_attention(*leaves)
    return [out, *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize(("groups", "s", "d"), [(4, 17, 80), (2, 150, 24), (1, 64, 32)])
def test_attention_by_tiles_is_nearer_to_float64_than_by_torchs_products(
    groups: int, s: int, d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four heads, in the places that a layer's product gives them."""
    made = torch.randn(s, 2, groups, 4 // groups + 2, d, generator=torch.Generator().manual_seed(s)).bfloat16()
    q, k, v = (part.reshape(s, 2, -1, d).permute(1, 2, 0, 3) for part in made.split((4 // groups, 1, 1), dim=3))
    grad = torch.randn(s, 2, 4, d).bfloat16().permute(1, 2, 0, 3)
    exact = attention(*(x.double() for x in (q, k, v, grad)))
    assert kernels.has_attention(q, k, v)
    ours = attention(q, k, v, grad)
    monkeypatch.setattr(cpu, "has_attention", lambda *operands: False)
    for got, other, expected in zip(ours, attention(q, k, v, grad), exact, strict=True):
        assert (got - expected).norm() <= 1.05 * (other - expected).norm()


def test_bits_of_attention_do_not_depend_on_threads_and_what_is_no_number_stays_none() -> None:
    q, k, v, grad = torch.randn(4, 2, 3, 70, 16).bfloat16()
    whole, threads = attention(q, k, v, grad), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert all(torch.equal(a, b) for a, b in zip(attention(q, k, v, grad), whole, strict=True))
    finally:
        torch.set_num_threads(threads)
    k[0, 0, 40] = float("nan")
    out = attention(q, k, v, grad)[0]
    assert out[0, 0, 40:].isnan().all()
    assert torch.equal(out[0, 0, :40], whole[0][0, 0, :40])
