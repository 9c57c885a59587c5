"""Lanes that ranks share, as a file of a schedule says them."""

from __future__ import annotations

from typing import Any

from megapipe.schedule.kinds import COPIES
from megapipe.schedule.passes import Shared


def lane_to_json(lane: Shared) -> dict[str, Any]:
    """The lane, its ranks and the order of its passes."""
    return {"lane": lane.lane.value, "ranks": list(lane.ranks), "order": [str(x) for x in lane.order]}


def is_lane(lane: object) -> bool:
    """Is it what `lane_to_json` writes?"""
    if not (isinstance(lane, dict) and {"lane", "ranks", "order"} <= lane.keys() and lane["lane"] in list(COPIES)):
        return False
    ranks = isinstance(lane["ranks"], list) and all(type(r) is int and r >= 0 for r in lane["ranks"])
    return ranks and isinstance(lane["order"], list) and all(isinstance(text, str) for text in lane["order"])
