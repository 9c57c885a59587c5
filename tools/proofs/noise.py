"""Tell weights that differ by Adam of a gradient's rounding from weights that differ.

A gradient may be zero, and each kernel leaves another rounding of it: with a window of 0 a token
sees itself alone, and those of queries and keys are below 1e-16. Adam divides a gradient by its own
size plus 1e-8, and its step is a million times the rounding. The weight is right if two things
hold: the gradients agree to the last digits in every step, and the weights differ by what Adam
makes of these gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megapipe.training.steps.step import StepResult
from tools.proofs.equivalence import Outcome, Part, Training, part_of_whole
from tools.proofs.equivalence_case import LR, Case

GRADIENT = 1e-15
"""Most by which first gradients differ: rounding of a whole gradient whose norm is at most 1."""
LATER = 1e-14
"""The same after the first step. Weights differ by up to 1e-11 by then, and gradients with them."""
FOLLOWS = 1e-12
"""Most by which the difference of two weights differs from Adam's, of 1e-11 that are allowed."""


class Run(NamedTuple):
    """What a rank has at the end, and its gradients in each step."""

    outcome: Outcome
    steps: list[dict[str, Part]]


class Recorder:
    """The gradients of every step, by the number of the rank's device."""

    def __init__(self) -> None:
        self.steps: dict[int, list[dict[str, Part]]] = {}

    def watch(self, training: Training) -> None:
        """Keep the gradients of a training from its first step on."""
        own = self.steps.setdefault(training.mesh.device.index or 0, [])
        step = training.step

        def kept(number: int) -> StepResult:
            result = step(number)
            own.append(training.gradients())
            return result

        training.step = kept  # type: ignore[method-assign]

    def runs(self, outcomes: Sequence[Outcome]) -> list[Run]:
        """Return what ranks have with their gradients, given the outcomes in rank order."""
        return [Run(outcome, self.steps[rank]) for rank, outcome in enumerate(outcomes)]


def _updates(case: Case, gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum of Adam's updates by these gradients, one for each step."""
    config = case.config.optimizer
    beta1, beta2 = config.adam_beta1, config.adam_beta2
    total, mean, square = (torch.zeros_like(gradients[0]) for _ in range(3))
    for step, gradient in enumerate(gradients, start=1):
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        root = (square / (1 - beta2**step)).sqrt()
        total += LR * (mean / (1 - beta1**step)) / (root + config.adam_eps)
    return total


def is_noise(case: Case, name: str, rank: int, ranks: Sequence[Run], whole: Run) -> bool:
    """Return whether a weight differs from one process's by Adam of rounding alone.

    Args:
        name: of the weight. rank: of `ranks`, who has it.
        ranks: all, since the gradient may lie on another one. whole: one process.
    """
    weight, pieces = ranks[rank].outcome.weights[name]
    # Who has the gradient of the same part. Of a weight that two stages use, it may be nobody.
    owners = [run for run in ranks if name in run.steps[0] and run.steps[0][name].pieces == pieces]
    if not owners:
        return False
    mine = [step[name].tensor for step in owners[0].steps]
    others = [part_of_whole(step, name, pieces) for step in whole.steps]
    apart = [(a - b).abs().max().item() for a, b in zip(mine, others, strict=True)]
    off = part_of_whole(whole.outcome.weights, name, pieces) - weight
    left = off - (_updates(case, mine) - _updates(case, others))
    agree = apart[0] <= GRADIENT and max(apart) <= LATER
    return agree and left.abs().max().item() <= FOLLOWS
