"""Choose plans that are compared with the fastest: the plainest ones, and each schedule's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megapipe.commands.plan.pasted import CLOSE, plainness
from megapipe.commands.plan.search.cells import under
from megapipe.commands.plan.search.judging import key_of
from megapipe.commands.plan.search.screen import ExtrapolatedPlan
from megapipe.config import Config
from megapipe.schedule.catalogue import PLAIN

_LEFT = 2
"""Layouts, with shards and without, up to which a search compares schedules and not layouts."""
_PLAINEST = 3
"""Plans that are made once more under 1F1B, without more stages than ranks."""


def leaves_schedules(cells: list[Config]) -> bool:
    """Return whether cells have so few layouts that the schedules are what a user compares.

    On one pipeline rank schedules differ by little, so there layouts are compared.
    """
    kinds = {key_of(cell) for cell in cells}
    return len(kinds) <= _LEFT and all(piped for _, (_, piped) in kinds)


def plainer(ranked: list[ExtrapolatedPlan]) -> Iterator[ExtrapolatedPlan]:
    """Yield plans within CLOSE of the first again, with the fewest choices that they can have.

    These are under 1F1B, without virtual stages. Whether they are slower is found when they are
    made. Predictions cannot order plans that are so close, and many people prefer the plainest.

    Args:
        ranked: plans of the search, fastest first.
    """
    near = [x for x in ranked if not x.moves and x.step <= (1 + CLOSE) * ranked[0].step]
    plain = [replace(x, config=under(x.config, PLAIN, None), balanced=False) for x in near]
    yield from sorted(plain, key=lambda x: plainness(x.config))[:_PLAINEST]
