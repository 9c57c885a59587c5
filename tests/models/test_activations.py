"""Each activation beside its formula in float64: values, gradients, and the tensors that an MLP keeps for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny import GPT2, LLAMA

from megapipe.config import ModelConfig
from megapipe.config.model.activation import ACTIVATIONS
from megapipe.distributed.axis import Axis
from megapipe.models.activations import ROWS
from megapipe.models.mlp import MLP
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.tensor_parallel.rng import initialize

CLAMPED = {"activation_func_clamp_value": 0.3, "glu_linear_offset": 1.0}
PLAIN = replace(LLAMA, swiglu=False)
CASES: dict[str, ModelConfig] = {
    "swiglu": LLAMA,
    "quick_geglu": replace(PLAIN, quick_geglu=True),
    "geglu": replace(PLAIN, geglu=True),
    "clamped swiglu": replace(LLAMA, **CLAMPED),
    "clamped quick_geglu": replace(PLAIN, quick_geglu=True, **CLAMPED),
    "geglu with an offset": replace(PLAIN, geglu=True, glu_linear_offset=1.0),
    "squared_relu": replace(PLAIN, squared_relu=True),
    "xielu": replace(PLAIN, xielu=True),
    "tanh gelu": GPT2,
    "erf gelu": PLAIN,
}


def formula(model: ModelConfig, x: torch.Tensor, scalars: list[torch.Tensor]) -> torch.Tensor:
    name = model.activation
    if name == "squared_relu":
        return x.clamp(min=0) ** 2
    if name == "gelu":
        return F.gelu(x, approximate="none" if model.erf_gelu else "tanh")
    if name == "xielu":
        above, below = (torch.log1p(x.exp()) for x in scalars)
        beta, least = 0.5, torch.tensor(-1e-6, dtype=torch.float32).double()
        negative = (beta + below) * (torch.minimum(x, least).exp() - 1 - x) + beta * x
        return torch.where(x > 0, above * x**2 + beta * x, negative)
    gate, up = x.chunk(2, -1)
    if model.activation_func_clamp_value:
        most = torch.tensor(model.activation_func_clamp_value, dtype=x.dtype)
        gate, up = torch.minimum(gate, most), torch.maximum(torch.minimum(up, most), -most)
    up = up + model.glu_linear_offset
    if name == "geglu":
        return up * gate * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    return up * gate / (1 + torch.exp(-gate * (1.702 if name == "quick_geglu" else 1)))


def built(model: ModelConfig, tp: Axis) -> MLP:
    mlp = MLP(model, tp)
    initialize(mlp, 1, tp)
    return mlp.double()


@pytest.mark.parametrize("case", CASES)
def test_an_mlp_and_its_gradients_are_those_of_the_formula(case):
    model = CASES[case]
    mlp = built(model, Axis())
    x = torch.randn(6, 2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).mul_(8).requires_grad_()
    mine = dict(mlp.named_parameters())
    mlp(x).sin().sum().backward()
    got = {name: param.grad for name, param in mine.items()} | {"x": x.grad}
    its = {name: param.detach().clone().requires_grad_() for name, param in mine.items()}
    y = x.detach().clone().requires_grad_()
    first = F.linear(y, its["linear_fc1.weight"], its.get("linear_fc1.bias"))
    between = formula(model, first, [its[f"act_fn.{name}"] for name in ("alpha_p", "alpha_n")] if model.xielu else [])
    F.linear(between, its["linear_fc2.weight"], its.get("linear_fc2.bias")).sin().sum().backward()
    want = {name: param.grad for name, param in its.items()} | {"x": y.grad}
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_the_plan_counts_the_tensors_that_an_mlp_keeps(case):
    model = CASES[case]
    mlp, saved = built(model, Axis()), {}
    own = {p.untyped_storage().data_ptr() for p in mlp.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own and tensor.numel() > 1:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(6, 2, 32, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = mlp(x)
    assert y.requires_grad
    assert sum(saved.values()) == 8 * 12 * (32 + ACTIVATIONS[model.activation].kept * model.ffn)


def test_the_two_tables_have_the_same_rows():
    assert ROWS.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize("sharded", [False, True])
def test_tensor_parallel_ranks_sum_the_gradients_of_xielus_scalars(sharded):
    """Each rank has other channels. A rank's own part alone is another number."""
    model = replace(CASES["xielu"], sequence_parallel=sharded)
    x = torch.randn(6, 2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def grads(tp: Axis) -> list[torch.Tensor]:
        mlp = built(model, tp)
        mine = x.chunk(tp.size)[tp.rank] if sharded and tp.size > 1 else x
        mlp(mine * 8).sin().sum().backward()
        assert mlp.act_fn is not None
        return [mlp.act_fn.alpha_p.grad, mlp.act_fn.alpha_n.grad]

    want = grads(Axis())
    parts = run_threads(lambda mesh: grads(mesh.tp), tp=2)
    for whole, *mine in zip(want, *parts, strict=True):
        torch.testing.assert_close(sum(mine), whole, rtol=1e-10, atol=1e-12)
        assert not torch.allclose(mine[0], whole)
