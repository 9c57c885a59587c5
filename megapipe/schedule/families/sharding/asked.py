"""The settings of sharded weights and gradients."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.schedule.families.sharding.sharded import Living


@dataclass(frozen=True)
class Sharding:
    """Settings of sharded gradients (ZeRO-2), or of sharded weights too (ZeRO-3), in a table.

    A stage's weights are gathered before each run, a sequence of passes of the stage that use them,
    and dropped after it. `shortest` returns the choice that keeps weights and gradients full for
    the shortest time, so with the least memory.

    Attributes:
        weights: shard weights too, and not only gradients.
        living: how many stages of a rank have full weights and gradients at a time; None for the
            fastest choice within the memory.
    """

    weights: bool = True
    living: Living | None = None

    @property
    def shortest(self) -> Living:
        """Return the choice with the fewest stages gathered at a time, so with least memory."""
        return Living(int(self.weights), 1)
