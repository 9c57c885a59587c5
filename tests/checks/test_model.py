"""What a user reads about settings of a model that do not go together."""

import pytest

from megapipe.checks.model import offload_problems, variant_problems
from megapipe.checks.run import validate
from megapipe.config import ModelConfig

from .sound import config, problem


@pytest.mark.parametrize(
    "fields, line",
    [
        (
            {"swiglu": True, "squared_relu": True},
            "--swiglu and --squared-relu are different activations of one MLP. Leave --swiglu or --squared-relu out.",
        ),
        (
            {"rope_scaling_factor": 32.0},
            "--rope-scaling-factor 32 has no effect without --use-rope-scaling. Add it.",
        ),
        (
            {"window_size": "128"},
            "--window-size 128: two numbers LEFT,RIGHT, and a causal model has RIGHT 0. "
            "Use --window-size 127,0 for a window of 128 tokens.",
        ),
        (
            # int() refuses to read more than 4300 digits.
            {"window_size": f"{'9' * 5000},0"},
            f"--window-size {'9' * 5000},0: two numbers LEFT,RIGHT, and a causal model has RIGHT 0. "
            "Use --window-size 127,0 for a window of 128 tokens.",
        ),
    ],
)
def test_each_problem_has_its_line(fields, line):
    assert list(variant_problems(ModelConfig(**fields))) == [line]


@pytest.mark.parametrize(
    "modules, fields, compiled, told",
    [
        (
            "expert_fc1 moe_act",
            {},
            False,
            ": expert_fc1 and moe_act are of experts, and there are none. Leave them out.",
        ),
        (
            "core_attn moe_act",
            {"num_experts": 4, "recompute_granularity": "selective", "recompute_modules": ("moe",)},
            False,
            ": --recompute-modules moe computes experts again, which keep nothing. "
            "Leave moe out there, or moe_act here.",
        ),
        (
            "attn_proj",
            {},
            False,
            ": the input of attn_proj is kept by core_attn too, and stays for it. Add core_attn.",
        ),
        (
            "core_attn",
            {},
            True,
            " names parts of a layer, and --compile makes one of several. Leave one of the two flags out.",
        ),
        ("attn_norm qkv_linear core_attn attn_proj mlp_norm", {}, False, None),
        ("attn_proj", {"recompute_granularity": "selective", "recompute_modules": ("mla_up_proj",)}, False, None),
    ],
)
def test_modules_to_offload_are_there_and_keep_something(modules, fields, compiled, told):
    lines = [] if told is None else [f"--offload-modules {modules}{told}"]
    assert list(offload_problems(ModelConfig(**fields), modules.split(), compiled=compiled)) == lines


def test_what_goes_together_has_no_problem():
    rope = ModelConfig(position_embedding_type="rope", use_rope_scaling=True, rope_scaling_factor=32.0, swiglu=True)
    assert not list(variant_problems(rope))
    assert not list(variant_problems(ModelConfig(window_size="(127, 0)", quick_geglu=True)))


def test_yarn_of_latents_needs_a_base_whose_logarithm_it_can_divide_by():
    """Base 1 passed the check and was a ZeroDivisionError when the first stage was built."""
    latent = "--multi-latent-attention --rotary-base 1"
    assert problem(latent) == (
        "--rotary-base 1: --rope-type yarn divides by its logarithm, so that it must be above 1. "
        "Use --rotary-base 10000, or --rope-type rope."
    )
    validate(config(f"{latent} --rope-type rope"), has_cuda=False)
