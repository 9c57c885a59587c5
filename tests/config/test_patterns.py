"""Layers without rotation or without a window, said by a number or a list as in Megatron-LM."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import LLAMA

from megapipe.checkpoint.resume import resume_problems
from megapipe.checks.run import flag_problems
from megapipe.config import Config
from megapipe.config.layers import layer_config
from megapipe.convert.huggingface.layers import canonical

BOTH = replace(LLAMA, num_layers=4, window_size="3,0", no_rope_freq="4", window_attn_skip_freq="2")


def test_every_nth_layer_has_no_rotation_and_every_mth_no_window():
    layers = [layer_config(BOTH, n) for n in range(4)]
    assert [layer.rotates for layer in layers] == [True, True, True, False]
    assert [layer.window for layer in layers] == [3, None, 3, None]


def test_a_list_names_layers_without_rotation_by_1_and_without_a_window_by_0():
    """Megatron-LM's lists mean the opposite of each other."""
    model = replace(BOTH, no_rope_freq="([0]+[1])*2", window_attn_skip_freq="[1,0,0,1]")
    layers = [layer_config(model, n) for n in range(4)]
    assert [layer.rotates for layer in layers] == [True, False, True, False]
    assert [layer.window for layer in layers] == [3, None, None, 3]


def test_a_pattern_is_the_same_model_as_the_overrides_that_say_it():
    plain = replace(LLAMA, num_layers=4, window_size="3,0")
    text = '{"1": {"window_size": null}, "3": {"window_size": null, "position_embedding_type": "none"}}'
    assert canonical(BOTH) == canonical(replace(plain, per_layer_overrides=text))


def test_a_number_and_a_list_that_mean_the_same_go_on_from_each_other():
    other = replace(BOTH, no_rope_freq="[0,0,0,1]", window_attn_skip_freq="([1]+[0])*2")
    assert resume_problems(vars(BOTH), None, Config(model=other), "it") == []
    changed = replace(BOTH, no_rope_freq="2")
    assert resume_problems(vars(BOTH), None, Config(model=changed), "it") != []


@pytest.mark.parametrize(
    ("written", "line"),
    [
        ({"no_rope_freq": "[0,1]"}, "--no-rope-freq [0,1] says 2 layers, and --num-layers 4."),
        ({"window_attn_skip_freq": "x"}, "--window-attn-skip-freq x: an integer of at least 1"),
    ],
)
def test_what_is_no_pattern_of_the_layers_is_refused(written, line):
    assert any(problem.startswith(line) for problem in flag_problems(Config(model=replace(BOTH, **written))))
