"""Embedding and head that all ranks share (E, S, C, T, EW), if an automatic layout shares them."""

from __future__ import annotations

from dataclasses import replace

from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.partition.layout import AUTO
from megapipe.plan.part import PlanFeature, Planner
from megapipe.plan.plan import Plan


def _best(config: Config, planned: Planner) -> Plan | None:
    """Return the faster of two plans: with the vocabulary split over all ranks, or not.

    The field `before` of the plan is the other one. If one of the two is refused, the other is
    returned. The split has to be faster by a hundredth.

    Args:
        planned: takes a configuration, here with or without the split, and returns its plan.
    Returns: the plan; None if the flags leave no choice.
    Raises: ConfigError if both are refused.
    """
    par = config.parallel
    if not par.vocab_parallel_pipeline or par.pipeline_model_parallel_layout != AUTO:
        return None
    shared = config.with_fields(pipeline_model_parallel_layout=None)
    whole = config.with_fields(vocab_parallel_pipeline=False)
    plans = list[Plan]()
    errors = list[ConfigError]()
    for way in (shared, whole):
        try:
            plans.append(planned(way))
        except ConfigError as error:
            # Too much memory, or layers that do not divide.
            errors.append(error)
    if not plans:
        raise errors[-1]
    best, *other = sorted(plans, key=_time)
    # The text of the plan compares both.
    if other:
        best = replace(best, before=other[0])
    return best


def _time(plan: Plan) -> float:
    time = plan.timeline.makespan
    # FLOPs do not count the messages of a shared vocabulary: it has to win by a hundredth.
    if plan.schedule.placement.vocabulary:
        time *= 1.01
    return time


VOCABULARY = PlanFeature("vocabulary", best=_best)
