"""Describe the microbatches of a stage by number: their parts, their tokens, and how losses count.

Here each microbatch is whole. A shape of tables may cut microbatches. Then a stage treats each part
as it treats a whole microbatch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.loss import Loss
from megapipe.schedule import Pass
from megapipe.tensor_parallel.rng import MicrobatchContext

Shape = tuple[int, ...]
Grad = Tensor | Callable[[], Tensor] | None
"""A gradient, or a function that returns it once all forwards of its microbatch have run."""
Keep = Callable[[int, int, Tensor], Callable[[], Tensor]]
"""A function (number, last number that reads the keys, keys) -> a function that gives the keys."""


class Microbatches:
    """The microbatches of one stage, with the tokens, random streams and losses of each.

    A subclass cuts each microbatch into parts (slices of the sequence), which are numbered through
    all microbatches. In this class a microbatch is a single part. In all methods `number` is the
    number of a part.
    """

    # A stage asks these for every pass, so a shape overrides only the answers that it changes.
    @property
    def count(self) -> int:
        """Return the number of parts of each microbatch."""
        return 1

    def microbatch(self, number: int) -> int:
        """Return the number of the microbatch to which a part belongs."""
        return number

    def tokens(self, number: int) -> tuple[range | None, int]:
        """Return (range of tokens, length of the sequence) of a part; (None, 0) for all tokens.

        Args:
            number: the number of the part, a microbatch or a slice.
        """
        return None, 0

    def stream(self, whole: MicrobatchContext, number: int) -> MicrobatchContext:
        """Return the random stream of a part, given the stream of its whole microbatch.

        Args:
            number: the number of the part, a microbatch or a slice.
        """
        return whole

    def keeping(self, stream: MicrobatchContext, number: int, keep: Keep) -> MicrobatchContext:
        """Return the stream with a function by which layers keep keys and values for later parts.

        Args:
            stream: the stream of the part.
            number: the number of the part.
            keep: that function, of (number of the part, number of the last part that reads the
                keys, keys).
        """
        return stream

    def begun(self, number: int, stream: Callable[[int], MicrobatchContext]) -> MicrobatchContext:
        """Return the random stream of a part (microbatch or slice) whose forward begins.

        A subclass may allocate here what the slices of a microbatch share, and free it at the last
        one.

        Args:
            number: the number of the part.
            stream: takes the number of a part and returns its stream.
        """
        return stream(number)

    def share(self, number: int) -> float:
        """Return a part's number of tokens divided by its microbatch's number of tokens."""
        return 1.0

    def share_of(
        self, number: int, losses: Mapping[int, Loss], share: Callable[[Loss], Tensor]
    ) -> Grad:
        """Return the gradient of the step's loss with respect to the loss of a part.

        Args:
            number: the number of the part.
            losses: {number: loss} of all parts so far.
            share: takes the loss of a whole microbatch and returns the gradient with respect to it.
        Returns: the gradient; for a slice a function that returns it once all forwards of the
            microbatch have run.
        """
        # Known at once: a whole microbatch's loss has all its tokens. A part's is a function.
        return share(losses[number])

    def losses_of(self, losses: Mapping[int, Loss]) -> list[tuple[int, Loss]]:
        """Return [(microbatch, its loss)], given {number of a part: its loss}."""
        return sorted(losses.items())

    def refuse_lossless(self, loss_func: object, collects: bool) -> None:
        """Raise ConfigError for a step that collects no losses, if microbatches are cut.

        Losses of slices can be added up, other results cannot.

        Args:
            loss_func: the function that computes the loss; None if the forward has none.
            collects: whether the step collects other data than losses.
        """

    def shape(self, whole: Shape, made_by: Pass) -> Shape | None:
        """Return the shape of a pass's message; None if it is the shape of a whole microbatch.

        Args:
            whole: the shape of a whole microbatch's message.
            made_by: the pass that makes the message.
        """
        return None


def ranks_of_tokens(mesh: ProcessMesh, config: Any) -> int:
    """Return the number of ranks over which the tokens of a hidden state are split.

    This is the number of context-parallel ranks, multiplied by the number of tensor-parallel ranks
    if `config.sequence_parallel` is on.
    """
    # Between layers sequence parallelism cuts the sequence a second time, and messages leave in
    # that form (Korthikanti et al. 2022, sec. 4.2.2).
    if getattr(config, "sequence_parallel", False):
        return mesh.cp.size * mesh.tp.size
    return mesh.cp.size
