"""Try each layout that fits with microbatches cut into slices along the sequence."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf
from operator import attrgetter

from megapipe.checks.run import flag_problems
from megapipe.commands.plan.search.final import launched, of_run
from megapipe.commands.plan.search.hiding import with_fewest_flags
from megapipe.commands.plan.search.judged.found import SearchResults
from megapipe.commands.plan.search.listed.cells import under
from megapipe.commands.plan.verdict import Machine
from megapipe.config import Config, ParallelConfig
from megapipe.errors import ConfigError, ScheduleError
from megapipe.plan.seconds.device import Device
from megapipe.plan.shapes.slices import AUTO, CHOICES, chosen
from megapipe.schedule.catalogue import PLAIN

MADE_OF = ((PLAIN, None), ("zb-h1", None), ("interleaved-zb", 2))
"""Schedules and their chunks that are cut in addition to the schedule of the layout.

With slices the pipeline fills quickly under any schedule, so memory decides.
"""
CELLS = 4096
"""The largest number of forwards of a table, as slices multiply it."""


def try_slices(
    found: SearchResults,
    asked: str,
    machine: Machine,
    device: Device,
    own: ParallelConfig = ParallelConfig(),  # noqa: B008
) -> None:
    """Try each layout with microbatches cut in slices, and keep the plans that become faster.

    A slice is a part of each sequence. The fastest layouts come first. A layout that does not fit
    without slices is not tried.

    Args:
        found: the result of a search, to which plans are added.
        asked: the value of --pipeline-slices: a number of slices as text, or "auto".
        machine: the memory of a device and of a host.
        own: has the user's own overlap of data-parallel communication.
    """
    counts = CHOICES[1:] if asked == AUTO else (int(asked),)
    limits = found.limits
    for x in sorted(found.sketches.values(), key=attrgetter("step")):
        sharded, pipelined = x.kind
        if sharded or not pipelined:
            continue
        par = x.config.parallel
        mine = (par.pipeline_schedule or PLAIN, par.num_virtual_stages_per_pipeline_rank)
        for count, (name, chunks) in product(counts, dict.fromkeys((mine, *MADE_OF))):
            # Slices can shorten the bubble and nothing else.
            whole = replace(x, moves=False)
            best = found.best.get(found.key(whole, whole.config))
            group = found.group(x.layout, x.schedule)
            limit = min(limits.of(group, x.kind), best.step if best else inf)
            if x.step - x.parts["bubble"] < limit:
                config = chosen(under(x.config, name, chunks), count, always=True)
                _take(found, config, machine, device, own)


def _take(
    found: SearchResults, config: Config, machine: Machine, device: Device, own: ParallelConfig
) -> None:
    par = config.parallel
    chunks = par.num_virtual_stages_per_pipeline_rank or 1
    count = int(par.pipeline_slices or 1)
    if par.pipeline_model_parallel_size * chunks * config.num_microbatches * count > CELLS:
        found.lost["of too many slices to look at"] += 1
        return
    # A run may refuse slices of this model, for example with multi-token prediction.
    if flag_problems(launched(config)):
        found.lost["refused by the checks of a run"] += 1
        return
    try:
        found.take(with_fewest_flags(of_run(config, device), own, device), machine)
    except (ConfigError, ScheduleError):
        found.lost["that cannot be cut so"] += 1
