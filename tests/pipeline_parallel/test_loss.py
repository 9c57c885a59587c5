"""What a user's loss_func may return, and what is said of anything else."""

from __future__ import annotations

import pytest
import torch

from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.loss import Loss

ONE = torch.ones((), requires_grad=True)
WRONG = [
    (ONE, "got a tensor [] of float32"),
    ((ONE,), "got (a tensor [] of float32)"),
    ((ONE, ONE, ONE, {}), "dict), got"),
    ((torch.ones(2, 3), {}), "one floating-point number in a tensor, got a tensor [2, 3] of float32"),
    ((3.0, {}), "in a tensor, got a float"),
    ((torch.ones(()), {}), "this one is detached from the model"),
    ((ONE, "12", {}), "its number of tokens must be one number, got a st"),
    ((ONE, torch.ones(2), {}), "its number of tokens must be one number, got a tensor [2]"),
    ((ONE, 3), "the dict says what to report, got a int"),
    ((ONE, {"a": torch.ones(3)}), "one number or (sum, count), got a tensor [3] of float32 for 'a'"),
    ((ONE, {"a": "b"}), "got a str for 'a'"),
]


@pytest.mark.parametrize(("returned", "text"), WRONG)
def test_a_loss_func_of_another_form_is_told_in_one_sentence(returned, text):
    with pytest.raises(ConfigError) as caught:
        Loss.of(returned)
    assert text in str(caught.value)
