"""Weights that differ by Adam of rounding are told from weights that differ."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tools.proofs.equivalence import Outcome, Part
from tools.proofs.equivalence_case import LR, Case
from tools.proofs.noise import Run, is_noise

CASE = Case("1f1b", 2, 2, (1, 1))
NAME = "query"
SIZES = torch.tensor([0.3, 1e-17, 3e-9, 0.0], dtype=torch.float64)
"""Of gradients; that of the second weight is rounding."""


def trained(extra: Tensor, wrong: float = 0.0, later: float = 0.0) -> Run:
    """torch's Adam, three steps from the same weights.

    Args:
        extra: in each gradient. wrong: in the weights.
        later: in each gradient but the first.
    """
    weight = torch.nn.Parameter(torch.linspace(-0.02, 0.02, 4, dtype=torch.float64))
    adam = torch.optim.Adam([weight], lr=LR)
    steps = []
    for step, sign in enumerate((1, -1, 1)):
        weight.grad = SIZES * sign + extra + later * (step > 0)
        steps.append({NAME: Part(weight.grad.clone(), {})})
        adam.step()
    made = {NAME: Part(weight.detach() + wrong, {})}
    return Run(Outcome([], [], steps[0], made, [], []), steps)


NOTHING = torch.zeros(4, dtype=torch.float64)
ROUNDING = torch.tensor([1e-17, 3e-17, -3e-17, -2e-17], dtype=torch.float64)


def test_what_adam_makes_of_rounding_is_noise() -> None:
    """Though it is more than the 1e-11 that weights may differ by."""
    mine, whole = trained(ROUNDING), trained(NOTHING)
    apart = mine.outcome.weights[NAME].tensor - whole.outcome.weights[NAME].tensor
    assert 2e-11 < apart.abs().max() < 1e-9
    assert is_noise(CASE, NAME, 0, [mine], whole)


@pytest.mark.parametrize("wrong", [2e-12, -1e-10])
def test_a_weight_that_its_gradients_do_not_explain_differs(wrong: float) -> None:
    assert not is_noise(CASE, NAME, 0, [trained(ROUNDING, wrong)], trained(NOTHING))


def test_a_gradient_that_is_off_by_more_than_rounding_is_no_noise() -> None:
    """The weights follow from the gradients here, as exactly as before."""
    assert not is_noise(CASE, NAME, 0, [trained(ROUNDING * 100)], trained(NOTHING))


@pytest.mark.parametrize(("later", "noise"), [(8e-15, True), (2e-14, False)])
def test_gradients_after_the_first_follow_weights_that_differ(later: float, noise: bool) -> None:
    mine, whole = trained(ROUNDING, later=later), trained(NOTHING)
    assert is_noise(CASE, NAME, 0, [mine], whole) == noise


def test_a_weight_whose_gradient_no_rank_has_is_no_noise() -> None:
    mine = trained(NOTHING)
    assert is_noise(CASE, NAME, 0, [mine], trained(NOTHING))
    assert not is_noise(CASE, NAME, 0, [mine._replace(steps=[{}, {}, {}])], trained(NOTHING))
