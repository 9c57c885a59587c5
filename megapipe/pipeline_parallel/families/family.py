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
from megapipe.tensor_parallel.rng import MicrobatchContext

Forward = Callable[[int, Tensor | None], Tensor | None]
"""A function (microbatch, input) -> output of a stage."""


class OfStage:
    """The actions of a family of passes, such as O, L and R of offload, around one stage's passes.

    A `PipelineStage`, called `stage` here, calls these methods before, in and after its forwards
    and backwards. The methods here change nothing; a family's subclass overrides some. The stage
    has at most one such object of each family, made by `Family.stages`. Families are asked one
    after another, each with the result of the one before. `microbatch` is the number of a
    microbatch or, if microbatches are cut, of a slice among all slices.
    """

    # Before the step: what the stage gets.

    def data(self, given: Iterator[Any] | None) -> Iterator[Any] | None:
        """Return the data iterator for the stage's forwards.

        `given` is the stage's iterator; None if it has none.
        """
        return given

    def ends(self, given: Ends) -> Ends:
        """Return whether the stage has a loss, and how the input of its forwards is made.

        The input may be made from several results of other stages, such as partial embeddings.
        `given` says the same according to the table, without this family.
        """
        return given

    def stream(
        self, stream: MicrobatchContext, number: int, microbatches: Microbatches
    ) -> MicrobatchContext:
        """Return the random stream that layers use in a forward of a microbatch or slice.

        Args:
            stream: the stream without this family's changes.
            number: the number of the microbatch or slice.
            microbatches: describes the microbatches of the stage.
        """
        return stream

    # Around a forward. Only differentiated forwards save anything.

    def forward(self, stage: Any, microbatch: int, usual: Forward) -> Forward:
        """Return the function that runs this microbatch's forward.

        `usual` is the stage's own function.
        """
        return usual

    def takes_input(self, x: Tensor | None) -> Tensor | None:
        """Return the tensor that the module reads for its input x, in a forward with a graph.

        At the stage with the embedding x is None, and None is returned.
        """
        return x

    def saving(self, stage: Any, microbatch: int) -> AbstractContextManager[None]:
        """Return a context in which the module runs a forward with a graph.

        The context may set hooks on the tensors that autograd saves.
        """
        return nullcontext()

    def saved(self, microbatch: int, output: Tensor | None, leaf: Tensor | None) -> None:
        """Take note that a forward with a graph has ended.

        Args:
            microbatch: number of the microbatch.
            output: the output of the stage.
            leaf: the input, where the graph begins; None at the embedding. The stage holds it only
                to read its gradient.
        """

    def takes_loss(
        self, microbatch: int, output: Tensor, loss_func: LossFunc | None, cp: Axis, *, again: bool
    ) -> bool:
        """Return whether a pass of the family, and not the forward, computes the loss.

        Args:
            microbatch: number of the microbatch.
            output: the output of the model.
            loss_func: the function that forward_step returned; None without one.
            cp: the ranks that share the microbatch's tokens.
            again: whether the forward runs a second time. The method was then called before with
                the same arguments.
        """
        return False

    # Before a backward.

    def gradient(self, microbatch: int, own: Tensor | None) -> Tensor | None:
        """Return the gradient of the output that comes from this stage's loss.

        `own` is the gradient that the stage itself computed; None if a family's pass computes the
        loss. Both are None for a stage without loss.
        """
        return own

    # After V has found a wrong update.

    def forget(self) -> None:
        """Drop what forwards have stored, because the program runs again from its beginning."""


class Setting(NamedTuple):
    """A step of a rank before it runs. A family makes its objects for the stages from it.

    Attributes:
        table: the step's schedule.
        chunks: {stage: (module, data iterator)}.
        step: the arguments of the step.
        kept: the state that the family keeps from step to step.
    """

    table: Schedule
    chunks: Chunks
    step: Request
    kept: Any


class Sizes(NamedTuple):
    """The numbers on which the shapes of a step's messages depend.

    With one pipeline rank, which sends no message, `whole` and `here` are 0.

    Attributes:
        place: the rank of each stage.
        whole: shape [s, b, h] of the hidden states of whole sequences.
        here: number of a sequence's tokens that are on this rank.
        dtype: the type of messages.
        evaluates: whether the step has forwards only.
        variable: whether microbatches differ in length.
        context: number of context-parallel ranks.
    """

    place: Placement
    whole: tuple[int, int, int]
    here: int
    dtype: torch.dtype
    evaluates: bool
    variable: bool
    context: int


class Around(NamedTuple):
    """Functions that are called before and after some passes, with the stage as their argument.

    Attributes:
        before: {pass: function to call before the pass begins}.
        after: {pass: function to call after the pass, or after both passes of an overlapped pair}.
    """

    before: Mapping[Pass, Callable[[Any], None]]
    after: Mapping[Pass, Callable[[Any], None]]


@dataclass(frozen=True)
class Family:
    """Some kinds of pass, such as O, L and R of offload, and the functions to run them.

    Attributes:
        name: the family's name, the key of its `OfStage` in a stage and of its state in an engine.
        begin: {kind: function that begins a pass of that kind on a stage}.
        keeps: takes the rank's device and returns the state that lasts from step to step.
        stages: returns {stage: its `OfStage`} for the stages that have one.
        around: takes the table and returns the functions to call before and after passes.
        shapes: takes the sizes of a step, and returns a function (pass that makes a message) ->
            shape of the message, which returns None for hidden states. If all messages of the
            family are hidden states, None takes the place of the function.
    """

    # Most families need few of these. A family of passes that only call the trainer's functions has
    # nothing but `begin`.
    name: str
    begin: Mapping[Kind, Begin]
    keeps: Callable[[torch.device], Any] = lambda device: None
    stages: Callable[[Setting], Mapping[int, OfStage]] = lambda setting: {}
    around: Callable[[Schedule], Around] = lambda table: Around({}, {})
    shapes: Callable[[Sizes], Callable[[Pass], Shape | None] | None] = lambda sizes: None
