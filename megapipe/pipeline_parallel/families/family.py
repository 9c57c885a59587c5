"""The interface of a family of passes in a run.

A family says how its passes begin, and what it does around the other passes of a stage. The core
iterates over the list in `families` and names none. What a family answers about a table is in
`schedule.families`, under the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.pipeline_parallel.attributes import Chunks
from megapipe.pipeline_parallel.loss import LossFunc
from megapipe.pipeline_parallel.microbatches import Microbatches, Shape
from megapipe.pipeline_parallel.passes.begin import Begin, Ends
from megapipe.pipeline_parallel.request import Request
from megapipe.schedule import Kind, Pass, Placement, Schedule
from megapipe.tensor_parallel.rng import Stream

Forward = Callable[[int, Tensor | None], Tensor | None]
"""A function (microbatch, input) -> output of a stage."""


class OfStage:
    """The actions of a family around the passes of one stage in one step; these do nothing.

    `stage` is a `PipelineStage`. It holds such an object for each family that the table has, by the
    family's name. `microbatch` is the number of a microbatch, or of a slice among all slices.
    """

    # Before the step: what the stage gets.

    def data(self, given: Iterator[Any] | None) -> Iterator[Any] | None:
        """Return the batches of the stage's forwards, given the batches of the rank."""
        return given

    def ends(self, given: Ends) -> Ends:
        """Return the ends of the model that the stage has, given its ends by the table."""
        return given

    def stream(self, stream: Stream, number: int, microbatches: Microbatches) -> Stream:
        """Return the stream of a microbatch or a slice, which its layers find while they run."""
        return stream

    # Around a forward. Only differentiated forwards save anything.

    def forward(self, stage: Any, microbatch: int, usual: Forward) -> Forward:
        """Return the function that runs a forward, given the usual one."""
        return usual

    def takes_input(self, x: Tensor | None) -> Tensor | None:
        """Return the input of a differentiated forward in the form that the module gets."""
        return x

    def saving(self, stage: Any, microbatch: int) -> AbstractContextManager[None]:
        """Return a context in which the module runs a differentiated forward."""
        return nullcontext()

    def saved(self, microbatch: int, output: Tensor | None, leaf: Tensor | None) -> None:
        """End a differentiated forward.

        Args:
            microbatch: its number.
            output: of the stage.
            leaf: the input, where the graph begins. The stage holds it for its gradient alone.
        """

    def takes_loss(
        self, microbatch: int, output: Tensor, loss_func: LossFunc | None, cp: Axis, *, again: bool
    ) -> bool:
        """Return whether a pass of the family computes the loss of this output.

        Args:
            microbatch: its number.
            output: of the model.
            loss_func: as forward_step returned it.
            cp: the ranks that share the microbatch's tokens.
            again: the forward has run before, so the family knows all this.
        """
        return False

    # Before a backward.

    def gradient(self, microbatch: int, own: Tensor | None) -> Tensor | None:
        """Return the gradient of the output by the stage's own loss, given the usual one."""
        return own

    # After V has found a wrong update.

    def forget(self) -> None:
        """Forget the forwards so far, because the program runs again from its beginning."""


class Setting(NamedTuple):
    """A step on a rank before it runs.

    Attributes:
        table: the step's schedule.
        chunks: module and data of each stage of the rank.
        step: the request.
        kept: the state that the family keeps from step to step.
    """

    table: Schedule
    chunks: Chunks
    step: Request
    kept: Any


class Sizes(NamedTuple):
    """The numbers that decide the shapes of messages.

    Attributes:
        place: the stages.
        whole: shape of hidden states [s, b, h] of whole sequences.
        here: number of a sequence's tokens that this rank has.
        dtype: of messages.
        evaluates: the step has forwards only.
        variable: microbatches differ in length.
        context: number of ranks that share a sequence.
    """

    place: Placement
    whole: tuple[int, int, int]
    here: int
    dtype: torch.dtype
    evaluates: bool
    variable: bool
    context: int


class Around(NamedTuple):
    """Functions of the stage that run around some passes.

    Attributes:
        before: by pass, called before the pass begins.
        after: by pass, called after the pass, or after both passes of a pair.
    """

    before: Mapping[Pass, Callable[[Any], None]]
    after: Mapping[Pass, Callable[[Any], None]]


@dataclass(frozen=True)
class Family:
    """A family of passes in a run.

    Attributes:
        name: a stage has its `OfStage` under this name, and an engine the state that it keeps.
        begin: how a pass of each of its kinds begins.
        keeps: returns the state that a rank keeps from step to step, given the rank's device.
        stages: returns the `OfStage` of each stage that has one, by the stage's number.
        around: returns what runs around passes, given the table of a rank.
        shapes: returns a function from the pass that makes a message to the message's shape. The
            function returns None for hidden states. Without such a function there is no message of
            another shape.
    """

    # Most families need few of these. A family of passes that only call the trainer's functions has
    # nothing but `begin`.
    name: str
    begin: Mapping[Kind, Begin]
    keeps: Callable[[torch.device], Any] = lambda device: None
    stages: Callable[[Setting], Mapping[int, OfStage]] = lambda setting: {}
    around: Callable[[Schedule], Around] = lambda table: Around({}, {})
    shapes: Callable[[Sizes], Callable[[Pass], Shape | None] | None] = lambda sizes: None
