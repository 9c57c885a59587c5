"""Say what it means to begin a pass on a stage, and how the passes of layers begin."""

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
    """A pass that has begun and not yet ended, such as a copy or a collective.

    Attributes:
        wait: waits for the end of the pass, and returns its result or None.
        span: for a copy, returns the stopwatch's marks of (its beginning, its end), once the copy
            is over. None for other passes.
    """

    wait: Callable[[], Tensor | None]
    span: Callable[[], tuple[Any, Any]] | None = None


class Again:
    """The result of pass V (validation) that makes the program run again from its beginning."""


AGAIN: Final = Again()
Made = Tensor | Begun | Again | None
Begin = Callable[[Any, int, list[Tensor]], Made]
"""A function (stage, number of the microbatch or step, inputs) -> what the pass makes.

The inputs are results of other passes, in the order of the table's links. The executor waits at
once for a `Begun` of the compute stream. For one of another stream it waits when a pass of yet
another stream first needs the result. Passes of one stream begin in the order of the table, and
whoever runs them keeps that order.
"""


@dataclass(frozen=True)
class Weights:
    """The functions with which a stage's weights are reduced, gathered, updated and checked.

    Sharded gradients and weights exist in full only during a run: consecutive passes of the stage.
    The trainer creates this object. The executor calls a function when the schedule has the pass
    for it, such as U for `update`. `reduce`, `gather` and `copy` begin their work, and return a
    function that waits for its end.

    Attributes:
        reduce: sums the stage's gradients over data parallelism (G or RS).
        gather: gathers the weights over data parallelism: updated weights (A), or sharded weights
            for a run of forwards (AF) or backwards (AB).
        update: updates the weights that the rank owns (U); None if no table has U.
        validate: checks the updates of the previous step (V). The function returns True if an
            update was wrong, so that the passes before V run again. None if no table has V.
        begin: allocates memory for the full gradients of a run.
        drop: frees the weights that were gathered for a run.
        copy: copies the stage's state to a peer (P). The state may change after the wait.
        layer_done: called as (layer, number of layers) once all microbatches have added to the
            gradients of this layer and all later ones. Layers that are recomputed together count as
            one. None if no caller needs it.
    """

    reduce: Callable[[], Callable[[], None]]
    gather: Callable[[], Callable[[], None]]
    update: Callable[[], None] | None = None
    validate: Callable[[], bool] | None = None
    begin: Callable[[], None] = lambda: None
    drop: Callable[[], None] = lambda: None
    copy: Callable[[], Callable[[], None]] = lambda: lambda: None
    layer_done: Callable[[int, int], None] | None = None


def weights_of(stage: Any) -> Weights:
    """Return the functions that work on a stage's weights.

    Raises: ConfigError if the stage has none.
    """
    # A stage that Megatron's loop runs has none: its passes of weights are the caller's own.
    weights: Weights | None = stage.weights
    if weights is None:
        raise ConfigError(
            "the schedule has passes of a stage's weights (G, U, A, V, P, AF, AB, RS), which "
            "megapipe's own training loop runs. Leave them out of the table."
        )
    return weights


def input_of(stage: Any, given: list[Tensor]) -> Tensor | None:
    """Return the input of a stage's forward, made from the results that it takes; None for none.

    The input is the sum of these results, unless `stage.ends.joins` joins them in another way.

    Args:
        stage: the stage.
        given: the results of the passes on which the forward depends.
    """
    ends: Ends | None = getattr(stage, "ends", None)
    # Stages of a contract, such as DeepSeek's, have no ends.
    return sum_of(given) if ends is None else ends.joins(given)


def sum_of(given: list[Tensor]) -> Tensor | None:
    """Return the sum of tensors: a single tensor itself, and None for no tensors."""
    # In the order of the table and not of arrival: floating-point sums depend on it.
    return reduce(torch.add, given) if given else None


class Ends(NamedTuple):
    """A stage's place in the model: whether it has a loss, and how its forwards' input is made.

    Attributes:
        holds_loss: whether the stage's forward ends in loss_func.
        goes_on: whether the stage sends hidden states to a next stage, perhaps in addition to a
            loss.
        depth: number of the stage's module of multi-token prediction, from 1; 0 if it has none.
        counts: factor on the stage's loss, such as the weight of a multi-token prediction.
        joins: takes the results on which a forward depends, and returns the forward's input. For no
            results, as on the first stage, `sum_of` returns None.
    """

    holds_loss: bool = False
    goes_on: bool = False
    depth: int = 0
    counts: float = 1.0
    joins: Callable[[list[Tensor]], Tensor | None] = sum_of


LAYERS: Mapping[Kind, Begin] = {
    Kind.F: lambda stage, microbatch, given: stage.forward(microbatch, input_of(stage, given)),
    # B is the backward whose weight gradients follow in W; BW computes both.
    Kind.B: lambda stage, microbatch, given: stage.backward(
        microbatch, sum_of(given), weights=False
    ),
    Kind.BW: lambda stage, microbatch, given: stage.backward(
        microbatch, sum_of(given), weights=True
    ),
    Kind.W: lambda stage, microbatch, _: stage.weight(microbatch),
}
"""How passes of layers begin. The other kinds are in `families`."""
