"""Products in eight bits: against those of what is quantised in float64, torch's own, and the unsplit layer."""

import pytest
import torch

from megapipe.distributed.axis import Axis
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megapipe.tensor_parallel.fp8.products import (
    GRADIENT,
    INPUT,
    WEIGHT,
    Delayed,
    FP8Recipe,
    _on_gpu,
    multiply,
    products_of,
)
from megapipe.tensor_parallel.products import PLAIN
from megapipe.tensor_parallel.weight_grad import WeightGrads

KINDS = ("tensorwise", "delayed", "blockwise", "mxfp8")
N, IN, OUT = 37, 96, 48


def random(*shape, seed=0, size=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size


def by_hand(x, kind, most):
    """x [r, k] in float64, rounded to eight bits by the recipe of an operand that is no weight of blockwise."""
    dtype = torch.float8_e4m3fn if most == 448 else torch.float8_e5m2
    if kind in ("tensorwise", "delayed"):
        scale = most / x.abs().max()
        return (x * scale).to(dtype).double() / scale.double()
    parts = []
    for part in x.split(32 if kind == "mxfp8" else 128, dim=1):
        scale = 2.0 ** torch.floor(torch.log2(most / part.abs().amax(1, keepdim=True)))
        parts.append((part * scale).to(dtype).double() / scale.double())
    return torch.cat(parts, 1)


def weight_by_hand(w, kind):
    # One block of 128 x 128 has it all, as one tensor, but by a power of two.
    if kind != "blockwise":
        return by_hand(w, kind, 448)
    scale = 2.0 ** torch.floor(torch.log2(448 / w.abs().max()))
    return (w * scale).to(torch.float8_e4m3fn).double() / scale.double()


@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_product_is_that_of_the_quantised_operands_in_float64(kind, form):
    products, most = products_of(FP8Recipe(form, kind)), 57344 if form == "hybrid" else 448
    x, w, dy = random(N, IN), random(OUT, IN, seed=1, size=0.02), random(N, OUT, seed=2, size=1e-6)
    bias = random(OUT, seed=3)
    wanted = by_hand(x, kind, 448) @ weight_by_hand(w, kind).t() + bias.double()
    torch.testing.assert_close(products.forward(x.view(N, 1, IN), w, bias)[:, 0].double(), wanted, rtol=0, atol=1e-5)
    wanted = by_hand(dy, kind, most) @ weight_by_hand(w.t(), kind).t()
    torch.testing.assert_close(products.input_grad(dy, w).double(), wanted, rtol=0, atol=1e-12)
    wanted = by_hand(dy.t(), kind, most) @ by_hand(x.t(), kind, 448).t()
    torch.testing.assert_close(products.weight_grad(dy, x).double(), wanted, rtol=0, atol=1e-10)


def test_a_factor_of_mxfp8_is_of_32_numbers_along_the_sum():
    """OCP's microscaling formats: a large number takes the small ones of its own block alone to 0."""
    x = torch.ones(1, IN)
    x[0, 32] = 2.0**30
    wanted = torch.cat([torch.ones(32), torch.tensor([2.0**30]), torch.zeros(31), torch.ones(32)])
    products = products_of(FP8Recipe("e4m3", "mxfp8"))
    assert torch.equal(products.forward(x, torch.eye(IN))[0], wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_rounded_once_and_main_gradients_never(kind):
    products = products_of(FP8Recipe("hybrid", kind))
    x, w, dy = random(N, IN).bfloat16(), random(OUT, IN, seed=1).bfloat16(), random(N, OUT, seed=2).bfloat16()
    assert torch.equal(products.forward(x, w), products.forward(x.float(), w.float()).bfloat16())
    main_grad = torch.ones(OUT, IN)
    products.add_weight_grad(main_grad, dy, x)
    assert torch.equal(main_grad, 1 + products.weight_grad(dy.float(), x.float()))


def test_the_weights_gradient_may_stay_out():
    dy, x = random(N, OUT).bfloat16(), random(N, IN, seed=1).bfloat16()
    products = products_of(FP8Recipe("hybrid", "tensorwise", weight_grads=False))
    assert torch.equal(products.weight_grad(dy, x), PLAIN.weight_grad(dy, x))
    one, two = torch.zeros(OUT, IN), torch.zeros(OUT, IN)
    products.add_weight_grad(one, dy, x)
    PLAIN.add_weight_grad(two, dy, x)
    assert torch.equal(one, two)


@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
def test_torchs_scaled_product_computes_the_same(form):
    """The call of a GPU, which torch has for CPUs too; rows of 37 tokens are filled up there."""
    products = products_of(FP8Recipe(form, "tensorwise"))
    x, w, dy = random(N, IN), random(OUT, IN, seed=1), random(N, OUT, seed=2)
    bias = random(OUT, seed=3)
    pairs = [
        (products.quantised(x, INPUT), products.quantised(w, WEIGHT), bias.bfloat16(), torch.bfloat16),
        (products.quantised(x, INPUT), products.quantised(w, WEIGHT), bias, torch.float32),
        (products.quantised(dy, GRADIENT), products.quantised(w.t(), WEIGHT), None, torch.bfloat16),
        (products.quantised(dy.t(), GRADIENT), products.quantised(x.t(), INPUT), None, torch.float32),
    ]
    for a, b, added, dtype in pairs:
        found, wanted = _on_gpu(a, b, dtype, added, False), multiply(a, b, dtype, added)
        assert found.dtype == dtype
        torch.testing.assert_close(found, wanted, rtol=1e-6 if dtype == torch.float32 else 2**-8, atol=1e-5)


def layer(kind, tp, column, sequence_parallel=False):
    """Of weights by name, with main_grad, and histories as after a step."""
    made = ColumnParallelLinear if column else RowParallelLinear
    linear = made(256, 256, tp=tp, bias=False, sequence_parallel=sequence_parallel, fp8=FP8Recipe("hybrid", kind))
    dim = 0 if column else 1
    with torch.no_grad():
        linear.weight.copy_(random(256, 256, seed=1, size=0.1).chunk(tp.size, dim)[tp.rank])
    linear.weight.main_grad = torch.zeros_like(linear.weight)
    if isinstance(linear.products, Delayed):
        linear.products.amax_history.copy_(torch.tensor([[3.0], [0.3], [2.0]]))
    return linear


def passes(linear, x, dy, deferred):
    """(y, dx, main_grad) of one microbatch."""
    owner, x = WeightGrads(), x.clone().requires_grad_()
    with owner.capturing():
        y = linear(x)
    if deferred:
        with owner.deferring(0):
            y.backward(dy)
        assert not linear.weight.main_grad.any()
        with torch.no_grad():
            owner.run(0)
    else:
        y.backward(dy)
    return y.detach(), x.grad, linear.weight.main_grad


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("column", [True, False], ids=["column", "row"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_deferred_weight_gradient_has_the_same_bits(kind, column, sequence_parallel):
    def rank(mesh):
        found = []
        for deferred in (False, True):
            linear = layer(kind, mesh.tp, column, sequence_parallel)
            x, dy = random(64, 1, 256, seed=2), random(64, 1, 256, seed=3)
            inner, outer = (dy, x) if column else (x, dy)  # split along the features, or along the sequence
            inner = inner.chunk(2, -1)[mesh.tp.rank]
            outer = outer.chunk(2)[mesh.tp.rank] if sequence_parallel else outer
            x, dy = (outer, inner) if column else (inner, outer)
            found.append(passes(linear, x.contiguous(), dy.contiguous(), deferred))
        return found

    for now, later in run_threads(rank, tp=2):
        assert all(torch.equal(a, b) for a, b in zip(now, later, strict=True))


@pytest.mark.parametrize("column", [True, False], ids=["column", "row"])
@pytest.mark.parametrize("kind", ["delayed", "blockwise", "mxfp8"])
def test_ranks_quantise_their_slices_as_one_does_the_whole(kind, column):
    """Scales that steps share or blocks have are those of the whole; a slice's own amax is not (tensorwise)."""
    x, dy = random(64, 1, 256, seed=2), random(64, 1, 256, seed=3)
    wanted = passes(layer(kind, Axis(), column), x, dy, False)

    def rank(mesh):
        mine = (dy if column else x).chunk(2, -1)[mesh.tp.rank].contiguous()
        return passes(layer(kind, mesh.tp, column), *((x, mine) if column else (mine, dy)), False)

    parts = [*zip(*run_threads(rank, tp=2), strict=True)]
    joined = [
        torch.cat(parts[0], -1) if column else parts[0][0],
        parts[1][0] if column else torch.cat(parts[1], -1),
        torch.cat(parts[2], 0 if column else 1),
    ]
    for found, expected in zip(joined, wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_delayed_scales_follow_from_the_largest_of_the_steps_or_the_last():
    for algorithm, amax in (("max", 8.0), ("most_recent", 2.0)):
        products = Delayed(FP8Recipe("e4m3", "delayed", margin=1, history=3, algorithm=algorithm))
        x = random(4, 32)
        assert products.quantised(x, INPUT).factors.item() == pytest.approx(x.abs().max().item() * 2 / 448)
        for seen in (8.0, 2.0):
            products.amax_history.copy_(products.after(torch.tensor([seen, 0.0, 0.0])))
        assert products.amax_history[0].tolist() == [2.0, 8.0, 0.0]
        assert products.quantised(x, INPUT).factors.item() == pytest.approx(amax * 2 / 448)
        assert products.quantised(x, WEIGHT).factors.item() == pytest.approx(x.abs().max().item() * 2 / 448)
        assert products.seen.tolist() == [x.abs().max().item(), x.abs().max().item(), 0.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU of compute capability 8.9")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_computes_what_a_cpu_does(kind):
    x, w, dy = random(N, IN).bfloat16(), random(OUT, IN, seed=1).bfloat16(), random(N, OUT, seed=2).bfloat16()
    on_cpu, on_gpu = (products_of(FP8Recipe("hybrid", kind)) for _ in range(2))
    if isinstance(on_gpu, Delayed):
        on_gpu.cuda()
    for name, pair in (("forward", (x, w)), ("input_grad", (dy, w)), ("weight_grad", (dy, x))):
        wanted = getattr(on_cpu, name)(*pair)
        found = getattr(on_gpu, name)(*(t.cuda() for t in pair)).cpu()
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-7 * wanted.abs().max().item())
