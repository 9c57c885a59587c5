"""Try each layout that fits with microbatches cut into slices along the sequence."""

from __future__ import annotations

from itertools import product

from megapipe.commands.plan.links import Device
from megapipe.commands.plan.search.cells import under
from megapipe.commands.plan.search.search import Search
from megapipe.commands.plan.search.timed import timed
from megapipe.config import Config
from megapipe.errors import ConfigError, ScheduleError
from megapipe.plan import pieces_of, plan_of
from megapipe.plan.shapes.slices import AUTO, CHOICES, chosen
from megapipe.schedule.catalogue import PLAIN

MADE_OF = ((PLAIN, None), ("zb-h1", None), ("interleaved-zb", 2))
"""Schedules and their chunks that are cut in addition to the schedule of the layout.

With slices the pipeline fills quickly under any schedule, so memory decides.
"""
CELLS = 4096
"""The largest number of forwards of a table, as slices multiply it."""


def try_slices(found: Search, asked: str, memory: float, device: Device) -> None:
    """Try each layout with slices, and keep the plans that are faster than without.

    The fastest layouts come first. A layout that does not fit with whole microbatches is left out.

    Args:
        found: the result of a search, which gets the plans.
        memory: bytes of a device.
        asked: the value of --pipeline-slices.
    """
    # The first choice is one slice, a whole microbatch.
    counts: tuple[int, ...] = CHOICES[1:]
    if asked != AUTO:
        counts = (int(asked),)
    for x in found.first:
        # One rank has no bubble to shorten. Tables with sharded weights are not cut.
        if x.layout[2] == 1 or "sharding" in x.plan.own:
            continue
        par = x.config.parallel
        own = (par.pipeline_schedule or PLAIN, par.num_virtual_stages_per_pipeline_rank)
        for count, (name, chunks) in product(counts, dict.fromkeys((own, *MADE_OF))):
            # Slices can shorten the bubble and nothing else.
            if x.step - x.parts["bubble"] < found.limit(x.layout):
                config = chosen(under(x.config, name, chunks), count, always=True)
                _take(found, config, memory, device)


def _take(found: Search, config: Config, memory: float, device: Device) -> None:
    """Simulate a plan in slices and take it, or count why it is out."""
    par = config.parallel
    chunks = par.num_virtual_stages_per_pipeline_rank or 1
    count = int(par.pipeline_slices or 1)
    forwards = par.pipeline_model_parallel_size * chunks * config.num_microbatches * count
    if forwards > CELLS:
        found.lost["of too many slices to look at"] += 1
        return
    try:
        plan = plan_of(config, pieces_of(config, config.model))
        found.take(timed(plan, config, device), memory)
    except (ConfigError, ScheduleError):
        found.lost["that cannot be cut so"] += 1
