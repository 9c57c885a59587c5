"""A layer of experts against the formulas, token by token in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tiny import GPT2, LLAMA
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.distributed.axis import ALONE, Axis
from megapipe.distributed.mesh import ProcessMesh
from megapipe.models.mlp import activate
from megapipe.models.moe import experts as grouped
from megapipe.models.moe.choice import best
from megapipe.models.moe.layer import MoE
from megapipe.models.recompute import recompute
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.tensor_parallel.rng import Stream, initialize
from megapipe.tensor_parallel.weight_grad import WeightGrads

S, B, E = 7, 2, 6
T = S * B
SWIGLU = replace(LLAMA, hidden_size=16, num_experts=E, moe_ffn_hidden_size=12, init_method_std=0.5)
GELU = replace(GPT2, hidden_size=16, num_experts=E, moe_ffn_hidden_size=12, init_method_std=0.5)
SIGMOID = replace(SWIGLU, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
LOSSES = {"moe_aux_loss_coeff": (0.3,), "moe_z_loss_coeff": 0.2}
CASES = {
    "softmax after": replace(SWIGLU, **LOSSES),
    "softmax before": replace(SWIGLU, moe_router_pre_softmax=True, moe_router_topk=1, **LOSSES),
    "gelu with biases": replace(GELU, moe_router_topk=3, **LOSSES),
    "sigmoid": replace(SIGMOID, moe_router_topk_scaling_factor=2.5, **LOSSES),
    "sqrtsoftplus": replace(SIGMOID, moe_router_score_function="sqrtsoftplus", **LOSSES),
    "groups": replace(SIGMOID, moe_router_num_groups=3, moe_router_group_topk=2, moe_router_topk=4, **LOSSES),
    "groups after": replace(SWIGLU, moe_router_num_groups=2, moe_router_group_topk=1, moe_router_topk=2),
    "groups by their best": replace(
        SWIGLU,
        moe_router_pre_softmax=True,
        moe_router_num_groups=3,
        moe_router_group_topk=2,
        moe_router_group_score_topk=1,
        moe_router_topk=4,
        moe_router_topk_scaling_factor=16.0,
    ),
    "per sequence": replace(SWIGLU, moe_router_load_balancing_type=("seq_aux_loss",), **LOSSES),
    "several": replace(
        SWIGLU,
        moe_router_load_balancing_type=("aux_loss", "seq_aux_loss", "global_aux_loss"),
        moe_aux_loss_coeff=(0.3, 0.2, 0.1),
    ),
    "dropping": replace(SWIGLU, moe_expert_capacity_factor=0.8, **LOSSES),
    "dropping the last": replace(SIGMOID, moe_expert_capacity_factor=0.8, moe_token_drop_policy="position"),
    "padding": replace(GELU, moe_expert_capacity_factor=0.8, moe_pad_expert_input_to_capacity=True, **LOSSES),
    "padding of one choice": replace(
        GELU,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        moe_expert_capacity_factor=1.0,  # more rows than tokens, of which some have none: an IndexError once
        moe_pad_expert_input_to_capacity=True,
    ),
    "much room": replace(GELU, moe_expert_capacity_factor=9.0, moe_pad_expert_input_to_capacity=True),
    "shared": replace(GELU, moe_shared_expert_intermediate_size=8),
    "shared with a gate": replace(SWIGLU, moe_shared_expert_intermediate_size=8, moe_shared_expert_gate=True),
}


def layer_of(model: ModelConfig, tp: Axis = ALONE) -> MoE:
    layer = MoE(model, tp, 1)
    initialize(layer, 5, tp)
    layer = layer.double()
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.copy_(torch.linspace(-0.4, 0.4, E).float())
    return layer


def inputs() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(4)
    return tuple(torch.randn(S, B, 16, dtype=torch.float64, generator=draw) for _ in range(2))  # type: ignore[return-value]


def scores(l: Tensor, model: ModelConfig) -> Tensor:
    kind = model.moe_router_score_function
    return l.softmax(-1) if kind == "softmax" else l.sigmoid() if kind == "sigmoid" else F.softplus(l).sqrt()


def chosen(l: Tensor, bias: Tensor | None, model: ModelConfig) -> list[int]:
    """Of one token, whose logits are [E]."""
    by = [float(x) for x in (scores(l, model) if bias is None else scores(l, model) + bias)]
    among = range(E)
    groups, keep = model.moe_router_num_groups, model.moe_router_group_topk
    if groups and keep:
        after = model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax
        of = [float(x) for x in l] if after else by
        size, counted = E // groups, model.moe_router_group_score_topk or model.moe_router_topk // keep
        sums = [sum(sorted(of[g * size : (g + 1) * size], reverse=True)[:counted]) for g in range(groups)]
        kept = sorted(range(groups), key=lambda g: (-sums[g], g))[:keep]
        among = [e for e in range(E) if e // size in kept]  # type: ignore[assignment]
    return sorted(among, key=lambda e: (-by[e], e))[: model.moe_router_topk]


def formula(layer: MoE, x: Tensor) -> tuple[Tensor, Tensor, dict[str, float], list[int]]:
    """The output, the sum of the weighted losses, each loss without its weight, and tokens of each expert."""
    model, rows = layer.router.config, x.reshape(T, -1)
    logits = F.linear(rows, layer.router.weight, layer.router.bias)
    fixed = logits.detach()
    bias = layer.router.expert_bias
    choices = [chosen(l, bias, model) for l in fixed]
    weights = torch.zeros(T, E, dtype=torch.float64)
    for t, mine in enumerate(choices):
        s = scores(logits[t], model)[mine]
        if model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax:
            s = logits[t][mine].softmax(-1)
        elif model.moe_router_score_function != "softmax" and len(mine) > 1:
            s = s / s.sum()
        weights[t, mine] = s * (model.moe_router_topk_scaling_factor or 1.0)
    routed = [{t for t in range(T) if e in choices[t]} for e in range(E)]
    kept = routed
    if (factor := model.moe_expert_capacity_factor) is not None:
        most = math.ceil(T * model.moe_router_topk / E * factor)
        order = {"probs": lambda e: lambda t: (-float(weights[t, e].detach()), t), "position": lambda e: lambda t: t}
        by = order[model.moe_token_drop_policy]
        kept = [set(sorted(routed[e], key=by(e))[:most]) for e in range(E)]
    y = torch.zeros_like(rows)
    for e in range(E):
        for t in sorted(kept[e]):
            y[t] += weights[t, e] * expert(layer, e, rows[t])
    if layer.shared_experts is not None:
        y = y + layer.shared_experts(x).reshape(T, -1)  # an MLP, which other tests know
    s = scores(logits, model)
    s = s if model.moe_router_score_function == "softmax" else s / s.sum(-1, keepdim=True)
    unbiased = [
        sorted(range(E), key=lambda e, row=row: (-float(row[e]), e))[: model.moe_router_topk] for row in s.detach()
    ]
    losses = dict(balances(s, unbiased, model))
    if model.moe_z_loss_coeff:
        losses["z_loss"] = logits.logsumexp(-1).square().mean()
    coeffs = model.balancing | {"z_loss": model.moe_z_loss_coeff or 0.0}
    total = sum((coeffs[name] * loss for name, loss in losses.items()), torch.zeros(()))
    counts = [len(k) for k in kept]
    if model.moe_pad_expert_input_to_capacity:
        counts = [min(most, T)] * E
    return y.view_as(x), total, {name: loss.item() for name, loss in losses.items()}, counts


def expert(layer: MoE, e: int, x: Tensor) -> Tensor:
    one, two = layer.experts.linear_fc1, layer.experts.linear_fc2
    first = F.linear(x, one.weight[e], None if one.bias is None else one.bias[e])
    return F.linear(activate(first, layer.router.config), two.weight[e], None if two.bias is None else two.bias[e])


def balances(s: Tensor, choices: list[list[int]], model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """E sum_i f_i P_i of a microbatch, and its mean over sequences; a first microbatch has run alone so far."""

    def of(tokens: list[int]) -> Tensor:
        n = torch.tensor([sum(e in choices[t] for t in tokens) for e in range(E)], dtype=torch.float64)
        return E * (n / (len(tokens) * len(choices[0])) * s[tokens].mean(0)).sum()

    for kind in model.balancing:
        if kind == "seq_aux_loss":  # row t is position t // B of sequence t % B
            yield kind, torch.stack([of(list(range(b, T, B))) for b in range(B)]).mean()
        else:
            yield kind, of(list(range(T)))


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CASES)
def test_output_losses_counts_and_gradients_are_those_of_the_formula(name):
    model = CASES[name]
    layer, (x, dy) = layer_of(model), inputs()
    want_x, x = (x.clone().requires_grad_() for _ in range(2))
    want, total, losses, counts = formula(layer, want_x)
    ((want * dy).sum() + 0.25 * total).backward()
    wanted = gradients(layer)
    layer.zero_grad()
    with Stream(1, 3, weigh=lambda tokens: 0.25 if tokens == T else math.nan).active():
        got = layer(x)
    got.backward(dy)
    close = {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(got, want, **close)
    torch.testing.assert_close(x.grad, want_x.grad, **close)
    for key, value in wanted.items():
        torch.testing.assert_close(gradients(layer)[key], value, msg=lambda text, key=key: f"{key}: {text}", **close)
    seen = layer.router.seen[3, 0]
    assert seen.tokens.tolist() == counts
    assert {key: float(loss) for key, loss in seen.losses.items()} == pytest.approx(losses, rel=1e-9)


def test_an_even_load_with_even_scores_costs_one_times_its_weight():
    layer = layer_of(replace(SWIGLU, moe_router_topk=E, moe_aux_loss_coeff=(0.01,)))
    nn.init.zeros_(layer.router.weight)
    layer(inputs()[0])
    assert float(layer.router.seen[0, 0].losses["aux_loss"]) == pytest.approx(1.0)


def test_of_equal_scores_the_expert_of_the_lower_number_is_chosen():
    layer = layer_of(SWIGLU)
    nn.init.zeros_(layer.router.weight)
    assert set(map(tuple, layer.router(inputs()[0]).experts.tolist())) == {(0, 1)}
    assert best(torch.tensor([1.0, 2.0, 2.0, 0.0, 2.0]), 3).tolist() == [1, 2, 4]


def test_an_expert_without_tokens_has_gradient_zero_not_none():
    layer = layer_of(SIGMOID)
    layer.router.expert_bias[0] = -9.0  # type: ignore[index]
    layer(inputs()[0]).sum().backward()
    tokens, grad = layer.router.seen[0, 0].tokens, layer.experts.linear_fc1.weight.grad
    assert tokens[0] == 0
    assert torch.equal(grad.abs().amax((1, 2)) > 0, tokens > 0)


@pytest.mark.parametrize("name", ["sigmoid", "dropping", "several", "padding"])
def test_what_is_computed_again_is_routed_as_before(name, monkeypatch):
    """Also where the router would now choose otherwise: rounding may differ when it runs again."""
    model = CASES[name]
    (x, dy), found = inputs(), []
    for again in (False, True):
        layer, mine = layer_of(model), x.clone().requires_grad_()
        with Stream(1, 3).active():
            y = recompute(layer, mine) if again else layer(mine)
        if again:
            reversed_best = lambda scores, k: best(-scores, k)  # noqa: E731
            monkeypatch.setattr("megapipe.models.moe.choice.best", reversed_best)
            monkeypatch.setattr("megapipe.models.moe.router.best", reversed_best)
        y.backward(dy)
        found.append({"y": y.detach(), "x": mine.grad, **gradients(layer)})
        assert list(layer.router.seen) == [(3, 0)]
    for key, value in found[0].items():
        assert torch.equal(found[1][key], value), key


def test_weight_gradients_of_all_experts_wait_for_their_pass():
    layer, (x, dy) = layer_of(CASES["shared with a gate"]), inputs()
    layer(x).backward(dy)
    wanted = gradients(layer)
    layer.zero_grad()
    for p in layer.parameters():
        p.main_grad = torch.zeros_like(p)
    stage = WeightGrads()
    with stage.capturing():
        y = layer(x)
    with stage.deferring(0):
        y.backward(dy)
    assert not any(p.main_grad.any() for p in layer.parameters())
    stage.run(0)
    for name, p in layer.named_parameters():
        assert torch.equal(p.main_grad, wanted[name]), name


@pytest.mark.parametrize("name", ["softmax after", "gelu with biases", "sigmoid", "padding", "shared with a gate"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_compute_what_one_computes(name, sequence_parallel):
    model = replace(CASES[name], sequence_parallel=sequence_parallel)
    if model.capacity_factor:  # capacity is of each rank's tokens: all of them fit
        model = replace(model, moe_expert_capacity_factor=9.0)
    x, dy = (torch.cat((part, part[:1])) for part in inputs())  # 8 positions

    def run(mesh: ProcessMesh) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        layer = layer_of(model, mesh.tp)
        mine, grad = ((t.chunk(mesh.tp.size)[mesh.tp.rank] if sequence_parallel else t) for t in (x, dy))
        mine = mine.clone().requires_grad_()
        y = layer(mine)
        y.backward(grad)
        parts = {}
        for p in layer.parameters():
            if p.mesh_layout.sum_over_tp:
                mesh.tp.all_reduce(p.grad)
            if p.mesh_layout.dim is not None:
                local = p.grad.view(p.mesh_layout.local(mesh.tp))
                parts[id(p)] = torch.cat(list(mesh.tp.all_gather(local[None].contiguous())), p.mesh_layout.dim)
        named = {name: parts.get(id(p), p.grad).flatten() for name, p in layer.named_parameters()}
        whole = [mesh.tp.all_gather(t.detach().contiguous()) if sequence_parallel else t for t in (y, mine.grad)]
        return whole[0], whole[1], named

    (want,) = run_threads(run, tp=1)
    for got in run_threads(run, tp=2):
        torch.testing.assert_close(got[0], want[0], rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(got[1], want[1], rtol=1e-10, atol=1e-11)
        for key, value in want[2].items():
            torch.testing.assert_close(got[2][key], value, rtol=1e-9, atol=1e-10)


LAYOUTS = {
    "ep": {"dp": 2, "ep": 2},
    "ep 3": {"dp": 3, "ep": 3},
    "ep and edp": {"dp": 4, "ep": 2},
    "etp over dp": {"dp": 2, "etp": 2},
    "ep within tp": {"tp": 2, "dp": 2, "ep": 2, "etp": 1},
    "ep and tp": {"tp": 2, "dp": 2, "ep": 2},
    "whole experts under tp": {"tp": 2, "etp": 1},
    "ep over cp": {"cp": 2, "ep": 2},
}


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gelu with biases", "padding", "dropping", "shared with a gate"])
def test_experts_on_several_ranks_compute_what_one_rank_computes(name, layout, dispatcher):
    """Each rank has tokens of its own; of every expert the gradients of all tokens are summed over its replicas."""
    split = LAYOUTS[layout].get("tp", 1) > 1
    model = replace(
        CASES[name],
        sequence_parallel=split,
        moe_token_dispatcher_type=dispatcher,
        moe_aux_loss_coeff=(0.0,),
        moe_z_loss_coeff=None,
    )
    world = math.prod(size for axis, size in LAYOUTS[layout].items() if axis in ("tp", "cp", "dp"))
    draw = torch.Generator().manual_seed(4)
    x, dy = (torch.randn(world, 4, B, 16, dtype=torch.float64, generator=draw) for _ in range(2))

    def run(mesh: ProcessMesh) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        layer = layer_of(model, mesh.tp)
        mine = x[mesh.world.rank].clone().requires_grad_()
        y = layer(mine)
        y.backward(dy[mesh.world.rank])
        for p in layer.parameters():
            if p.mesh_layout.sum_over_tp:
                mesh.tp.all_reduce(p.grad)
            (mesh.edp if p.mesh_layout.experts else mesh.dp_cp).all_reduce(p.grad)
        grads = {name: (p.mesh_layout.pieces(mesh.tp), p.grad) for name, p in layer.named_parameters()}
        return y.detach(), mine.grad, grads

    whole = layer_of(replace(model, sequence_parallel=False))
    wanted_y, wanted_x = [], []
    for mine, grad in zip(x, dy, strict=True):  # capacity is of a rank's tokens
        mine = mine.clone().requires_grad_()
        y = whole(mine)
        y.backward(grad)
        wanted_y.append(y.detach())
        wanted_x.append(mine.grad)
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    for rank, (y, d_x, grads) in enumerate(run_threads(run, **LAYOUTS[layout])):
        close(y, wanted_y[rank])
        close(d_x, wanted_x[rank])
        for name, p in whole.named_parameters():
            pieces, got = grads[name]
            want = p.grad.view(p.mesh_layout.full)
            for dim, (i, n) in pieces.items():
                want = want.chunk(n, dim)[i]
            close(got, want.reshape(got.shape))


def test_one_grouped_product_of_all_experts_is_the_product_of_each(monkeypatch):
    """What a GPU runs in bf16; torch has it for CPUs too, slowly."""
    wide = replace(CASES["sigmoid"], moe_ffn_hidden_size=16)
    layer, (x, dy) = layer_of(wide).bfloat16(), (t.bfloat16() for t in inputs())
    found = []
    for together in (False, True):
        monkeypatch.setattr(grouped, "_grouped", lambda rows, width, together=together: together)
        layer.zero_grad()
        mine = x.clone().requires_grad_()
        y = layer(mine)
        y.backward(dy)
        found.append({"y": y.detach(), "x": mine.grad, **gradients(layer)})
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key].float(), value.float(), rtol=2e-2, atol=2e-2)


def test_the_bias_stays_float32_in_a_model_of_16_bits():
    layer = layer_of(SIGMOID).bfloat16()
    assert layer.router.weight.dtype == torch.bfloat16
    assert layer.router.expert_bias.dtype == torch.float32


@pytest.mark.parametrize(("dtype", "kind"), [("fp32", torch.float32), ("fp64", torch.float64), (None, torch.bfloat16)])
def test_the_router_computes_in_the_type_it_is_told(dtype, kind):
    layer = layer_of(replace(SWIGLU, moe_router_dtype=dtype)).bfloat16()
    assert layer.router(inputs()[0].bfloat16()).weights.dtype == kind
    assert layer(inputs()[0].bfloat16()).dtype == torch.bfloat16


def test_jitter_and_forced_balance_belong_to_the_sample_and_end_with_training():
    x = inputs()[0]
    for model in (replace(SWIGLU, moe_input_jitter_eps=0.9), replace(SWIGLU, moe_router_force_load_balancing=True)):
        layer = layer_of(model)
        routed = [layer.router(x).weights for _ in range(2)]
        assert torch.equal(*routed)
        with Stream(0, 7).active():
            assert not torch.equal(layer.router(x).weights, routed[0])
    layer = layer_of(replace(SWIGLU, moe_input_jitter_eps=0.9)).eval()
    assert torch.equal(layer.router(x).weights, layer_of(SWIGLU).eval().router(x).weights)
