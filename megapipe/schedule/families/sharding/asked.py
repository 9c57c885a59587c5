"""What is asked of shards."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.schedule.families.sharding.sharded import Living


@dataclass(frozen=True)
class Sharding:
    """Gradients, or weights too, that are gathered over data parallel for runs of a stage's passes.

    Attributes:
        weights: weights too, not gradients alone.
        living: how many stages live at a time; None: whatever is fastest in the room.
    """

    weights: bool = True
    living: Living | None = None

    @property
    def shortest(self) -> Living:
        """How few stages may live at a time."""
        return Living(int(self.weights), 1)
