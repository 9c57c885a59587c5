"""Layers that differ from the rest: which are built, and what a mistake in the text says."""

import json
from dataclasses import replace

import pytest
import torch
from tiny import GPT2, LAYERS

from megapipe.config.layers import inline, layer_config, parse_overrides
from megapipe.distributed.axis import Axis
from megapipe.errors import ConfigError
from megapipe.models.provider import gpt_provider
from megapipe.partition.spans import LayerSpan

TEXT = '{"0": {"ffn_hidden_size": 8}, "1,2": {"no_mlp": true}, "2-3": {"no_attention": true}}'


def shapes(text: str) -> dict[str, tuple[int, ...]]:
    model = gpt_provider(replace(GPT2, per_layer_overrides=text), LayerSpan(0, LAYERS, True, True), Axis())
    return {name.removeprefix("decoder.layers."): tuple(p.shape) for name, p in model.named_parameters()}


def test_a_layer_is_built_as_its_override_says():
    built = shapes(TEXT)
    mlp = {name: shape for name, shape in built.items() if name.endswith("linear_fc1.weight")}
    assert mlp == {"0.mlp.linear_fc1.weight": (8, 32), "3.mlp.linear_fc1.weight": (128, 32)}
    assert [n for n in range(LAYERS) if f"{n}.self_attention.linear_qkv.weight" in built] == [0, 1]


def test_a_layer_without_halves_is_the_identity_and_has_no_parameters():
    model = replace(GPT2, per_layer_overrides='{"0-3": {"no_mlp": true, "no_attention": true}}')
    stage = gpt_provider(model, LayerSpan(1, 2, False, False), Axis())
    assert not list(stage.parameters())
    x = torch.randn(3, 2, 32)
    stage.set_input_tensor(x)
    assert torch.equal(stage(), x)


def test_a_file_becomes_its_text(tmp_path):
    (tmp_path / "layers.json").write_text(TEXT)
    by_file = replace(GPT2, per_layer_overrides=str(tmp_path / "layers.json"))
    assert inline(by_file) == replace(GPT2, per_layer_overrides=TEXT)
    assert layer_config(by_file, 0).ffn == 8
    with pytest.raises(ConfigError, match="No such file"):
        inline(replace(GPT2, per_layer_overrides="nowhere.json"))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"4": {}}, '"4": layers are 0 to 3, such as "0-3,7"'),
        ({"2-1": {}}, '"2-1": layers are 0 to 3, such as "0-3,7"'),
        ({"all": {}}, '"all": layers are 0 to 3, such as "0-3,7"'),
        ({"1": {"hidden_size": 8}}, '"1": hidden_size is not a field that one layer can change.'),
        ({"1": {"ffn_hidden_size": True}}, '"1": ffn_hidden_size is an integer, got true'),
        ({"1": {"norm_epsilon": float("nan")}}, '"1": norm_epsilon is a finite number, got NaN'),
        ({"1": {"window_size": 7}}, '"1": window_size is a text, got 7'),
        ({"1": {"swiglu": 1}}, '"1": swiglu is true or false, got 1'),
        ({"1": {"normalization": "x"}}, '"1": normalization is LayerNorm or RMSNorm, got "x"'),
        ([], "is an object of objects"),
    ],
)
def test_a_mistake_is_named_with_its_place(overrides, sentence):
    text = json.dumps(overrides) if overrides else '{"1": 2}'
    with pytest.raises(ConfigError) as caught:
        layer_config(replace(GPT2, per_layer_overrides=text), 0)
    assert str(caught.value).startswith("--per-layer-overrides ")
    assert sentence in str(caught.value)


def test_a_layer_of_thousands_of_digits_is_named_in_a_line_that_can_be_read():
    with pytest.raises(ConfigError) as caught:
        parse_overrides(json.dumps({"9" * 5000: {"ffn_hidden_size": 32}}), 4)
    (problem,) = caught.value.problems
    assert 'layers are 0 to 3, such as "0-3,7"' in problem
    assert len(problem) < 200


def test_text_that_is_nested_too_deep_is_named():
    with pytest.raises(ConfigError, match="--per-layer-overrides is not JSON: maximum recursion depth"):
        layer_config(replace(GPT2, per_layer_overrides='{"1": ' + "[" * 100_000), 0)
