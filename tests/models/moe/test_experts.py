"""A layer of experts against the formulas, token by token in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from expert_layers import CASES, SIGMOID, SWIGLU, B, E, T, inputs, layer_of
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.models.activations import activate
from megapipe.models.moe import experts as grouped
from megapipe.models.moe.choice import best
from megapipe.models.moe.dispatch import AllGatherDispatcher
from megapipe.models.moe.layer import MoE
from megapipe.models.recompute import recompute
from megapipe.tensor_parallel.rng import MicrobatchContext
from megapipe.tensor_parallel.weight_grad import WeightGrads


def scores(l: Tensor, model: ModelConfig) -> Tensor:
    kind = model.moe_router_score_function
    return l.softmax(-1) if kind == "softmax" else l.sigmoid() if kind == "sigmoid" else F.softplus(l).sqrt()


def chosen(l: Tensor, bias: Tensor | None, model: ModelConfig) -> list[int]:
    """Of one token, whose logits are [E]."""
    by = [float(x) for x in (scores(l, model) if bias is None else scores(l, model) + bias)]
    among = range(E)
    groups, keep = model.moe_router_num_groups, model.moe_router_group_topk
    if groups and keep:
        after = model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax and bias is None
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
            if model.moe_apply_probs_on_input:
                y[t] += expert(layer, e, weights[t, e] * rows[t])
            else:
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
    with MicrobatchContext(1, 3, weigh=lambda tokens: 0.25 if tokens == T else math.nan).active():
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
        with MicrobatchContext(1, 3).active():
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


@pytest.mark.parametrize("waits, in_backward, in_its_pass", [(False, 2, 0), (True, 1, 2)])
def test_a_weight_gradient_that_waits_keeps_nothing_gathered(monkeypatch, waits, in_backward, in_its_pass):
    """The gradient of the output for fc2 and the tokens for fc1, both of all ranks; else each is gathered once."""
    gathered, usual = [], AllGatherDispatcher.dispatch
    monkeypatch.setattr(AllGatherDispatcher, "dispatch", lambda moves, x: gathered.append(x) or usual(moves, x))
    layer, (x, dy) = layer_of(CASES["softmax after"]), inputs()
    for p in layer.parameters():
        p.main_grad = torch.zeros_like(p)
    stage = WeightGrads()
    with stage.capturing():
        y = layer(x)
    assert len(gathered) == 1
    with stage.deferring(0) if waits else nullcontext():
        y.backward(dy)
    assert len(gathered) == 1 + in_backward
    if waits:
        stage.run(0)
    assert len(gathered) == 1 + in_backward + in_its_pass


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
        with MicrobatchContext(0, 7).active():
            assert not torch.equal(layer.router(x).weights, routed[0])
    layer = layer_of(replace(SWIGLU, moe_input_jitter_eps=0.9)).eval()
    assert torch.equal(layer.router(x).weights, layer_of(SWIGLU).eval().router(x).weights)
