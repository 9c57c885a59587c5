"""What a user's loss_func may return, and what is said of anything else."""

from __future__ import annotations

import pytest
import torch

from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.loss import Loss, output_of

ONE = torch.ones((), requires_grad=True)
WRONG = [
    (ONE, "got a tensor [] of float32"),
    ((ONE,), "got (a tensor [] of float32)"),
    ((ONE, ONE, ONE, {}), "dict), got"),
    ((torch.ones(2, 3), {}), "one floating-point number in a tensor, got a tensor [2, 3] of float32"),
    ((3.0, {}), "in a tensor, got a float"),
    ((torch.ones(()), {}), "it depends on no parameter that trains"),
    ((ONE, "12", {}), "its number of tokens must be one number, got a str"),
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


def test_a_loss_of_one_element_is_one_number():
    """Of several depths such losses were stacked beside numbers, which ended in an error of torch's."""
    loss = Loss.of((torch.ones(1, requires_grad=True), {}))
    assert loss.value.shape == ()


def test_a_forward_step_that_returns_no_pair_is_told_in_one_sentence():
    with pytest.raises(ConfigError, match=r"must return \(output, loss_func\), got a tensor \[2\] of float32"):
        output_of(torch.ones(2))
