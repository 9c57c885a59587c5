"""What a user reads about settings of a model that do not go together."""

import pytest

from megapipe.checks.model import variant_problems
from megapipe.config import ModelConfig


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
    ],
)
def test_each_problem_has_its_line(fields, line):
    assert list(variant_problems(ModelConfig(**fields))) == [line]


def test_what_goes_together_has_no_problem():
    rope = ModelConfig(position_embedding_type="rope", use_rope_scaling=True, rope_scaling_factor=32.0, swiglu=True)
    assert not list(variant_problems(rope))
    assert not list(variant_problems(ModelConfig(window_size="(127, 0)", quick_geglu=True)))
