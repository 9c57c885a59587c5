"""The settings of overlapped pairs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megapipe.schedule.costs import SHARES, Costs


@dataclass(frozen=True)
class Pairing:
    """Settings of pairs: two passes that run overlapped, so that communication is hidden.

    `linked` returns the costs to use.

    Attributes:
        split: backwards that run without a forward are split even if the table has them fused.
        share: part of F and of B that is communication, if the costs name none; 0 keeps the costs.
    """

    split: bool = False
    share: float = 0.0

    def linked(self, costs: Costs) -> Costs:
        """Return the costs with `share` as communication of F and B; unchanged if they name any."""
        # Measured costs say more than a share that a flag guesses.
        named = costs.fb is not None or any(getattr(costs, name) for name in SHARES)
        if named or not self.share:
            return costs
        return replace(costs, link_f=self.share, link_b=self.share)
