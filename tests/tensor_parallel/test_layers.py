"""Sharded layers against torch's own, unsharded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny
import torch
import torch.nn.functional as F

from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import ProcessMesh
from megapipe.models.provider import gpt_provider
from megapipe.partition.spans import LayerSpan
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from megapipe.tensor_parallel.rng import MicrobatchContext, dropout, initialize
from megapipe.tensor_parallel.weight_grad import WeightGrads

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def part(x: torch.Tensor, dim: int, tp: Axis) -> torch.Tensor:
    return x.chunk(tp.size, dim)[tp.rank]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_cross_entropy_equals_torch_without_gathering_the_vocabulary(tp):
    logits, target = tensor(5, 3, 16), torch.randint(0, 16, (5, 3))
    logits.requires_grad_()
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(5, 3)
    weights = tensor(5, 3, seed=1)
    (grad,) = torch.autograd.grad(expected, logits, weights)

    def body(mesh: ProcessMesh):
        local = part(logits.detach(), -1, mesh.tp).clone().requires_grad_()
        losses = vocab_parallel_cross_entropy(local, target, mesh.tp)
        losses.backward(weights)
        return losses.detach(), local.grad

    for rank, (losses, local) in enumerate(run_threads(body, tp=tp)):
        torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(local, grad.chunk(tp, -1)[rank], rtol=1e-10, atol=1e-15)


def test_cross_entropy_of_bf16_logits_is_computed_in_float32():
    logits, target = tensor(64, 2, 512).bfloat16(), torch.randint(0, 512, (64, 2))
    expected = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none").view(64, 2)
    losses = vocab_parallel_cross_entropy(logits, target, Axis())
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_column_then_row_linear_equals_two_plain_linears(tp, bias):
    x, up, down = tensor(3, 2, 8), tensor(16, 8, seed=1), tensor(8, 16, seed=2)
    b_up, b_down = (tensor(16, seed=3), tensor(8, seed=4)) if bias else (None, None)
    leaves = [t.requires_grad_() for t in (x, up, down)]
    expected = F.linear(F.gelu(F.linear(x, up, b_up)), down, b_down)
    grads = torch.autograd.grad(expected.square().sum(), leaves)

    def body(mesh: ProcessMesh):
        column = ColumnParallelLinear(8, 16, tp=mesh.tp, bias=bias).double()
        row = RowParallelLinear(16, 8, tp=mesh.tp, bias=bias).double()
        with torch.no_grad():
            column.weight.copy_(part(up, 0, mesh.tp))
            row.weight.copy_(part(down, 1, mesh.tp))
            if bias:
                column.bias.copy_(part(b_up, 0, mesh.tp))
                row.bias.copy_(b_down)
        local = x.detach().clone().requires_grad_()
        y = row(F.gelu(column(local)))
        y.square().sum().backward()
        return y.detach(), local.grad, column.weight.grad, row.weight.grad

    for rank, (y, gx, gup, gdown) in enumerate(run_threads(body, tp=tp)):
        torch.testing.assert_close(y, expected.detach())
        torch.testing.assert_close(gx, grads[0])
        torch.testing.assert_close(gup, grads[1].chunk(tp, 0)[rank])
        torch.testing.assert_close(gdown, grads[2].chunk(tp, 1)[rank])


@pytest.mark.parametrize("tp", [1, 2])
def test_embedding_equals_torch(tp):
    ids, table = torch.randint(0, 16, (4, 3)), tensor(16, 8).requires_grad_()
    expected = F.embedding(ids, table)
    (grad,) = torch.autograd.grad(expected.square().sum(), table)

    def body(mesh: ProcessMesh):
        layer = VocabParallelEmbedding(16, 8, tp=mesh.tp).double()
        with torch.no_grad():
            layer.weight.copy_(part(table, 0, mesh.tp))
        y = layer(ids)
        y.square().sum().backward()
        return y.detach(), layer.weight.grad

    for rank, (y, local) in enumerate(run_threads(body, tp=tp)):
        torch.testing.assert_close(y, expected.detach())
        torch.testing.assert_close(local, grad.chunk(tp, 0)[rank])


def test_a_b_pass_leaves_the_weight_gradient_to_its_w_pass():
    layer = ColumnParallelLinear(8, 6, tp=Axis(), bias=False).double()
    initialize(layer, 1, Axis())
    layer.weight.main_grad = torch.zeros(6, 8, dtype=torch.float64)
    stage, x = WeightGrads(), tensor(5, 8).requires_grad_()
    with stage.capturing():
        y = layer(x)
    with stage.deferring(3):
        assert not torch._C._is_multithreading_enabled()  # a GPU's would run in another thread
        y.sum().backward()
    assert x.grad is not None
    assert not layer.weight.main_grad.any()
    assert stage.owed == (3,)
    stage.run(3)
    torch.testing.assert_close(layer.weight.main_grad, torch.ones(5, 6).double().t() @ x.detach())
    assert stage.owed == ()


def test_weight_gradients_of_bf16_layers_add_up_in_float32():
    layer = ColumnParallelLinear(64, 32, tp=Axis(), bias=True).bfloat16()
    initialize(layer, 1, Axis())
    for param in layer.parameters():
        param.main_grad = torch.zeros(param.shape)
    xs = tensor(256, 16, 64).bfloat16()
    for x in xs:
        layer(x).sum().backward()
    # A product may be rounded once to bf16's 8 bits; a bf16 sum of 256 of them would be wrong by far more.
    exact = xs.double().sum((0, 1)).expand(32, 64)
    rounding = 2**-9 * xs.double().sum(1).abs().sum(0).expand(32, 64)
    assert ((layer.weight.main_grad - exact).abs() <= rounding).all()
    assert layer.bias.main_grad.eq(4096).all()


@pytest.mark.parametrize("tp", [2, 4])
def test_initial_weights_are_slices_of_the_same_whole(tp):
    def body(mesh: ProcessMesh):
        layers = torch.nn.ModuleDict(
            {
                "up": ColumnParallelLinear(8, 16, tp=mesh.tp, bias=True, blocks=2),
                "down": RowParallelLinear(16, 8, tp=mesh.tp, bias=True),
                "words": VocabParallelEmbedding(16, 8, tp=mesh.tp),
            }
        )
        initialize(layers, 5, mesh.tp)
        return {name: param.detach() for name, param in layers.named_parameters()}

    whole = body(ProcessMesh.single())
    for rank, local in enumerate(run_threads(body, tp=tp)):
        gate, up = whole["up.weight"].chunk(2, 0)
        expected = torch.cat((gate.chunk(tp, 0)[rank], up.chunk(tp, 0)[rank]))
        assert torch.equal(local["up.weight"], expected)
        assert torch.equal(local["down.weight"], whole["down.weight"].chunk(tp, 1)[rank])
        assert torch.equal(local["words.weight"], whole["words.weight"].chunk(tp, 0)[rank])
    assert whole["down.weight"].std() == pytest.approx(0.02, rel=0.3)
    assert not whole["down.bias"].any()


def test_dropout_keeps_the_mean_and_depends_on_sample_layer_and_place_only():
    x = torch.ones(200, 200)

    def draw(sample: int, *site: object):
        with MicrobatchContext(1, sample).active():
            return dropout(x, 0.25, *site)

    assert draw(0, 3, "mlp").mean() == pytest.approx(1.0, abs=0.01)
    assert (draw(0, 3, "mlp") == 0).float().mean() == pytest.approx(0.25, abs=0.01)
    assert torch.equal(draw(0, 3, "mlp"), draw(0, 3, "mlp"))
    assert not torch.equal(draw(0, 3, "mlp"), draw(1, 3, "mlp"))
    assert not torch.equal(draw(0, 3, "mlp"), draw(0, 4, "mlp"))
    assert not torch.equal(draw(0, 3, "mlp"), draw(0, 3, "attention"))


def test_dropout_of_a_slice_is_the_slice_of_the_whole():
    whole = dropout(torch.ones(3, 8, 5), 0.5, "probs", tp=Axis(), dim=1)
    for rank in range(2):
        tp = Axis(rank=rank, size=2)
        assert torch.equal(dropout(torch.ones(3, 4, 5), 0.5, "probs", tp=tp, dim=1), whole.chunk(2, 1)[rank])


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("style", tiny.STYLES)
def test_ranks_weights_are_put_together_by_megatrons_attributes(style, t):
    """A whole weight is cut in t x partition_stride pieces of partition_dim, of which rank r has every t-th from r on
    (megatron/core/tensor_parallel/layers.py, _initialize_affine_weight_cpu)."""

    def built(tp: Axis) -> dict[str, torch.nn.Parameter]:
        config = replace(tiny.STYLES[style], num_query_groups=4 if style == "llama" else None)
        module = gpt_provider(config, LayerSpan(0, 2, True, True), tp)
        initialize(module, 5, tp)
        return dict(module.named_parameters())

    whole = built(Axis())
    ranks = [built(Axis(rank, t, tuple(range(t)))) for rank in range(t)]
    strides = set()
    for name, expected in whole.items():
        parts = [params[name] for params in ranks]
        (said,) = {(p.tensor_model_parallel, p.partition_dim, p.partition_stride) for p in [expected, *parts]}
        is_split, dim, stride = said
        assert is_split == (dim >= 0) == (parts[0].shape != expected.shape)
        strides.add(stride)
        if is_split:
            pieces = [part.chunk(stride, dim) for part in parts]
            together = torch.cat([pieces[rank][n] for n in range(stride) for rank in range(t)], dim)
            torch.testing.assert_close(together, expected, rtol=0, atol=0)
    assert strides == ({1, 2} if style == "llama" else {1})  # gate and linear part lie in one weight
