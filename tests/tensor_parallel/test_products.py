"""The product of linear layers against float64, in every role and for both sides of the threshold."""

from __future__ import annotations

import pytest
import torch

from megapipe.tensor_parallel import products
from megapipe.tensor_parallel.products import add_linear, linear


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["oneDNN", "torch"])
def kernel(request, monkeypatch):
    """What multiplies float32 here, whatever this processor's choice is."""
    monkeypatch.setattr(products, "_ONEDNN", request.param == "oneDNN")


@pytest.mark.usefixtures("kernel")
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


@pytest.mark.usefixtures("kernel")
def test_the_product_is_the_same_to_the_bit_whatever_lies_around_its_operands():
    x, weight = tensor(128, 96).float(), tensor(80, 96, seed=1).float()
    expected = linear(x, weight)
    wide = torch.zeros(128, 3, 97)  # other strides, another alignment
    wide[:, 1, 1:] = x
    assert torch.equal(linear(wide[:, 1, 1:], weight), expected)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("n", [3, 200])
def test_a_product_is_added_to_what_is_there(n):
    dy, x, into = tensor(n, 80).float(), tensor(n, 96, seed=1).float(), tensor(80, 96, seed=2).float()
    expected = into.double() + dy.double().t() @ x.double()
    add_linear(into, dy.t(), x.t())
    torch.testing.assert_close(into.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("vendor", "intel"), [("GenuineIntel", True), ("AuthenticAMD", False), (None, False)])
def test_the_processor_is_read_where_linux_says_it(tmp_path, vendor, intel):
    if vendor:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    assert products._intel(tmp_path / "cpuinfo") is intel
