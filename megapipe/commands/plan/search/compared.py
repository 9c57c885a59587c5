"""Choose plans that are compared with the fastest: the plainest ones, and each schedule's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from megapipe.commands.plan.search.hiding import hides_unmeasured
from megapipe.commands.plan.search.judged.judging import key_of
from megapipe.commands.plan.search.judged.screen import ExtrapolatedPlan
from megapipe.commands.plan.search.listed.asked import SearchRestrictions
from megapipe.commands.plan.search.listed.cells import schedules_of, under
from megapipe.commands.plan.search.taken import CLOSE, plainness
from megapipe.config import Config
from megapipe.plan.seconds.page import recomputes
from megapipe.plan.seconds.step import Layout, TimedPlan
from megapipe.schedule.catalogue import PLAIN

_LEFT = 2
"""Layouts, with shards and without, up to which a search compares schedules and not layouts."""
_GAIN_OF_WAVES = 0.01
"""The fraction of a step by which virtual stages of an only pipeline rank must shorten it."""
_SIMPLE = ("zb-v", "zb-h1", "interleaved", PLAIN)
"""Schedules that hide no messages, keep one copy of the weights, and take no search."""
_LAYOUTS = 4
"""Layouts that are made once more under each of _SIMPLE."""
_PLAINEST = 3
"""Plans that are made once more under 1F1B, without more stages than ranks."""


def leaves_schedules(cells: list[Config]) -> bool:
    """Return whether cells have so few layouts that the schedules are what a user compares.

    On one pipeline rank schedules differ by little, so there layouts are compared.
    """
    kinds = {key_of(cell) for cell in cells}
    return len(kinds) <= _LEFT and all(piped for _, (_, piped) in kinds)


def has_units(config: Config) -> bool:
    """Return whether one pipeline rank has several virtual stages."""
    par = config.parallel
    stages = par.num_virtual_stages_per_pipeline_rank or 1
    return par.pipeline_model_parallel_size == 1 and stages > 1


def without_waves(plans: Iterable[ExtrapolatedPlan]) -> Iterator[ExtrapolatedPlan]:
    """Yield plans again whose weights one pipeline rank holds in several virtual stages, with one.

    Waves there only hide some sums of gradients, so that many of these plans gain nothing.
    """
    for x in plans:
        if has_units(x.config) and not x.kind[0]:
            yield replace(x, config=under(x.config, PLAIN, None), balanced=False)


def plain_instead(x: TimedPlan, finished: Iterable[TimedPlan]) -> TimedPlan:
    """Return the plan of this layout with one stage on its only pipeline rank, if it is as fast.

    The plan itself is returned if its weights are sharded, or if its virtual stages shorten the
    step by more than a percent. A plan that hides no messages stays one that hides none.

    Args:
        finished: all plans of the search that fit.
    """
    if not has_units(x.config) or x.config.parallel.use_megatron_fsdp:
        return x
    others = []
    for other in finished:
        same = other.layout == x.layout and recomputes(other.config.model) == recomputes(
            x.config.model
        )
        sharded = other.config.parallel.use_megatron_fsdp
        plain = not (has_units(other.config) or sharded or other.moves)
        plain &= hides_unmeasured(x) or not hides_unmeasured(other)
        if same and plain and other.step <= (1 + _GAIN_OF_WAVES) * x.step:
            others.append(other)
    return min(others, key=lambda other: other.step, default=x)


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


def simpler(
    ranked: list[ExtrapolatedPlan], asked: SearchRestrictions
) -> Iterator[ExtrapolatedPlan]:
    """Yield the fastest layouts with a pipeline again, under schedules that ask for nothing else.

    The fastest plan of a layout may pair passes, have two copies of the weights, or be searched. A
    search keeps no other plan of the layout, though one may be hardly slower.

    Args:
        ranked: plans of the search, fastest first.
        asked: the user's restrictions of the search.
    """
    layouts: dict[Layout, ExtrapolatedPlan] = {}
    for x in ranked:
        if x.kind == (False, True) and not x.moves:
            layouts.setdefault(x.layout, x)
    for x in [*layouts.values()][:_LAYOUTS]:
        for name, chunks in asked.schedules(schedules_of(x.config)):
            if name in _SIMPLE and chunks in (None, 2, asked.chunks):
                yield replace(x, config=under(x.config, name, chunks))
