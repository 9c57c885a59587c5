"""The settings of sharded weights and gradients."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.schedule.families.sharding.sharded import Living


@dataclass(frozen=True)
class Sharding:
    """Settings of gradients, or weights too, that are sharded between runs of passes.

    A run is a sequence of passes of a stage that use the same gathered weights. `shortest` returns
    the choice with the least memory.

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
