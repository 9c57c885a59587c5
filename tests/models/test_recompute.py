"""Recomputation changes memory and time, and nothing else."""

from dataclasses import replace

import pytest
import torch
from tiny import STYLES, tokens

from megapipe.config import Config, ModelConfig
from megapipe.errors import ConfigError
from megapipe.mesh import Axis
from megapipe.models.gpt import GPTModel
from megapipe.models.recompute import recompute, units
from megapipe.pipeline_parallel.partition import LayerSpan
from megapipe.tensor_parallel.linear import ColumnParallelLinear
from megapipe.tensor_parallel.rng import Stream, initialize
from megapipe.tensor_parallel.weight_grad import WeightGrads
from megapipe.validate import validate

KINDS = {
    "selective": {"recompute_granularity": "selective"},
    "activations": {"recompute_activations": True},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    "norms": {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
    "all modules": {"recompute_activations": True, "recompute_modules": ("core_attn", "mlp", "layernorm")},
    "uniform 1": {"recompute_granularity": "full"},
    "uniform 3": {"recompute_granularity": "full", "recompute_num_layers": 3},
    "block 2": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
}


def run(model: ModelConfig):
    """Loss, gradients, and the bytes of activations that autograd kept between forward and backward."""
    gpt = GPTModel(model, LayerSpan(0, model.layers, True, True), Axis())
    initialize(gpt, 1, Axis())
    kept = {}

    def pack(x):
        if not isinstance(x, torch.nn.Parameter):
            kept[x.data_ptr()] = x.nbytes
        return x

    batch = tokens(1)[0]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), Stream(3, 4).active():
        loss = gpt(batch[:, :-1], labels=batch[:, 1:]).sum()
    loss.backward()
    return loss, {name: p.grad for name, p in gpt.named_parameters()}, sum(kept.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", STYLES)
def test_the_same_bits_with_less_kept(style, kind):
    loss, gradients, kept = run(STYLES[style])
    model = replace(STYLES[style], **KINDS[kind])
    again, same, kept_again = run(model)
    assert torch.equal(loss, again)
    assert all(torch.equal(gradients[name], same[name]) for name in gradients)
    # attention keeps no more than q, k and v: selective saves only where dropout needs the scores
    assert kept_again <= kept * (1 if model.recompute_attention and style == "llama" else 0.85), (kept_again, kept)


def test_under_a_split_a_layer_runs_again_in_b_only_and_w_needs_no_more():
    layer = ColumnParallelLinear(3, 3, tp=Axis(), bias=False)
    torch.nn.init.normal_(layer.weight)
    layer.weight.main_grad = torch.zeros(3, 3)
    calls = []

    def twice(x):
        calls.append(x)
        return layer(layer(x))

    x, grad = torch.randn(5, 3, requires_grad=True), torch.randn(5, 3)
    stage = WeightGrads()
    with stage.capturing():
        y = recompute(twice, x)
    with stage.deferring(0):
        y.backward(grad)
    assert len(calls) == 2
    assert not layer.weight.main_grad.any()
    with torch.no_grad():
        stage.run(0)
    assert len(calls) == 2
    w = layer.weight.detach()
    torch.testing.assert_close(x.grad, grad @ w @ w)
    torch.testing.assert_close(layer.weight.main_grad, grad.t() @ (x @ w.t()).detach() + (grad @ w).t() @ x.detach())


def test_what_is_computed_again():
    def of(**settings):
        return units(ModelConfig(**settings), 5)

    assert of() == of(recompute_activations=True) == [(1, False)] * 5
    assert of(recompute_granularity="full") == [(1, True)] * 5
    assert of(recompute_granularity="full", recompute_num_layers=2) == [(2, True), (2, True), (1, True)]
    block = of(recompute_granularity="full", recompute_method="block", recompute_num_layers=2)
    assert block == [(1, True), (1, True), (1, False), (1, False), (1, False)]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"recompute_activations": True, "recompute_granularity": "full"},
            "--recompute-activations means --recompute-granularity selective, but full is given. Leave one out.",
        ),
        (
            {"recompute_num_layers": 2},
            "--recompute-num-layers 2 has no effect without --recompute-granularity full. Add it.",
        ),
    ],
)
def test_contradictions_are_refused(settings, sentence):
    with pytest.raises(ConfigError) as caught:
        validate(Config(model=ModelConfig(**settings)), has_cuda=False)
    assert sentence in caught.value.problems
