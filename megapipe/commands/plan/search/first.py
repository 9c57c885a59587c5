"""Find some plan that fits within a second, so that a search can say it before it has begun."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from megapipe.commands.plan.search.asked import Asked
from megapipe.commands.plan.search.final import of_run
from megapipe.commands.plan.search.screen import Candidate
from megapipe.config import Config
from megapipe.errors import ConfigError, ScheduleError
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.step import Timed
from megapipe.schedule.catalogue import PLAIN

_USUAL = {"micro": "1", "recompute": "none", "sharding": "no", "schedule": PLAIN}
"""The values of the plans that are tried, by axis: few layouts, and a table that is soon made."""
_TRIES = 12
"""Plans that are made until one fits."""


def usual(asked: Asked) -> Asked | None:
    """Return the user's restrictions, narrowed to usual plans; None if they allow no such plan."""
    narrow = {axis: frozenset([value]) for axis, value in _USUAL.items()}
    allowed = {axis: asked.among.get(axis, values) & values for axis, values in narrow.items()}
    if not all(allowed.values()) or PLAIN in asked.without:
        return None
    return Asked({**asked.among, **allowed}, asked.without)


def first_that_fits(
    candidates: Iterable[Candidate], cells: list[Config], device: Device, memory: float
) -> Timed | None:
    """Return the first plan that fits, of those that promise most; None if none of some fits.

    Args:
        candidates: plans under the restrictions of `usual`.
        cells: the layouts to which candidates refer by number.
        memory: bytes of a device.
    """
    # A layout of more ranks needs less memory. Its plan is slower, but no table is made in vain.
    ordered = sorted(candidates, key=lambda x: x.least)
    for x in ordered[:: -(-len(ordered) // _TRIES) or 1]:
        with suppress(ConfigError, ScheduleError):
            made = of_run(cells[x.cell], device)
            if made.peak <= memory:
                return made
    return None
