"""Slices of a sequence in a search for plans: each layout that fits once more, in so many slices as flags ask for."""

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

MADE_OF = (PLAIN, None), ("zb-h1", None), ("interleaved-zb", 2)
"""Schedules, and their chunks, that are cut beside a layout's own: ramps of slices are short, memory is the choice."""
CELLS = 4096
"""Forwards of a table at most: their number, that of ranks and of slices grow together."""


def try_slices(found: Search, asked: str, memory: float, device: Device) -> None:
    """Take the plans in slices that are faster than the layouts' own, from the fastest of these on.

    asked: as --pipeline-slices. A layout that fits in no table of whole microbatches is not looked at.
    """
    counts = CHOICES[1:] if asked == AUTO else (int(asked),)
    for x in found.first:
        own = x.config.parallel.pipeline_schedule or PLAIN, x.config.parallel.num_virtual_stages_per_pipeline_rank
        for count, (name, chunks) in product(counts, dict.fromkeys((own, *MADE_OF))):
            # Slices shorten what ranks wait for alone.
            if x.layout[2] > 1 and "sharding" not in x.plan.own and x.step - x.parts["bubble"] < found.limit(x.layout):
                _take(found, chosen(under(x.config, name, chunks), count, always=True), memory, device)


def _take(found: Search, config: Config, memory: float, device: Device) -> None:
    par = config.parallel
    chunks, count = par.num_virtual_stages_per_pipeline_rank or 1, int(par.pipeline_slices or 1)
    if par.pipeline_model_parallel_size * chunks * config.num_microbatches * count > CELLS:
        found.lost["of too many slices to look at"] += 1
        return
    try:
        found.take(timed(plan_of(config, pieces_of(config, config.model)), config, device), memory)
    except (ConfigError, ScheduleError):
        found.lost["that cannot be cut so"] += 1
