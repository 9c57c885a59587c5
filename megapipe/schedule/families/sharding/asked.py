"""The settings of sharded weights and gradients."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.schedule.families.sharding.sharded import UnshardedStages


@dataclass(frozen=True)
class Sharding:
    """Settings for sharding gradients (ZeRO-2), or weights too (ZeRO-3), within a table.

    A stage's weights are gathered before each run, a sequence of passes of the stage that use them,
    and dropped after it. `shortest` returns the choice that needs the least memory, because it
    keeps full weights and gradients for the shortest time.

    Attributes:
        weights: shard the weights too, not only the gradients.
        living: how many stages of a rank have full weights and full gradients at a time; None for
            the fastest choice within the memory.
    """

    weights: bool = True
    living: UnshardedStages | None = None

    @property
    def shortest(self) -> UnshardedStages:
        """Return the choice with the fewest stages gathered at a time, so with least memory."""
        return UnshardedStages(int(self.weights), 1)
