"""The microbatches of a stage, by number: what each is a part of, which tokens it has, what its loss counts.

Here each is whole. A shape of tables may cut them, and then every part is to a stage what a whole one is.
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
"""A gradient; a function of one that is known only when all forwards of its microbatch have run."""
Keep = Callable[[int, int, Tensor], Callable[[], Tensor]]
"""(number, last number that reads them, keys) -> a function that returns the keys."""


class Microbatches:
    """Whole microbatches."""

    @property
    def count(self) -> int:
        """Return the number of parts of a microbatch. Numbers go on from one microbatch to the next."""
        return 1

    def microbatch(self, number: int) -> int:
        """Return the microbatch that a part belongs to."""
        return number

    def tokens(self, number: int) -> tuple[range | None, int]:
        """Return the tokens of a part and the length of its sequences; (None, 0) for all."""
        return None, 0

    def stream(self, whole: Stream, number: int) -> Stream:
        """Return what the layers of a part draw from, given the stream of its microbatch."""
        return whole

    def keeping(self, stream: Stream, number: int, keep: Keep) -> Stream:
        """Return the stream with `keep`, which holds the keys and values that later parts read."""
        return stream

    def begun(self, number: int, stream: Callable[[int], Stream]) -> Stream:
        """Return the stream of a forward that begins, also when it runs again."""
        return stream(number)

    def share(self, number: int) -> float:
        """Return the share of its microbatch's tokens that a part has."""
        return 1.0

    def share_of(self, number: int, losses: Mapping[int, Loss], share: Callable[[Loss], Tensor]) -> Grad:
        """Return what the loss of a part counts in the step's."""
        return share(losses[number])

    def losses_of(self, losses: Mapping[int, Loss]) -> list[tuple[int, Loss]]:
        """Return the loss of each microbatch with its number, given those of all parts."""
        return sorted(losses.items())

    def refuse_lossless(self, loss_func: object, collects: bool) -> None:
        """Raises: ConfigError for forwards without a loss, if their results cannot be put together."""

    def shape(self, whole: Shape, made_by: Pass) -> Shape | None:
        """Return the shape of a part's message, given that of a microbatch; None if it is the same."""
        return None


def ranks_of_tokens(mesh: ProcessMesh, config: Any) -> int:
    """Return the number of ranks that share the tokens of a message."""
    return mesh.cp.size * (mesh.tp.size if getattr(config, "sequence_parallel", False) else 1)
