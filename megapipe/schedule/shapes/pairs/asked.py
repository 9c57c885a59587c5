"""What is asked of pairs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megapipe.schedule.costs import SHARES, Costs


@dataclass(frozen=True)
class Pairing:
    """Two passes run together, so that the communication of one hides behind the arithmetic of the other.

    Attributes:
        split: backwards without a partner are split where the table has them whole too.
        share: part of F and of B that counts as communication where the costs name none; 0 leaves the costs alone.
    """

    split: bool = False
    share: float = 0.0

    def linked(self, costs: Costs) -> Costs:
        """Return the costs with the share of communication, unless they name one."""
        named = costs.fb is not None or any(getattr(costs, name) for name in SHARES)
        return (
            costs
            if named or not self.share
            else replace(costs, link_f=self.share, link_b=self.share)
        )
