"""The product of linear layers against float64, in every role and for both sides of the threshold."""

from __future__ import annotations

import pytest
import torch

from megapipe.tensor_parallel import products
from megapipe.tensor_parallel.products import linear


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("n", [3, 100])  # of 64 x 96 multiplications: fewer and more than oneDNN is worth
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_the_three_products_of_a_linear_layer_equal_float64(dtype, relative, n):
    x, weight, bias, dy = tensor(n, 2, 64), tensor(96, 64, seed=1), tensor(96, seed=2), tensor(n, 2, 96, seed=3)
    x, weight, bias, dy = [t.to(dtype) for t in (x, weight, bias, dy)]
    rows, grads = x.flatten(0, 1), dy.flatten(0, 1)
    for got, expected in (
        (linear(x, weight, bias), x.double() @ weight.double().t() + bias.double()),
        (linear(dy, weight.t()), dy.double() @ weight.double()),
        (linear(grads.t(), rows.t()), grads.double().t() @ rows.double()),
    ):
        assert got.dtype == dtype
        assert (got.double() - expected).norm() < relative * expected.norm()


def test_the_product_is_the_same_to_the_bit_whatever_lies_around_its_operands():
    x, weight = tensor(128, 96).float(), tensor(80, 96, seed=1).float()
    expected = linear(x, weight)
    wide = torch.zeros(128, 3, 97)  # other strides, another alignment
    wide[:, 1, 1:] = x
    assert torch.equal(linear(wide[:, 1, 1:], weight), expected)


def test_without_onednn_torch_computes_it(monkeypatch):
    x, weight = tensor(200, 96).float(), tensor(80, 96, seed=1).float()
    monkeypatch.setattr(products, "_ONEDNN", False)
    torch.testing.assert_close(linear(x, weight).double(), x.double() @ weight.double().t(), rtol=1e-4, atol=1e-5)
