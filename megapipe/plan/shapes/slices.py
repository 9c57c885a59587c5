"""Slices of a run's sequences: how many there are, and how many tokens each has."""

from __future__ import annotations

from functools import lru_cache
from inspect import signature

from megapipe.config import Config
from megapipe.config.layers import layer_config
from megapipe.errors import ConfigError, ScheduleError
from megapipe.plan.layers import RankLoad, Work, layer_work
from megapipe.plan.part import PlanFeature, Planner
from megapipe.plan.plan import Plan
from megapipe.schedule import Costs, Schedule
from megapipe.schedule.core.cuts import in_tokens, shares
from megapipe.schedule.patterns import SLICED, Entry

FLAG = "--pipeline-slices"
AUTO = "auto"
MOST = 64
"""Most slices of a microbatch: the tag of a message has no room for more."""
CHOICES = (1, 2, 4, 8, 16)
"""Numbers of slices among which `auto` chooses."""


def number_of(config: Config) -> int | None:
    """Return the number of slices in --pipeline-slices; None without the flag, or for `auto`.

    Raises: ConfigError if the value is neither `auto` nor a number from 1 to 64.
    """
    given = config.parallel.pipeline_slices
    if given is None or given == AUTO:
        return None
    # int() refuses more than 4300 digits in words of its own.
    if not given.isdecimal() or len(given) > 9 or not 1 <= int(given) <= MOST:
        raise ConfigError(
            f"{FLAG} {given} is neither a number from 1 to {MOST} nor auto. Use {FLAG} 4."
        )
    return int(given)


def chosen(config: Config, count: int, *, always: bool = False) -> Config:
    """Return the configuration with `count` slices if --pipeline-slices is `auto`.

    Args:
        always: replace any value of the flag, not only `auto`.
    """
    if config.parallel.pipeline_slices != AUTO and not always:
        return config
    return config.with_fields(pipeline_slices=str(count))


def _best(config: Config, planned: Planner) -> Plan | None:
    """Return the plan whose number of slices gives the shortest makespan.

    Args:
        planned: takes a configuration with a fixed number of slices and returns its plan.
    Returns: the plan; None if --pipeline-slices is not `auto`.
    Raises: ConfigError or ScheduleError if every number is refused. The error is the first
        number's.
    """
    if config.parallel.pipeline_slices != AUTO:
        return None
    plans = list[Plan]()
    errors = list[ConfigError | ScheduleError]()
    for count in CHOICES:
        try:
            plans.append(planned(chosen(config, count)))
        except (ConfigError, ScheduleError) as error:
            # A slice is too short, memory too small, or the schedule has no slices.
            errors.append(error)
    if not plans:
        raise errors[0]
    return min(plans, key=lambda plan: plan.timeline.makespan)


def cuts_of(config: Config) -> tuple[int, ...]:
    """Return the lengths of a microbatch's slices in tokens; () if it is not cut.

    Raises: ConfigError if the sequence cannot be cut into these slices.
    """
    count = number_of(config)
    if entry := _of_slices(config):
        # Without a number of its own such a schedule has one slice for each rank.
        usual = signature(entry.generate).parameters["slices"].default
        count = count or usual or config.parallel.pipeline_model_parallel_size
        return lengths(chosen(config, count, always=True))
    if count in (None, 1):
        return ()
    return lengths(config)


def own_slices(config: Config) -> tuple[tuple[str, int], ...]:
    """Return (("slices", number),) for a schedule that always cuts microbatches into slices.

    The function that makes the table takes it as an argument, such as slices=4. The result is ()
    for other schedules, and without --pipeline-slices.
    """
    count = number_of(config)
    if count is None or _of_slices(config) is None:
        return ()
    return (("slices", count),)


def _of_slices(config: Config) -> Entry | None:
    return SLICED.get((config.parallel.pipeline_schedule or "").lower())


def in_words(schedule: Schedule) -> str:
    """Return text on the number and sizes of slices, to append to a schedule's name.

    The text is "" if microbatches are not cut.
    """
    if not schedule.cuts:
        return ""
    most = max(schedule.cuts)
    least = min(schedule.cuts)
    sizes = f"{most:g}"
    if most > least:
        sizes = f"{most:g} to {least:g}"
    return f" in {len(schedule.cuts)} slices of {sizes} tokens"


# Each table of a plan asks, and slices of equal work take a search.
@lru_cache(maxsize=32)
def lengths(config: Config) -> tuple[int, ...]:
    """Return the tokens of each slice, from --pipeline-slices and --pipeline-slice-cuts.

    Raises: ConfigError if the sequence cannot be cut into these slices.
    """
    par = config.parallel
    length = config.batch.seq_length or 0
    count = number_of(config) or 1
    # Every rank has an equal part of every slice.
    multiple = par.context_parallel_size
    if multiple > 1:
        # A context-parallel rank has a run of tokens from each half: one late, one early, so that
        # all ranks attend to equally many.
        multiple *= 2
    if config.model.sequence_parallel:
        multiple *= par.tensor_model_parallel_size
    # Only a batch shows where documents begin. Until then work decides.
    how = par.pipeline_slice_cuts
    if par.cuts_at_documents:
        how = "work"
    try:
        return in_tokens(shares(count, how, costs_of_layers(config)), length, multiple)
    except ScheduleError:
        ranks = " of context and sequence parallelism" if multiple > 1 else ""
        wrong = "no such multiple" if length % multiple else "too short"
        fitting = max(-(-length // multiple), count) * multiple
        raise ConfigError(
            f"{FLAG} {count} cuts --seq-length {length} in slices, each a multiple of "
            f"{multiple}{ranks}, and it is {wrong}. Use --seq-length {fitting}."
        ) from None


def costs_of_layers(config: Config) -> Costs:
    """Return the FLOPs of F, B and W of all layers, with attention's fraction of each pass."""
    length = config.batch.seq_length or 1
    # A ratio of FLOPs is the same on every rank, for any microbatch and type.
    load = RankLoad(length, length, config.parallel.tensor_model_parallel_size, 1, 4, False)
    layers = range(config.model.layers)
    work = sum((layer_work(layer_config(config.model, layer), load) for layer in layers), Work())
    return Costs(
        work.f,
        work.b,
        work.w,
        attention_f=work.scores_f / (work.f or 1.0),
        attention_b=work.scores_b / (work.b or 1.0),
    )


SLICES = PlanFeature(
    "cuts",
    best=_best,
    chosen=lambda config, plan: chosen(config, len(plan.schedule.cuts) or 1),
)
