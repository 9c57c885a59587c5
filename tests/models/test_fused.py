"""Regions between the products compute what torch's own operations do, and keep what they are said to keep."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from nightly import by_night
from torch import Tensor

from megapipe.models import fused
from megapipe.models.fused import fused_add_norm, swiglu, turned


def made(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def check(ours: Tensor, theirs: Tensor, inputs: tuple[Tensor, ...]) -> None:
    """Equal values, and equal gradients of a sum that weighs each element otherwise."""
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1, 1, ours.numel(), dtype=ours.dtype).view(ours.shape)
    grads = [torch.autograd.grad((y * weights).sum(), inputs, retain_graph=True) for y in (ours, theirs)]
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-12)


def test_swiglu_is_silu_of_the_gate_times_up_and_keeps_its_input_alone():
    x, kept = made(5, 3, 8), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        y = swiglu(x)
    check(y, F.silu(x[..., :4]) * x[..., 4:], (x,))
    assert kept == [x.shape]


def test_a_weighted_swiglu_has_the_gradients_of_its_rows_and_of_their_weights():
    x, weight = made(5, 8), made(5, seed=1)
    check(swiglu(x, weight), F.silu(x[:, :4]) * x[:, 4:] * weight[:, None], (x, weight))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [8, 4])
def test_a_rotation_turns_pairs_of_channels_as_complex_numbers(interleaved, dim):
    x, angle = made(6, 2, 3, 8), torch.linspace(0, 5, 6 * dim // 2, dtype=torch.float64).view(6, 1, 1, dim // 2)
    order = torch.arange(dim).view(dim // 2, 2).t() if interleaved else torch.arange(dim).view(2, dim // 2)
    number = torch.complex(x[..., order[0]], x[..., order[1]]) * torch.polar(torch.ones_like(angle), angle)
    by_hand = torch.empty_like(x).copy_(x).index_copy(-1, order[0], number.real).index_copy(-1, order[1], number.imag)
    both = torch.cat((angle, angle), -1)
    check(turned(x, both.cos(), both.sin(), interleaved), by_hand, (x,))


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_sum_and_its_norm_have_the_gradients_of_both(adds, with_bias):
    x, weight, bias, delta = made(4, 3, 8), made(8, seed=1), made(8, seed=2), made(4, 3, 8, seed=3)
    total = x + delta if adds else x
    mean = total.mean(-1, keepdim=True) if with_bias else 0
    by_hand = (total - mean) / ((total - mean).square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    by_hand = by_hand + bias if with_bias else by_hand
    ours = fused_add_norm(x, delta if adds else None, weight, bias if with_bias else None, 1e-5)
    inputs = (x, weight, *([delta] if adds else []), *([bias] if with_bias else []))
    check(ours[1], by_hand, inputs)
    again = fused_add_norm(x, delta if adds else None, weight, bias if with_bias else None, 1e-5)
    check(torch.cat(again), torch.cat((total * 1, by_hand)), inputs)


REGIONS = [
    "swiglu",
    "swiglu_backward",
    "swiglu, no weight",
    "swiglu_backward, no weight",
    "rotate",
    "norm",
    "add_norm",
    "norm_backward",
]
TRACED = [(name, "aot_eager") for name in REGIONS]


@pytest.mark.parametrize(("name", "backend"), by_night([*TRACED, ("norm_backward", "inductor")], day=TRACED))
def test_a_region_computes_the_same_in_the_kernel_that_a_compiler_writes(name, backend):
    """One by the C++ of a CPU at night, 20 CPU seconds; the Triton of a GPU comes from the same graph."""
    torch.compiler.reset()
    x, other, weight = (made(*shape).detach() for shape in ((6, 2, 4, 8), (6, 2, 4, 8), (8,)))
    angle = torch.linspace(0, 5, 6 * 8, dtype=torch.float64).view(6, 1, 1, 8)
    row = other.view(-1, 8)[:, 0]
    given = {
        "swiglu": (x.view(-1, 8), row),
        "swiglu_backward": (x.view(-1, 8), row, other.view(-1, 8)[:, :4]),
        "swiglu, no weight": (x, None),
        "swiglu_backward, no weight": (x, None, other[..., :4]),
        "rotate": (x, angle.cos(), angle.sin(), False, True),
        "norm": (x, weight, None, 1e-5),
        "add_norm": (x, other, weight, None, 1e-5),
        "norm_backward": (x, other, x + 1, weight, weight, 1e-5),
    }[name]
    name = name.partition(",")[0]
    operation = getattr(torch.ops.megapipe, name)
    compiled = torch.compile(getattr(fused, f"_{name}").__wrapped__, backend=backend)
    torch.testing.assert_close(compiled(*given), operation(*given), rtol=1e-12, atol=1e-12)
    torch.library.opcheck(operation.default, given, test_utils=("test_schema", "test_faketensor"))
