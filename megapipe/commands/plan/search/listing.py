"""List the best plans of a search, each with the reason why it is listed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megapipe.commands.plan.search.compared import plain_instead
from megapipe.commands.plan.search.hiding import hides_unmeasured
from megapipe.commands.plan.search.judged.found import SearchResults, leaner
from megapipe.commands.plan.search.judged.screen import kind_of
from megapipe.commands.plan.search.search import BEST
from megapipe.commands.plan.search.taken import CLOSE, demands, plainest
from megapipe.plan.seconds.step import Layout, TimedPlan

_SIMPLE = 3
"""Layouts of a list that need no more than a plain pipeline."""
_OF_SCHEDULES = 3 * BEST
"""Plans of a list that compares schedules: each may have a line with pairs and one without."""


@dataclass(frozen=True)
class ListedPlan:
    """A plan of the list, and in a few words why it is listed."""

    plan: TimedPlan
    why: str


def best_of(found: SearchResults) -> list[ListedPlan]:
    """Return about ten plans, fastest first, each with the first reason that it has.

    The plans that have a reason of `_reasons` come first, then others until there are BEST. Virtual
    stages of an only pipeline rank are left out if they gain less than a percent.

    Args:
        found: the result of the search.
    """
    kept = [plain_instead(x, found.finished) for x in found.best.values()]
    ranked = sorted(kept, key=lambda x: x.step)
    listed: dict[int, ListedPlan] = {}
    for x, why in _reasons(found, ranked):
        listed.setdefault(id(x), ListedPlan(x, why))
    most = BEST
    if found.by_schedule:
        most = _OF_SCHEDULES
    for x in ranked:
        if len(listed) >= most:
            break
        listed.setdefault(id(x), ListedPlan(x, "next fastest"))
    return sorted(listed.values(), key=lambda x: x.plan.step)


def _reasons(found: SearchResults, ranked: list[TimedPlan]) -> Iterator[tuple[TimedPlan, str]]:
    """Yield plans with the reason why they are listed. Of several reasons the first one counts.

    Args:
        found: the result of the search.
        ranked: the fastest plan of each key of the search, fastest first.
    """
    near_yours = []
    made = [*found.finished]
    for mine, why in (
        (found.changed, "your flags, one changed"),
        (found.like_yours, "your pp and schedule"),
    ):
        if mine is not None:
            # The search may have made this plan too.
            same = next((x for x in made if _numbers(x) == _numbers(mine)), mine)
            near_yours.append((same, why))
            made.append(same)

    first = min([*ranked[:1], *(x for x, _ in near_yours)], key=lambda x: x.step, default=None)
    if first is not None:
        yield first, "fastest"

    sure = [x for x in made if not hides_unmeasured(x)]
    sure.sort(key=lambda x: x.step)
    for x in sure[:1]:
        yield plain_instead(x, made), "fastest without hidden messages"

    yield from near_yours

    plain = plainest(found.finished)
    if plain is not None:
        yield plain, f"fewest settings within {CLOSE:.0%}"

    # Of several layouts, as the fastest may lack room for an uneven load of experts.
    simple: dict[Layout, TimedPlan] = {}
    for x in sure:
        if not demands(x):
            simple.setdefault(x.layout, x)
    for n, x in enumerate([*simple.values()][:_SIMPLE]):
        kind = "plain, without pipeline"
        if x.config.parallel.pipeline_model_parallel_size > 1:
            kind = "plain pipeline"
        yield x, f"{kind}, another layout" if n else f"fastest {kind}"

    # The first of each is the fastest.
    kinds: dict[str, TimedPlan] = {}
    for x in ranked:
        kinds.setdefault(_kind(x), x)
    for kind, x in kinds.items():
        yield x, f"fastest {kind}"
    for x in leaner(ranked):
        yield x, "leaner than all faster ones"


def _numbers(x: TimedPlan) -> tuple[Layout, str, float, float]:
    """Return what two ways to make the same plan agree in."""
    return x.layout, x.schedule, x.step, x.peak


def _kind(x: TimedPlan) -> str:
    """Return, in words, the kind of a plan: sharded or not, with a pipeline, with moves or not."""
    sharded, piped = kind_of(x.config)
    words = "without pipeline"
    if piped:
        words = "pipeline"
    if sharded:
        words = f"sharded {words}"
    if x.moves:
        words += ", activations moved"
    return words
