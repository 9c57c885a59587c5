"""Loops in C beside torch's operations, which a machine without a compiler runs in their place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from whole_step import take_step

from megapipe.config import OptimizerConfig
from megapipe.distributed.axis import ALONE
from megapipe.distributed.mesh import ProcessMesh
from megapipe.kernels import cpu
from megapipe.models.attention import cpu as blocks
from megapipe.models.attention.cpu import causal_attention
from megapipe.models.gelu import gelu
from megapipe.optim import adamw
from megapipe.optim.optimizer import Optimizer
from megapipe.tensor_parallel import products
from megapipe.tensor_parallel.fused_cross_entropy import vocab_parallel_linear_cross_entropy

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="no C compiler here")
BF16, FP32 = torch.bfloat16, torch.float32
TOLERANCE = {BF16: {"rtol": 2e-2, "atol": 2e-2}, FP32: {"rtol": 2e-5, "atol": 2e-5}}


def drawn(*shape: int, dtype: torch.dtype = FP32, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))).to(dtype)


def attention(dtype: torch.dtype) -> list[Tensor]:
    """150 tokens are two blocks, the second no multiple of 16; two heads of a group."""
    q, k, v = (drawn(2, heads, 150, 24, dtype=dtype).requires_grad_() for heads in (4, 2, 2))
    out = causal_attention(q, k, v)
    return [out, *torch.autograd.grad(out, (q, k, v), drawn(*out.shape, dtype=dtype))]


def head(dtype: torch.dtype) -> list[Tensor]:
    """A vocabulary of 101, labels at both ends and one without loss."""
    x, weight = drawn(37, 24, dtype=dtype).requires_grad_(), drawn(101, 24, dtype=dtype, scale=4).requires_grad_()
    loss = vocab_parallel_linear_cross_entropy(x, weight, torch.tensor([0, 100, -100, *range(34)]), ALONE)
    return [loss, *torch.autograd.grad(loss.sum(), (x, weight))]


def activation(dtype: torch.dtype) -> list[Tensor]:
    x = torch.cat((drawn(999, dtype=dtype, scale=3), torch.tensor([-1e4, 1e4, 0.0]).to(dtype)))
    x.requires_grad_()
    y = gelu(x)
    return [y, *torch.autograd.grad(y, x, drawn(len(x), dtype=dtype))]


def weight_gradient(out: int, into: int) -> Callable[[torch.dtype], list[Tensor]]:
    """Rows and columns that are no multiples of a tile; on a processor with tiles the smaller side is transposed."""

    def added(dtype: torch.dtype) -> list[Tensor]:
        main_grad = drawn(out, into)
        products.add_product(main_grad, drawn(45, out, dtype=dtype), drawn(45, into, dtype=dtype))
        return [main_grad]

    return added


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(
    "case",
    [attention, head, activation, weight_gradient(70, 33), weight_gradient(33, 70)],
    ids=lambda case: case.__name__,
)
def test_a_loop_gives_what_torch_does(
    case: Callable[[torch.dtype], list[Tensor]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_TILES", True)
    monkeypatch.setattr(blocks, "has_attention", lambda *operands: False)
    ours = case(dtype)
    monkeypatch.setattr(cpu, "library", lambda: None)
    for got, expected in zip(ours, case(dtype), strict=True):
        assert_close(got, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_bits_of_an_element_do_not_depend_on_where_it_lies_or_on_threads(dtype: torch.dtype) -> None:
    """Microbatches may be cut into slices, and a rank may have more cores than another."""
    x, threads = drawn(40_003, dtype=dtype, scale=2), torch.get_num_threads()
    whole = cpu.gelu(x, 1.6, 0.07)
    assert torch.equal(whole[5:29], cpu.gelu(x[5:29].clone(), 1.6, 0.07))
    scores = drawn(6, 8, 77, dtype=dtype)
    one = scores[3:4].clone()
    cpu.causal_softmax_(one, 8)
    try:
        torch.set_num_threads(3)
        assert torch.equal(whole, cpu.gelu(x, 1.6, 0.07))
        cpu.causal_softmax_(scores, 8)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(scores[3:4], one)


def test_what_is_no_number_stays_none() -> None:
    """The guards look for it behind the step."""
    x = torch.tensor([float("nan"), float("inf"), 1.0]).repeat(20).bfloat16()
    assert cpu.gelu(x, 1.6, 0.07).isnan().sum() == 20
    scores = drawn(1, 1, 40)
    scores[0, 0, 3] = float("nan")
    cpu.causal_softmax_(scores, 1)
    assert scores.isnan().all()


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_an_update_in_one_sweep_has_the_bits_of_torchs_own_sweeps(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps of 1003 numbers, scaled and clipped: weights, gradients, moments and the model's weights."""

    def updated() -> list[Tensor]:
        weight = torch.nn.Parameter(drawn(17, 59, dtype=dtype))
        layer = torch.nn.Module()
        layer.register_parameter("weight", weight)
        train = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=1.0)
        optimizer = Optimizer([layer], train, ProcessMesh.single())
        for step in range(2):
            weight.main_grad.copy_(drawn(17, 59, scale=step + 1))  # type: ignore[attr-defined]
            take_step(optimizer, 1e-2, grad_scale=0.3)
        return [weight.data, *(b.main for b in optimizer.owned), *(x for xs in optimizer.moments.values() for x in xs),
                *(b.grads for b in optimizer.owned)]  # fmt: skip

    swept = updated()
    monkeypatch.setattr(cpu, "library", lambda: None)
    assert all(torch.equal(a, b) for a, b in zip(swept, updated(), strict=True))


@pytest.mark.parametrize("labels", [torch.tensor([0, 4, 2], dtype=torch.int32), torch.tensor([0, 9, 4, 9, 2, 9])[::2]])
def test_labels_of_32_bits_or_with_gaps_name_the_same_columns(labels: Tensor) -> None:
    """C reads 64 bits of each: of two labels of 32 bits it made one, and the gradient was another."""
    logits = drawn(3, 5)
    want = logits.softmax(1) - torch.eye(5)[labels.long()]
    cpu.to_gradient_(logits, logits.logsumexp(1), torch.ones(3), labels)
    assert_close(logits, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(12,), (3, 4), (1, 3, 4)])
def test_an_update_reaches_every_element_whatever_the_shape(shape: tuple[int, ...]) -> None:
    """A rule that is not elementwise hands over parameters in their shapes. Adam's first step is the rate."""
    value, grad, first, second = torch.ones(4, *shape)
    cpu.adamw_(value, grad, first, second, None, torch.ones(()), (1.0, 1.0, -0.5, 1.0, 0.1, 0.9, 0.1, 0.0))
    assert torch.equal(value, torch.full(shape, 0.5))


def test_the_region_of_a_gpu_makes_the_same_update() -> None:
    """Its formula, operation by operation; no GPU has run the kernel that is compiled of it."""
    made = []
    for in_region in (False, True):
        tensors = [drawn(999, scale=scale).abs() for scale in (1.0, 0.1, 0.01, 0.001)]
        numbers = (0.3, 0.5, 0.999, -1e-2, 0.2)
        if in_region:
            adamw._adamw(*tensors, None, *map(torch.tensor, numbers), 0.1, 0.95, 0.05, 1e-8)
        else:
            cpu.adamw_(*tensors, None, torch.tensor(numbers[0]), (*numbers[1:], 0.1, 0.95, 0.05, 1e-8))
        made.append(tensors)
    for a, b in zip(*made, strict=True):
        assert_close(a, b, rtol=1e-6, atol=1e-7)
