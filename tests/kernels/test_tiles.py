"""Products and attention by a processor's tiles beside those in float64, on a machine that has them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megapipe.kernels import alike, tiles
from megapipe.models.attention import cpu

pytestmark = pytest.mark.skipif(tiles.library() is None, reason="no tiles, or no C compiler here")


@pytest.fixture(autouse=True)
def float32_by_tiles() -> Iterator[None]:
    alike.leave_out(())
    yield
    alike.leave_out(("float32",))


def test_float32_goes_by_tiles_where_it_is_asked_for() -> None:
    x = torch.ones(128, 128)
    assert tiles.has_tiles(x, x)
    alike.leave_out(("float32",))
    assert not tiles.has_tiles(x, x)
    assert not tiles.has_attention(x[None, None], x[None, None], x[None, None])
    assert tiles.has_attention(*[x[None, None].bfloat16()] * 3)


@pytest.mark.parametrize(("rows", "out", "into"), [(64, 256, 512), (37, 101, 700), (200, 999, 33)])
def test_a_product_by_tiles_is_as_near_to_the_exact_one_as_torchs(rows: int, out: int, into: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for turned_x in (False, True):
        for turned_w in (False, True):
            x, weight, bias, before = (
                torch.randn(*n, generator=generator) for n in ((rows, into), (out, into), (out,), (rows, out))
            )
            x = x.t().contiguous().t() if turned_x else x
            weight = weight.t().contiguous().t() if turned_w else weight
            exact = x.double() @ weight.double().t()
            assert tiles.has_tiles(x, weight) == (rows * out * into >= 1 << 20)
            limit = (x @ weight.t() - exact).norm()
            assert (tiles.product(x, weight, bias) - exact - bias.double()).norm() <= 1.1 * limit
            added = tiles.product(x, weight, into=before.clone())
            assert (added - exact - before.double()).norm() <= 1.1 * limit


def test_a_row_of_a_product_does_not_depend_on_the_others() -> None:
    x, weight = torch.randn(150, 300), torch.randn(70, 300)
    whole = tiles.product(x, weight)
    assert torch.equal(tiles.product(x[40:90], weight), whole[40:90])
    assert torch.equal(tiles.product(x, weight[13:]), whole[:, 13:])


def test_numbers_of_all_sizes_keep_their_bits() -> None:
    """Products with a power of two are exact, from the largest number to where an operand's last bits are lost."""
    x = torch.tensor([1 + 2**-23, 1 - 2**-24, -3.0, 0.1, 1e30, 3e38, 1e-30, 0.0])
    x = torch.stack((x, -x))
    assert torch.equal(tiles.product(x, torch.eye(8) / 4), x / 4)


def attention(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    if q.dtype == torch.float64:
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    else:
        out = cpu.causal_attention(*leaves)
    return [out, *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("groups", "s", "d"), [(4, 17, 80), (2, 150, 24), (1, 64, 32)])
def test_attention_by_tiles_is_nearer_to_float64_than_by_torchs_products(
    groups: int, s: int, d: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four heads, in the places that a layer's product gives them."""
    made = torch.randn(s, 2, groups, 4 // groups + 2, d, generator=torch.Generator().manual_seed(s)).to(dtype)
    q, k, v = (part.reshape(s, 2, -1, d).permute(1, 2, 0, 3) for part in made.split((4 // groups, 1, 1), dim=3))
    grad = torch.randn(s, 2, 4, d).to(dtype).permute(1, 2, 0, 3)
    exact = attention(*(x.double() for x in (q, k, v, grad)))
    assert tiles.has_attention(q, k, v)
    ours = attention(q, k, v, grad)
    monkeypatch.setattr(cpu, "has_attention", lambda *operands: False)
    for got, other, expected in zip(ours, attention(q, k, v, grad), exact, strict=True):
        assert (got - expected).norm() <= 1.05 * (other - expected).norm()


def test_bits_of_attention_do_not_depend_on_threads_and_what_is_no_number_stays_none() -> None:
    q, k, v, grad = torch.randn(4, 2, 3, 70, 16)
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
