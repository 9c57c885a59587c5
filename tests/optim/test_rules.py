"""Optimizers by name: each is the whole model's, whatever it is split over, and torch's or its paper's arithmetic."""

from dataclasses import replace

import pytest
import torch
from tiny import STYLES
from torch import nn
from whole_step import take_step

from megapipe.config import OptimizerConfig
from megapipe.config.layers import layer_config
from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout, layout_of, set_layout
from megapipe.errors import ConfigError
from megapipe.models.attention.layer import SelfAttention
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.rule import Group, Part, usual_groups
from megapipe.optim.rules import NEWTON_SCHULZ, find_rule, newton_schulz
from megapipe.pipeline_parallel.threads import run_threads

TRAIN = OptimizerConfig(lr=0.1, weight_decay=0.1, clip_grad=0.0)
LAYOUTS = {
    "embedding.weight": Layout((8, 6), 0),
    "layers.0.up.weight": Layout((2, 4, 6), 1),  # gate and value
    "layers.0.down.weight": Layout((6, 4), 1),
    "layers.0.qkv.weight": Layout((16, 6), 0, fused=(4, 2, 2)),
    "layers.0.norm.weight": Layout((6,)),
}


def whole(name: str, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * step + list(LAYOUTS).index(name))
    return torch.randn(LAYOUTS[name].full, generator=draw, dtype=torch.float64)


def piece(x: torch.Tensor, name: str, tp) -> torch.Tensor:
    layout = LAYOUTS[name]
    x = x if layout.dim is None else x.chunk(tp.size, layout.dim)[tp.rank]
    return x.reshape(-1, x.shape[-1]) if x.ndim == 3 else x


class Model(nn.Module):
    def __init__(self, tp, dtype=torch.float64) -> None:
        super().__init__()
        pieces = {name: piece(whole(name, 0), name, tp).to(dtype, copy=True) for name in LAYOUTS}
        self.named = {name: set_layout(nn.Parameter(x), LAYOUTS[name]) for name, x in pieces.items()}

    def named_parameters(self, *_, **__):
        return iter(self.named.items())


def train(mesh, settings, steps=3, groups=usual_groups, distributed=False, dtype=torch.float64):
    model = Model(mesh.tp, dtype)
    optimizer = Optimizer([model], settings, mesh, groups=groups, distributed=distributed)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        for name, param in model.named.items():
            param.main_grad.add_(piece(whole(name, step), name, mesh.tp))
        take_step(optimizer, 0.1 / step, grad_scale=1 / mesh.dp.size)
    return {name: (mesh.tp, param.detach()) for name, param in model.named.items()}


def check(ranks, want, rtol=1e-11, atol=1e-12):
    for rank in ranks:
        for name, (tp, param) in rank.items():
            torch.testing.assert_close(param.double(), piece(want[name].detach(), name, tp), rtol=rtol, atol=atol)


def torchs(make, steps=3):
    """The whole model under a torch optimizer whose groups follow the names."""
    params = {name: nn.Parameter(whole(name, 0)) for name in LAYOUTS}
    optimizer = make(params)
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = group.get("times", 1.0) * 0.1 / step
        for name, param in params.items():
            param.grad = whole(name, step)
        optimizer.step()
    return params


def split_by_decay(params):
    return [
        {"params": [p for p in params.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params.values() if p.ndim == 1], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("sizes, distributed", [({}, False), ({"tp": 2}, False), ({"dp": 2}, True)])
def test_sgd_is_torchs(sizes, distributed):
    want = torchs(lambda params: torch.optim.SGD(split_by_decay(params), lr=0.1, momentum=0.9))
    check(
        run_threads(lambda mesh: train(mesh, replace(TRAIN, optimizer="sgd"), distributed=distributed), **sizes), want
    )


def test_a_group_has_a_rate_and_a_decay_of_its_own():
    def groups(name, shape):
        return Group(0.5, 2.0) if "embedding" in name else usual_groups(name, shape)

    def make(params):
        rest = {name: p for name, p in params.items() if "embedding" not in name}
        mine = {"params": [params["embedding.weight"]], "weight_decay": 0.2, "times": 0.5}
        return torch.optim.AdamW([mine, *split_by_decay(rest)], betas=(0.9, 0.999))

    want = torchs(make)
    for distributed in (False, True):
        check(run_threads(lambda mesh: train(mesh, TRAIN, groups=groups, distributed=distributed), dp=2), want)  # noqa: B023


QUERY, KEY, VALUE = ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15])
"""Rows of "layers.0.qkv.weight": two groups, each of two query heads, a key and a value, heads of two channels."""
JORDAN = [(3.4445, -4.7750, 2.0315)] * 5
"""Of kellerjordan.github.io/posts/muon; what Megatron-LM calls simple."""
QUINTIC = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
"""Of leloykun.github.io/ponder/muon-opt-coeffs; Megatron-LM's default."""


def muon_by_hand(mode="spectral", nesterov=False, coefficients=QUINTIC, qkv=(QUERY, KEY, VALUE)):
    """Of Jordan's page with Megatron-LM's defaults, matrix by matrix; the rest AdamW."""
    want = torchs(lambda params: torch.optim.AdamW(split_by_decay(params), betas=(0.9, 0.999)))
    matrices = {"layers.0.up.weight": [range(8)], "layers.0.down.weight": [range(6)], "layers.0.qkv.weight": qkv}
    for name, of_rows in matrices.items():
        done = whole(name, 0).reshape(-1, whole(name, 0).shape[-1])
        for rows in map(list, of_rows):
            weight, momentum = done[rows], torch.zeros_like(done[rows])
            for step in range(1, 4):
                grad = whole(name, step).reshape(done.shape)[rows]
                momentum = 0.9 * momentum + grad
                u, s, vt = torch.linalg.svd(grad + 0.9 * momentum if nesterov else momentum, full_matrices=False)
                s = s / s.norm()
                for a, b, c in coefficients:
                    s = a * s + b * s**3 + c * s**5
                out, into = weight.shape
                scale = max(1, out / into) ** 0.5 if mode == "shape_scaling" else max(out, into) ** 0.5
                weight = weight * (1 - 0.1 / step * 0.1) - 0.1 / step * scale * u @ s.diag() @ vt
            done[rows] = weight
        want[name] = done.view(LAYOUTS[name].full)
    return want


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}])
@pytest.mark.parametrize(
    "flags, by_hand",
    [
        ({}, {}),
        ({"muon_scale_mode": "shape_scaling", "muon_nesterov": True}, {"mode": "shape_scaling", "nesterov": True}),
        ({"muon_coefficient_type": "simple"}, {"coefficients": JORDAN}),
        ({"muon_num_ns_steps": 7}, {"coefficients": QUINTIC + QUINTIC[:2]}),
        ({"muon_no_split_qkv": True}, {"qkv": [range(16)]}),
    ],
    ids=["defaults", "jordan's step", "simple", "seven steps", "no split"],
)
def test_muon_turns_singular_values_of_whole_matrices_into_ones_also_where_they_are_split(flags, by_hand, sizes):
    ranks = run_threads(lambda mesh: train(mesh, replace(TRAIN, optimizer="muon", **flags)), **sizes)
    check(ranks, muon_by_hand(**by_hand))


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}])
def test_muon_updates_every_row_of_the_embedding_in_float32_too(sizes):
    """AdamW's loop in C was given the rows of a matrix as its number of elements: 8 of 48 were updated."""
    ranks = run_threads(lambda mesh: train(mesh, replace(TRAIN, optimizer="muon"), dtype=torch.float32), **sizes)
    check(ranks, muon_by_hand(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("products", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("coefficients", ["quintic", "simple"])
def test_newton_schulz_makes_all_singular_values_about_one(coefficients, products):
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = torch.linalg.svdvals(newton_schulz(x, 5, NEWTON_SCHULZ[coefficients], products))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_muon_leaves_the_biases_of_experts_to_adamw():
    """A stack of biases [experts, outputs] has two dimensions and is no matrix: it ended in an IndexError."""
    weight, bias = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 4, 5), (3, 4)))
    plain = bias.clone().requires_grad_()
    grads = torch.randn(3, 4, 5, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    names = ("layers.0.experts.weight",), ("layers.0.experts.bias",)

    def part(name, value, grad):
        state = {kind: torch.zeros_like(value) for kind in ("exp_avg", "exp_avg_sq")}
        return Part(name, value, grad.clone(), state, 0.1, 0.1, Layout(tuple(value.shape), experts=True))

    train = replace(TRAIN, optimizer="muon")
    find_rule(train).update([part(*given) for given in zip(names, (weight, bias), grads, strict=True)], 0)
    plain.grad = grads[1]
    torch.optim.AdamW([plain], 0.1, (train.adam_beta1, train.adam_beta2), train.adam_eps, 0.1).step()
    torch.testing.assert_close(bias, plain.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layer, groups, channels", [(0, 2, 8), (1, 4, 6)])
def test_a_models_query_key_and_value_are_told_apart_by_their_rows(layer, groups, channels, monkeypatch):
    """Rows of 1, 2 and 3 give queries, keys and values of as much, also at a layer whose heads differ."""
    other = """{"1": {"kv_channels": 6, "num_query_groups": 4}}"""
    style = replace(STYLES["llama"], position_embedding_type="none", per_layer_overrides=other)
    attention = SelfAttention(layer_config(replace(style, num_query_groups=2), layer), Axis(), layer)
    weight, seen = attention.linear_qkv.weight, []
    fused = layout_of(weight).fused
    marks = torch.arange(1.0, 4).repeat_interleave(torch.tensor(fused)).repeat(groups)
    monkeypatch.setattr(attention, "attend", lambda *qkv: seen.extend(qkv) or qkv[0].flatten(2))
    with torch.no_grad():
        weight.copy_(marks[:, None] / weight.shape[1])
        attention(torch.ones(4, 1, weight.shape[1]))
    for mark, of_kind, rows in zip((1, 2, 3), seen, fused, strict=True):
        assert of_kind.shape == (4, 1, rows // channels * groups, channels)
        torch.testing.assert_close(of_kind, torch.full_like(of_kind, mark))


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("muno", "--optimizer muno: did you mean muon?"),
        ("x:y:z", "--optimizer x:y:z: cannot import x:y: No module named 'x:y'. The file can be named too: "),
        ("collections:OrderedDict", "--optimizer collections:OrderedDict gives a"),
    ],
)
def test_what_is_no_optimizer_is_one_line(name, sentence, monkeypatch):
    monkeypatch.setattr("collections.OrderedDict", lambda train: 3)
    with pytest.raises(ConfigError) as caught:
        find_rule(replace(TRAIN, optimizer=name))
    assert str(caught.value).startswith(sentence)


def test_zero_1_does_not_split_what_must_be_whole():
    with pytest.raises(ConfigError, match="--optimizer muon needs whole parameters, and --use-distributed-optimizer"):
        run_threads(lambda mesh: train(mesh, replace(TRAIN, optimizer="muon"), distributed=True), dp=2)
    run_threads(lambda mesh: train(mesh, replace(TRAIN, optimizer="muon"), distributed=True))  # one rank has it whole
