"""Every part that plans know, in the order in which they change the costs of a plan."""

from __future__ import annotations

from megapipe.config import Config
from megapipe.plan.families import FAMILIES
from megapipe.plan.graphs import GRAPHS
from megapipe.plan.plan import OfPlan
from megapipe.plan.shapes import SHAPES
from megapipe.schedule import Schedule

PARTS = *SHAPES, *FAMILIES, GRAPHS


def own_parts(config: Config, plain: Schedule | None = None, made: Schedule | None = None) -> dict[str, OfPlan]:
    """Return what a plan has of each part, by name. The tables are the arguments of `Part.of`."""
    found = {part.name: part.of(config, plain, made) for part in PARTS}
    return {name: value for name, value in found.items() if value is not None}
