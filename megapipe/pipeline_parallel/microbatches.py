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
    """The microbatches of one stage, each in one part, which is the whole."""

    # A stage asks these for every pass, so a shape overrides only the answers that it changes.
    @property
    def count(self) -> int:
        """Return the number of parts of a microbatch.

        The numbers of parts go on from one microbatch to the next.
        """
        return 1

    def microbatch(self, number: int) -> int:
        """Return the microbatch to which a part belongs."""
        return number

    def tokens(self, number: int) -> tuple[range | None, int]:
        """Return the tokens of a part and the length of its sequences; (None, 0) for all tokens."""
        return None, 0

    def stream(self, whole: Stream, number: int) -> Stream:
        """Return the random stream of a part, given the stream of its microbatch."""
        return whole

    def keeping(self, stream: Stream, number: int, keep: Keep) -> Stream:
        """Return the stream with `keep`, which holds the keys and values that later parts read."""
        return stream

    def begun(self, number: int, stream: Callable[[int], Stream]) -> Stream:
        """Return the stream of a forward that begins, also when it runs again.

        stream: returns the stream of a number.
        """
        return stream(number)

    def share(self, number: int) -> float:
        """Return the share of its microbatch's tokens that a part has."""
        return 1.0

    def share_of(
        self, number: int, losses: Mapping[int, Loss], share: Callable[[Loss], Tensor]
    ) -> Grad:
        """Return the gradient of the step's loss with respect to the loss of a part.

        Args:
            number: of the part.
            losses: of all parts so far.
            share: returns this gradient for the loss of a whole microbatch.
        """
        # Known at once: a whole microbatch's loss has all its tokens. A part's is a function.
        return share(losses[number])

    def losses_of(self, losses: Mapping[int, Loss]) -> list[tuple[int, Loss]]:
        """Return each microbatch with its loss, given the losses of all parts."""
        return sorted(losses.items())

    def refuse_lossless(self, loss_func: object, collects: bool) -> None:
        """Raise ConfigError for forwards without a loss, if parts of their results do not join.

        Args:
            loss_func: None if the forward has no loss.
            collects: the step collects other data than losses.
        """

    def shape(self, whole: Shape, made_by: Pass) -> Shape | None:
        """Return the shape of a part's message, given a microbatch's; None if it is the same."""
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
