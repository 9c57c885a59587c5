"""The beginning of a pass on its stage: what it is, and how those of layers begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from megapipe.errors import ConfigError
from megapipe.schedule import Kind


class Begun(NamedTuple):
    """A pass that has begun; `wait` returns what it makes once it is over. span: of a copy, marks of its beginning and
    end, once it is over."""

    wait: Callable[[], Tensor | None]
    span: Callable[[], tuple[Any, Any]] | None = None


class Again:
    """A result after which the program runs again from its beginning."""


AGAIN: Final = Again()
Made = Tensor | Begun | Again | None
Begin = Callable[[Any, int, list[Tensor]], Made]
"""(stage, number of the microbatch or step, what other passes give it) -> what the pass makes for other stages.

The executor waits at once for what is pending on the compute lane, elsewhere where a pass of another lane first needs
it. Passes of one lane begin in the order of the table, and whoever runs them keeps that order.
"""


@dataclass(frozen=True)
class Weights:
    """Work on the weights of a stage as a whole. The first two begin it and return what waits for its end.

    Attributes:
        reduce: sum their gradients over data parallel.
        gather: the updated weights over data parallel, or those of a run of passes.
        update: those that the rank owns; None where no table has U.
        validate: what the step before has updated; returns whether it was wrong, so that what stood before it runs
            again. None where no table has V.
        begin: take memory for the gradients of a run of passes.
        drop: let go of the weights that were gathered for one.
        layer_done: called with the number of a layer and of all, as soon as the gradients of its weights and of later
            layers have the part of every microbatch. None if nobody asks.
    """

    reduce: Callable[[], Callable[[], None]]
    gather: Callable[[], Callable[[], None]]
    update: Callable[[], None] | None = None
    validate: Callable[[], bool] | None = None
    begin: Callable[[], None] = lambda: None
    drop: Callable[[], None] = lambda: None
    layer_done: Callable[[int, int], None] | None = None


def weights_of(stage: Any) -> Weights:
    """The work on a stage of a table that has passes of its weights. Raises: ConfigError if nobody does it."""
    weights: Weights | None = stage.weights
    if weights is None:
        raise ConfigError(
            "the schedule has passes of a stage's weights (G, U, A, V, AF, AB, RS), which megapipe's own training loop "
            "runs. Leave them out of the table."
        )
    return weights


def input_of(stage: Any, given: list[Tensor]) -> Tensor | None:
    """The input of a forward: what it is given added up, if the stage does not say otherwise."""
    ends: Ends | None = getattr(stage, "ends", None)
    return sum_of(given) if ends is None else ends.joins(given)


def sum_of(given: list[Tensor]) -> Tensor | None:
    """The sum in their order, so that it has the same bits whatever arrives first."""
    return reduce(torch.add, given) if given else None


class Ends(NamedTuple):
    """What a stage has of the ends of the model.

    Attributes:
        holds_loss: its forward ends in loss_func. goes_on: and gives hidden states to a next stage too.
        depth: which one of multi-token prediction it is, from 1; 0: none. counts: what its loss does.
        joins: what a forward is given, to its input.
    """

    holds_loss: bool = False
    goes_on: bool = False
    depth: int = 0
    counts: float = 1.0
    joins: Callable[[list[Tensor]], Tensor | None] = sum_of


LAYERS: Mapping[Kind, Begin] = {
    Kind.F: lambda stage, microbatch, given: stage.forward(microbatch, input_of(stage, given)),
    Kind.B: lambda stage, microbatch, given: stage.backward(microbatch, sum_of(given), weights=False),
    Kind.BW: lambda stage, microbatch, given: stage.backward(microbatch, sum_of(given), weights=True),
    Kind.W: lambda stage, microbatch, _: stage.weight(microbatch),
}
"""The beginning of the passes of layers; `families` have those of the others."""
