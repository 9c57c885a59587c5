"""Find some plan that fits within a second, so that a search says one before it has begun."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from math import inf

from megapipe.commands.plan.search.judged.screen import CandidatePlan, ExtrapolatedPlan, Screen
from megapipe.commands.plan.search.listed.asked import SearchRestrictions
from megapipe.schedule.catalogue import PLAIN

_USUAL = {"micro": "1", "recompute": "none", "sharding": "no", "schedule": PLAIN}
"""The values of the plans that are tried, by axis: few layouts, and tables that are soon made."""
_TRIES = 60
"""The most plans that are tried."""


def usual(asked: SearchRestrictions) -> SearchRestrictions | None:
    """Return the user's restrictions, narrowed to usual plans.

    A usual plan has 1F1B and one sequence in a microbatch, and neither recomputes nor shards
    weights.

    Returns: None if the user's restrictions exclude all usual plans."""
    allowed = {
        axis: asked.among.get(axis, frozenset([value])) & {value} for axis, value in _USUAL.items()
    }
    if not all(allowed.values()) or PLAIN in asked.without:
        return None
    return SearchRestrictions({**asked.among, **allowed}, asked.without)


def first_that_fits(candidates: Iterable[CandidatePlan], screen: Screen) -> ExtrapolatedPlan | None:
    """Return the first candidate that fits in memory; None if none of them does.

    Args:
        candidates: plans to try in this order. A generator makes only as many as are tried.
        screen: decides whether a plan fits.
    """
    for candidate in islice(candidates, _TRIES):
        judged = screen.judge(candidate, inf)
        if isinstance(judged, ExtrapolatedPlan):
            return judged
    return None
