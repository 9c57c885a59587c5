"""A family of passes in a run: how its passes begin, and what it does around those of a stage.

The core iterates over the list in `families` and names none; what a table is asked about them is in
`schedule.families`, under the same names.
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


class OfStage:
    """What a family does around the passes of one stage in one step. This does nothing.

    `stage` is a `PipelineStage`, which has these by the names of families.
    """

    def data(self, given: Iterator[Any] | None) -> Iterator[Any] | None:
        """Return the batches of the stage's forwards."""
        return given

    def ends(self, given: Ends) -> Ends:
        """Return what the stage has of the ends of the model."""
        return given

    def stream(self, stream: Stream, number: int, microbatches: Microbatches) -> Stream:
        """Return what layers draw from for a microbatch or a slice."""
        return stream

    def forward(self, stage: Any, microbatch: int, usual: Forward) -> Forward:
        """Return how a forward runs."""
        return usual

    def takes_input(self, x: Tensor | None) -> Tensor | None:
        """Return the input of a forward that is differentiated, as the module is given it."""
        return x

    def saving(self, microbatch: int) -> AbstractContextManager[None]:
        """Return a context for the module in a forward that is differentiated."""
        return nullcontext()

    def saved(self, microbatch: int, output: Tensor | None, leaf: Tensor | None) -> None:
        """End such a forward. leaf: where its graph begins, held for its gradient alone."""

    def takes_loss(self, microbatch: int, output: Tensor, loss_func: LossFunc | None, cp: Axis, *, again: bool) -> bool:
        """Return whether a pass of the family makes the loss of this output. again: its forward ran before."""
        return False

    def gradient(self, microbatch: int, own: Tensor | None) -> Tensor | None:
        """Return the gradient of the output that the stage itself has, of its loss."""
        return own

    def forget(self) -> None:
        """Forget the forwards so far, which come again."""


class Setting(NamedTuple):
    """A step on a rank, as families see it before it runs.

    Attributes:
        kept: what the family keeps from step to step.
    """

    table: Schedule
    chunks: Chunks
    step: Request
    kept: Any


class Sizes(NamedTuple):
    """What messages are made of.

    Attributes:
        whole: hidden states [s, b, h] of whole sequences. here: of their tokens, those that a rank has.
        variable: microbatches differ in length. context: ranks that share a sequence.
    """

    place: Placement
    whole: tuple[int, int, int]
    here: int
    dtype: torch.dtype
    evaluates: bool
    variable: bool
    context: int


class Around(NamedTuple):
    """What is done on the stage of some passes before they begin, and after their step."""

    before: Mapping[Pass, Callable[[Any], None]]
    after: Mapping[Pass, Callable[[Any], None]]


@dataclass(frozen=True)
class Family:
    """A family of passes in a run.

    Attributes:
        name: under which a stage has its `OfStage`, and an engine what it keeps.
        begin: the beginning of each of its kinds.
        keeps: given a device, what a rank keeps of it from step to step.
        stages: what stages have of it in a step, by number.
        around: given the rows of a rank, what is done around passes.
        shapes: the shapes of messages that are no hidden states, by the pass that makes them; None: there are none.
    """

    name: str
    begin: Mapping[Kind, Begin]
    keeps: Callable[[torch.device], Any] = lambda device: None
    stages: Callable[[Setting], Mapping[int, OfStage]] = lambda setting: {}
    around: Callable[[Schedule], Around] = lambda table: Around({}, {})
    shapes: Callable[[Sizes], Callable[[Pass], Shape | None] | None] = lambda sizes: None
