"""Our attention for CPUs against torch's in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megapipe.models.attention import cpu
from megapipe.models.attention.cpu import causal_attention

Tensors = tuple[torch.Tensor, ...]


def inputs(b: int, heads: int, groups: int, s: int, d: int) -> Tensors:
    """q, k, v and the gradient of the result in float64, rounded to bf16 so that any type holds them."""
    g = torch.Generator().manual_seed(s)
    shapes = (b, heads, s, d), (b, groups, s, d), (b, groups, s, d), (b, heads, s, d)
    return tuple(torch.randn(shape, generator=g).bfloat16().double() for shape in shapes)


def run(attention, q, k, v, grad, dtype: torch.dtype) -> Tensors:
    """The result and the gradients of q, k, v in float64."""
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    assert out.dtype == dtype
    return tuple(x.double() for x in (out, *torch.autograd.grad(out, leaves, grad.to(dtype))))


def torchs(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.fixture
def no_tiles(monkeypatch):
    """Blocks of scores by torch's products, on a processor whose tiles would do all at once too."""
    monkeypatch.setattr(cpu, "has_attention", lambda *operands: False)


@pytest.mark.parametrize("s", [1, 7, 128, 129, 300])
@pytest.mark.parametrize(("b", "heads", "groups", "d"), [(2, 3, 3, 16), (2, 6, 2, 24), (1, 4, 1, 8)])
def test_value_and_gradients_equal_torch_in_float64(b, heads, groups, d, s):
    case = inputs(b, heads, groups, s, d)
    for got, expected in zip(
        run(causal_attention, *case, torch.float64), run(torchs, *case, torch.float64), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3)])
def test_narrow_types_are_as_close_to_float64_as_they_round(dtype, relative):
    case = inputs(2, 4, 2, 333, 32)
    for got, expected in zip(run(causal_attention, *case, dtype), run(torchs, *case, torch.float64), strict=True):
        assert (got - expected).norm() < relative * expected.norm()


def test_where_a_processor_has_tiles_they_alone_compute(monkeypatch):
    """Not blocks of scores too, whose result would take the place of theirs."""
    monkeypatch.setattr(cpu, "has_attention", lambda *operands: True)
    monkeypatch.setattr(cpu, "attention_", lambda q, k, v, out: out.fill_(7))
    q, k, v, _ = inputs(1, 2, 2, 5, 8)
    assert causal_attention(q, k, v).eq(7).all()


@pytest.mark.usefixtures("no_tiles")
def test_a_few_heads_at_a_time_give_the_same_bits(monkeypatch):
    case = inputs(2, 4, 2, 200, 16)
    whole = run(causal_attention, *case, torch.float32)
    monkeypatch.setattr(cpu, "_SCORES", 1)  # one pair of sequence and group
    for got, expected in zip(run(causal_attention, *case, torch.float32), whole, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.usefixtures("no_tiles")
def test_neither_pass_holds_more_than_two_blocks_of_scores(monkeypatch):
    s, heads = 1024, 2
    monkeypatch.setattr(cpu, "_SCORES", 1)
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    saved = []
    leaves = [torch.randn(1, heads, s, 8, requires_grad=True) for _ in range(3)]
    with Sizes(), torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        causal_attention(*leaves).sum().backward()
    assert largest == 4 * 128 * s
    assert [x.data_ptr() for x in saved] == [x.data_ptr() for x in leaves]


def test_what_the_result_is_laid_out_as_needs_no_copy_in_the_next_layer():
    q, k, v, _ = inputs(2, 4, 2, 5, 8)
    assert causal_attention(q, k, v).permute(2, 0, 1, 3).is_contiguous()


def test_of_no_sequence_there_is_no_result():
    q, k = torch.empty(0, 4, 5, 8, requires_grad=True), torch.empty(0, 2, 5, 8)
    out = causal_attention(q, k, k)
    out.sum().backward()
    assert out.shape == q.shape == q.grad.shape
