"""The settings of sharded weights and gradients."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.schedule.families.sharding.sharded import Living


@dataclass(frozen=True)
class Sharding:
    """Settings of gradients, or weights too, that are sharded between runs of passes.

    `shortest` returns the least number of stages that may be gathered at a time.

    Attributes:
        weights: shard weights too, and not only gradients.
        living: how many stages are gathered at a time; None for the fastest within the memory.
    """

    weights: bool = True
    living: Living | None = None

    @property
    def shortest(self) -> Living:
        """Return the choice with the fewest stages gathered at a time."""
        return Living(int(self.weights), 1)
