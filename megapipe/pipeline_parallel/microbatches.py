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
from megapipe.tensor_parallel.rng import Stream

Shape = tuple[int, ...]
Grad = Tensor | Callable[[], Tensor] | None
"""A gradient, or a function that returns it once all forwards of its microbatch have run."""
Keep = Callable[[int, int, Tensor], Callable[[], Tensor]]
"""A function (number, last number that reads the keys, keys) -> a function that gives the keys."""


class Microbatches:
    """The microbatches of one stage. Here each has one part, the whole microbatch.

    A subclass cuts a microbatch into several parts, its slices. Parts have consecutive numbers
    through all microbatches. The stage asks these methods about the part of each pass.
    """

    # A stage asks these for every pass, so a shape overrides only the answers that it changes.
    @property
    def count(self) -> int:
        """Return the number of parts of each microbatch."""
        return 1

    def microbatch(self, number: int) -> int:
        """Return the microbatch to which the part of this number belongs."""
        return number

    def tokens(self, number: int) -> tuple[range | None, int]:
        """Return (range of a part's tokens, length of the sequence); (None, 0) for all tokens."""
        return None, 0

    def stream(self, whole: Stream, number: int) -> Stream:
        """Return the random stream of a part; `whole` is the stream of its microbatch."""
        return whole

    def keeping(self, stream: Stream, number: int, keep: Keep) -> Stream:
        """Return the stream with a function by which layers keep keys and values for later parts.

        Args:
            stream: the stream of the part.
            number: the number of the part.
            keep: called as (number, number of the last part that reads the keys, keys).
        """
        return stream

    def begun(self, number: int, stream: Callable[[int], Stream]) -> Stream:
        """Return the stream of a forward that begins, also when it runs again.

        Args:
            number: the number of the part.
            stream: returns the stream of a part, given its number.
        """
        return stream(number)

    def share(self, number: int) -> float:
        """Return the number of a part's tokens divided by the number of its microbatch's tokens."""
        return 1.0

    def share_of(
        self, number: int, losses: Mapping[int, Loss], share: Callable[[Loss], Tensor]
    ) -> Grad:
        """Return the gradient of the step's loss with respect to the loss of a part.

        Args:
            number: the number of the part.
            losses: the losses of all parts so far, by number.
            share: returns this gradient for the loss of a whole microbatch.
        """
        # Known at once: a whole microbatch's loss has all its tokens. A part's is a function.
        return share(losses[number])

    def losses_of(self, losses: Mapping[int, Loss]) -> list[tuple[int, Loss]]:
        """Return a list of (microbatch, its loss), given the loss of each part by number."""
        return sorted(losses.items())

    def refuse_lossless(self, loss_func: object, collects: bool) -> None:
        """Raise ConfigError for forwards without a loss if results of parts cannot be joined.

        Args:
            loss_func: None if the forward has no loss.
            collects: the step collects other data than losses.
        """

    def shape(self, whole: Shape, made_by: Pass) -> Shape | None:
        """Return the shape of a part's message; None if it is the shape of a whole microbatch.

        Args:
            whole: the shape of a whole microbatch's message.
            made_by: the pass that makes the message.
        """
        return None


def ranks_of_tokens(mesh: ProcessMesh, config: Any) -> int:
    """Return the number of ranks that share the tokens of a message.

    config: may have `sequence_parallel`, with which the tensor-parallel ranks share them too.
    """
    # Between layers sequence parallelism cuts the sequence a second time, and messages leave in
    # that form (Korthikanti et al. 2022, sec. 4.2.2).
    if getattr(config, "sequence_parallel", False):
        return mesh.cp.size * mesh.tp.size
    return mesh.cp.size
