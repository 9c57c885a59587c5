"""Try the best pipelines of a search with a vocabulary that all pipeline ranks share.

The head of a model takes as long as several layers, and its rank makes the others wait. Divided
layers mend that by whole layers only. With --vocab-parallel-pipeline each rank has an equal part of
embedding and head. Its tables take seconds, so only the best layouts get one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from megapipe.commands.plan.search.hiding import promising, with_switch
from megapipe.commands.plan.search.judged.screen import ExtrapolatedPlan, kind_of
from megapipe.commands.plan.search.listed.asked import VOCABULARY, SearchRestrictions
from megapipe.commands.plan.search.listed.cells import under, with_barrier
from megapipe.config import Config
from megapipe.plan import pieces_of
from megapipe.plan.seconds.page import recomputes
from megapipe.plan.seconds.step import TimedPlan
from megapipe.schedule import SCHEDULES

_LEAST_GAIN = 0.01
"""The fraction of a step by which a shared vocabulary must shorten it."""
_FORWARDS = 3200
"""Forwards of all these tables together, which take a second for each 700."""
_EVEN = "zb-v"
"""A schedule that gains most of equal ranks: nearly all of its bubble comes from unequal ones."""


def shares(config: Config) -> bool:
    """Return whether pipeline ranks share the vocabulary."""
    return config.parallel.vocab_parallel_pipeline


def sharing(
    ranked: Iterable[ExtrapolatedPlan], asked: SearchRestrictions, *, own: bool
) -> Iterator[ExtrapolatedPlan]:
    """Yield pipelines of a search again, each as it is and then with a shared vocabulary.

    With a shared vocabulary all stages have equally many layers. A plan that a run refuses is left
    out. The step time stays unchanged.

    Args:
        ranked: plans of the search, fastest first.
        asked: the user's restrictions of the search.
        own: the user's flags have --vocab-parallel-pipeline, so all pipelines get it.
    """
    if VOCABULARY in asked.without:
        return
    piped = [x for x in ranked if x.kind == (False, True) and not x.moves]
    if not own:
        piped = promising([x for x in piped if _is_unequal(x)], ("bubble",))
    # The schedules that gain most come first, as there is time for few tables.
    choices: list[tuple[ExtrapolatedPlan, str, int | None]] = []
    if asked.allows_schedule(_EVEN):
        choices = [(x, _EVEN, None) for x in piped]
    choices += [
        (x, x.schedule, x.config.parallel.num_virtual_stages_per_pipeline_rank) for x in piped
    ]
    forwards = 0
    for x, name, chunks in choices:
        even = replace(x, config=under(x.config, name, chunks))
        stages = x.layout[2] * (chunks or SCHEDULES[name].chunks or 1)
        more = stages * x.config.num_microbatches
        # A run refuses --enable-optimizer-post-validation with it.
        waits = replace(even, config=with_barrier(even.config))
        for shared in with_switch(waits, "vocab_parallel_pipeline"):
            if forwards + more > _FORWARDS and not own:
                continue
            forwards += more
            yield x if name == x.schedule else even
            yield replace(shared, balanced=False)


def _is_unequal(x: ExtrapolatedPlan) -> bool:
    """Return whether the head may cost a plan the share of its step that a plan has to gain."""
    if x.parts["bubble"] < _LEAST_GAIN * x.step:
        return False
    pieces = pieces_of(x.config, x.config.model)
    whole = sum(layer.time for layer in pieces.layers) + pieces.head.time
    ranks = x.config.parallel.pipeline_model_parallel_size
    # The rank of the head has the mean work and, of the head, the parts of the p - 1 others.
    return pieces.head.time * (ranks - 1) >= _LEAST_GAIN * whole


def worth_it(
    made: Sequence[TimedPlan | None], limit: float, *, own: bool
) -> Iterator[TimedPlan | None]:
    """Yield the plans without those whose shared vocabulary hardly shortens their step.

    A shared vocabulary has to shorten a step by a percent. If the user's own flags have it, the
    plan without it has to be shorter by a percent.

    Args:
        made: plans as a run makes them; None where a run cannot make a plan.
        limit: bytes of a device.
        own: the user's flags have --vocab-parallel-pipeline.
    """
    least: dict[tuple[object, ...], float] = {}
    for x in made:
        if x is not None and x.peak <= limit:
            key = (*_alike(x), shares(x.config))
            least[key] = min(x.step, least.get(key, x.step))
    for x in made:
        if x is not None:
            other = least.get((*_alike(x), not shares(x.config)))
            # Without a plan to compare with, this one stays.
            must_gain = shares(x.config) != own
            if must_gain and other is not None and x.step > (1 - _LEAST_GAIN) * other:
                continue
        yield x


def _alike(x: TimedPlan) -> tuple[object, ...]:
    """Return what two plans have in common that differ by a shared vocabulary."""
    config = x.config
    pairs = config.parallel.overlap_moe_expert_parallel_comm
    stages = x.plan.schedule.placement.num_stages
    hidden = (pairs, config.overlaps_tp)
    kind = (x.layout, kind_of(config), x.moves, recomputes(config.model))
    return (*kind, x.schedule, stages, *hidden)
