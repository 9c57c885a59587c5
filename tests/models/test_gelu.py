"""GELU against torch's in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megapipe.models import gelu as module
from megapipe.models.gelu import gelu


@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"),
    [(torch.float64, 1e-12, 1e-14), (torch.float32, 2e-6, 1e-7), (torch.bfloat16, 2**-7, 1e-7)],
)
def test_value_and_slope_equal_torch_in_float64(monkeypatch, dtype, rtol, atol):
    monkeypatch.setattr(module, "_PART", 1000)  # several parts and a rest
    x = torch.linspace(-12, 12, 4999).bfloat16().to(dtype).view(1, 4999).requires_grad_()
    wide = x.detach().double().requires_grad_()
    expected = F.gelu(wide, approximate="tanh")
    y = gelu(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, rtol=rtol, atol=atol)
    y.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=rtol, atol=5 * atol)


def test_a_transposed_input_and_infinities():
    x = torch.randn(6, 5, dtype=torch.float64).t()
    torch.testing.assert_close(gelu(x), F.gelu(x, approximate="tanh"), rtol=1e-12, atol=1e-15)
    assert gelu(torch.tensor([float("inf")])).item() == float("inf")
    assert gelu(torch.tensor([float("nan")])).isnan()


def test_backward_keeps_as_much_as_the_input_and_leaves_it_alone():
    kept = []
    x = torch.randn(7, 300, requires_grad=True)
    before = x.detach().clone()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        gelu(x).sum().backward()
    assert kept == [x.nbytes]
    assert torch.equal(x, before)
