"""Try the best layouts with communication hidden: by pairs of passes, or by --tp-comm-overlap.

A pair is a forward and a backward that run together, so that one computes while the other
communicates. A table with pairs takes too long for every plan of a search. So they are tried for
the layouts that would be the best if all of their communication were hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from megapipe.checks.run import flag_problems
from megapipe.commands.plan.search.asked import Asked
from megapipe.commands.plan.search.cells import short
from megapipe.commands.plan.search.screen import Sketch
from megapipe.config import Config
from megapipe.plan.seconds.messages import CONTEXT, EXPERTS, TENSOR

TRIED = 4
"""Layouts that are tried with pairs, and with --tp-comm-overlap."""
HIDING = "hiding"
"""The word of --without for all of this."""


def hiding(ranked: Iterable[Sketch], asked: Asked) -> Iterator[Sketch]:
    """Yield plans of a search again, with their communication hidden.

    A run may refuse some of them; a step still has the given plan's time.

    Args:
        ranked: plans of the search, fastest first.
        asked: the user's restrictions of the search.
    """
    if HIDING in asked.without:
        return
    plans = [x for x in ranked if not x.moves]
    piped = [x for x in plans if x.config.parallel.pipeline_model_parallel_size > 1]
    for x in _promising(piped, (TENSOR, CONTEXT, EXPERTS)):
        yield from _legal(x, x.config.with_fields(overlap_moe_expert_parallel_comm=True))
    for x in _promising(plans, (TENSOR,)):
        yield from _legal(x, x.config.with_fields(tp_comm_overlap=True))


def _promising(plans: Iterable[Sketch], causes: tuple[str, ...]) -> list[Sketch]:
    """Return the plans that would have the shortest steps without the time of these causes."""
    lost = [(x, sum(x.parts[cause] for cause in causes)) for x in plans]
    ordered = sorted((x.step - seconds, n) for n, (x, seconds) in enumerate(lost) if seconds > 0)
    return [lost[n][0] for _, n in ordered[:TRIED]]


def _legal(x: Sketch, config: Config) -> Iterator[Sketch]:
    """Yield the plan with this configuration, unless a run refuses it."""
    # A short batch has the same problems, and a small table is checked sooner.
    if not flag_problems(short(config, 1)):
        yield replace(x, config=config)
