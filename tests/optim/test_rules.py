"""Optimizers by name: each is the whole model's, whatever it is split over, and torch's or its paper's arithmetic."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from megapipe.config import TrainConfig
from megapipe.distributed.layout import Layout, set_layout
from megapipe.errors import ConfigError
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.rule import Group, usual_groups
from megapipe.optim.rules import find_rule, newton_schulz
from megapipe.pipeline_parallel.threads import run_threads

TRAIN = TrainConfig(lr=0.1, weight_decay=0.1, clip_grad=0.0)
LAYOUTS = {
    "embedding.weight": Layout((8, 6), 0),
    "layers.0.up.weight": Layout((2, 4, 6), 1),  # gate and value: a stack of two matrices
    "layers.0.down.weight": Layout((6, 4), 1),
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
    def __init__(self, tp) -> None:
        super().__init__()
        self.named = {n: set_layout(nn.Parameter(piece(whole(n, 0), n, tp).clone()), at) for n, at in LAYOUTS.items()}

    def named_parameters(self, *_, **__):
        return iter(self.named.items())


def train(mesh, settings, steps=3, groups=usual_groups, distributed=False):
    model = Model(mesh.tp)
    optimizer = Optimizer([model], settings, mesh, groups=groups, distributed=distributed)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        for name, param in model.named.items():
            param.main_grad.add_(piece(whole(name, step), name, mesh.tp))
        optimizer.step(0.1 / step, grad_scale=1 / mesh.dp.size)
    return {name: (mesh.tp, param.detach()) for name, param in model.named.items()}


def check(ranks, want):
    for rank in ranks:
        for name, (tp, param) in rank.items():
            torch.testing.assert_close(param, piece(want[name].detach(), name, tp), rtol=1e-11, atol=1e-12)


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


def muon_by_hand(mode, nesterov):
    """Of Jordan's page, matrix by matrix; the rest AdamW."""
    want = torchs(lambda params: torch.optim.AdamW(split_by_decay(params), betas=(0.9, 0.999)))
    for name in ("layers.0.up.weight", "layers.0.down.weight"):
        stack = []
        for at in range(2) if "up" in name else [slice(None)]:
            weight = whole(name, 0)[at]
            momentum = torch.zeros_like(weight)
            for step in range(1, 4):
                grad = whole(name, step)[at]
                momentum = 0.95 * momentum + grad
                x = grad + 0.95 * momentum if nesterov else momentum
                turned = x.shape[0] > x.shape[1]
                x = x.T if turned else x
                x = x / x.norm()
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                x = x.T if turned else x
                rows, columns = x.shape
                scale = max(1, rows / columns) ** 0.5 if mode == "shape_scaling" else max(rows, columns) ** 0.5
                weight = weight * (1 - 0.1 / step * 0.1) - 0.1 / step * scale * x
            stack.append(weight)
        want[name] = torch.stack(stack) if "up" in name else stack[0]
    return want


@pytest.mark.parametrize("mode, nesterov, sizes", [("spectral", False, {"tp": 2}), ("shape_scaling", True, {})])
def test_muon_is_jordans_on_whole_matrices_also_where_they_are_split(mode, nesterov, sizes):
    settings = replace(TRAIN, optimizer="muon", muon_scale_mode=mode, muon_nesterov=nesterov)
    ranks = run_threads(lambda mesh: train(mesh, settings), **sizes)
    for rank in ranks:
        for name, (tp, param) in rank.items():
            want = piece(muon_by_hand(mode, nesterov)[name].detach(), name, tp)
            torch.testing.assert_close(param, want, rtol=1e-5, atol=1e-6)  # 1e-7 is added to the norm


def test_newton_schulz_makes_all_singular_values_about_one():
    x = torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = torch.linalg.svdvals(newton_schulz(x, 5))
    assert values.min() > 0.6
    assert values.max() < 1.25


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
