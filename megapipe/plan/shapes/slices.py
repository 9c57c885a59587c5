"""Slices of a run's sequences: how long each is by the work of its layers, and the table that runs them."""

from __future__ import annotations

from functools import lru_cache
from inspect import signature

from megapipe.config import Config
from megapipe.config.layers import layer_config
from megapipe.errors import ConfigError, ScheduleError
from megapipe.plan.layers import Load, layer_work
from megapipe.plan.part import Part, Planner
from megapipe.plan.plan import Plan
from megapipe.schedule import Costs, Schedule
from megapipe.schedule.patterns import SLICED, Entry
from megapipe.schedule.shapes.slices.cuts import in_tokens, shares

FLAG, AUTO = "--pipeline-slices", "auto"
MOST = 64
"""Slices of a microbatch: what a message's tag can tell apart."""
CHOICES = (1, 2, 4, 8, 16)
"""Numbers of slices among which `auto` chooses."""


def number_of(config: Config) -> int | None:
    """The slices asked for; None without the flag, and where `auto` is to choose.

    Raises: ConfigError if it is no number.
    """
    given = config.parallel.pipeline_slices
    if given is None or given == AUTO:
        return None
    if not given.isdecimal() or len(given) > 9 or not 1 <= int(given) <= MOST:
        raise ConfigError(f"{FLAG} {given} is neither a number from 1 to {MOST} nor auto. Use {FLAG} 4.")
    return int(given)


def chosen(config: Config, count: int, *, always: bool = False) -> Config:
    """Return the configuration with this many slices in the place of `auto`, or always."""
    if config.parallel.pipeline_slices != AUTO and not always:
        return config
    return config.with_fields(pipeline_slices=str(count))


def _best(config: Config, planned: Planner) -> Plan | None:
    """Return the plan in as many slices as take least simulated time, of those that fit.

    Raises: ConfigError or ScheduleError if there is none, as for whole microbatches.
    """
    if config.parallel.pipeline_slices != AUTO:
        return None
    plans = list[Plan]()
    errors = list[ConfigError | ScheduleError]()
    for count in CHOICES:
        try:
            plans.append(planned(chosen(config, count)))
        except (ConfigError, ScheduleError) as error:  # too short, too much memory, or a schedule that has no slices
            errors.append(error)
    if not plans:
        raise errors[0]
    return min(plans, key=lambda plan: plan.timeline.makespan)


def cuts_of(config: Config) -> tuple[int, ...]:
    """Return the lengths of a microbatch's slices in tokens; none where it stays whole.

    Raises: ConfigError if the sequence cannot be cut so.
    """
    count = number_of(config)
    if entry := _of_slices(config):
        usual = signature(entry.generate).parameters["slices"].default or config.parallel.pipeline_model_parallel_size
        return lengths(chosen(config, count or usual, always=True))
    return () if count in (None, 1) else lengths(config)


def own_slices(config: Config) -> tuple[tuple[str, int], ...]:
    """Return the option of a schedule that is one of slices by its name: how many, if that is asked for."""
    count = number_of(config)
    return (("slices", count),) if count and _of_slices(config) else ()


def _of_slices(config: Config) -> Entry | None:
    return SLICED.get((config.parallel.pipeline_schedule or "").lower())


def in_words(schedule: Schedule) -> str:
    """The slices of a table, behind its name; nothing of whole microbatches."""
    if not schedule.cuts:
        return ""
    most, least = max(schedule.cuts), min(schedule.cuts)
    return f" in {len(schedule.cuts)} slices of {most:g}{f' to {least:g}' if most > least else ''} tokens"


@lru_cache(maxsize=32)
def lengths(config: Config) -> tuple[int, ...]:
    """Tokens of each slice. Raises: ConfigError if the sequence cannot be cut so."""
    par, length = config.parallel, config.batch.seq_length or 0
    count, cp = number_of(config) or 1, par.context_parallel_size
    multiple = cp * (2 if cp > 1 else 1) * (par.tensor_model_parallel_size if config.model.sequence_parallel else 1)
    how = "work" if par.cuts_at_documents else par.pipeline_slice_cuts
    try:
        return in_tokens(shares(count, how, costs_of_layers(config)), length, multiple)
    except ScheduleError:
        ranks = " of context and sequence parallelism" if multiple > 1 else ""
        raise ConfigError(
            f"{FLAG} {count} cuts --seq-length {length} in slices, each a multiple of {multiple}{ranks}, and it is "
            f"{'no such multiple' if length % multiple else 'too short'}. Use "
            f"--seq-length {max(-(-length // multiple), count) * multiple}."
        ) from None


def costs_of_layers(config: Config) -> Costs:
    """Work of all layers, with attention's share of each pass."""
    model, par, length = config.model, config.parallel, config.batch.seq_length or 1
    load = Load(length, length, par.tensor_model_parallel_size, 1, 4, False)
    works = [layer_work(layer_config(model, layer), load) for layer in range(model.layers)]
    f, b, w = (sum(getattr(work, name) for work in works) for name in ("f", "b", "w"))
    scores_f, scores_b = (sum(getattr(work, name) for work in works) for name in ("scores_f", "scores_b"))
    return Costs(f, b, w, attention_f=scores_f / f if f else 0.0, attention_b=scores_b / b if b else 0.0)


SLICES = Part("cuts", best=_best, chosen=lambda config, plan: chosen(config, len(plan.schedule.cuts) or 1))
