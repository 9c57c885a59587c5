"""float32 products by a processor's tiles beside the product in float64, on a machine that has them."""

from __future__ import annotations

import pytest
import torch

from megapipe.kernels import tiles

pytestmark = pytest.mark.skipif(tiles.library() is None, reason="no tiles, or no C compiler here")


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
