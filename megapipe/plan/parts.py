"""Every part that plans know, in the order in which they change the costs of a plan."""

from __future__ import annotations

from megapipe.config import Config
from megapipe.plan.families import FAMILIES
from megapipe.plan.graphs import GRAPHS
from megapipe.plan.plan import OfPlan
from megapipe.plan.shapes import SHAPES
from megapipe.schedule import Schedule

# Slices change activations, copies price them, and graphs count the rest of them.
PARTS = *SHAPES, *FAMILIES, GRAPHS


def own_parts(
    config: Config, plain: Schedule | None = None, made: Schedule | None = None
) -> dict[str, OfPlan]:
    """Return {name of an optional feature, such as offload: what it adds to a plan}.

    Args:
        plain: the schedule before offload and sharding; None if it does not exist yet.
        made: the finished schedule; None while it is being made.
    """
    own: dict[str, OfPlan] = {}
    for part in PARTS:
        found = part.of(config, plain, made)
        if found is not None:
            own[part.name] = found
    return own
