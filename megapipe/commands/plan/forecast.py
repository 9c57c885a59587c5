"""Predict a step of the whole run from the ranks that were rehearsed, and report it.

The simulator replays the timed passes of each step in the run's table. Messages and collectives get
times from the speeds of links (megapipe/plan/seconds/).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from megapipe.commands.plan.rehearsed_rank import Rehearsed
from megapipe.config import Config
from megapipe.config.layers import layer_config
from megapipe.plan import GIB, Plan, in_words
from megapipe.plan.seconds.device import NOTHING, Device
from megapipe.plan.seconds.messages import with_messages
from megapipe.plan.seconds.replicas import exposed
from megapipe.schedule import Costs, Pass, Schedule, Timeline, simulate, unpaired
from megapipe.schedule.measured.costs import MeasuredPass, measured_costs
from megapipe.schedule.simulate import run_clock

Shown = Mapping[int, Rehearsed]
"""The ranks that were rehearsed, by pipeline rank."""


@dataclass(frozen=True)
class Forecast:
    """The predicted times of a step of the whole run.

    Attributes:
        costs: the times of each stage's passes, in seconds.
        passes: seconds from the start of the first pass to the end of the last.
        step: seconds of a step: `passes`, plus the optimizer's work on the slowest rank, plus the
            reduction of gradients over data parallelism.
        bubble: mean fraction of `passes` in which a rank runs no pass.
    """

    costs: Costs
    passes: float
    step: float
    bubble: float


def work_of_stage(config: Config, plan: Plan, stage: int) -> object:
    """Return a value that is equal for two stages if their passes take the same time.

    The value has the settings of each layer, and whether the stage has the embedding, the loss, or
    a module of multi-token prediction.
    """
    span = plan.spans[stage]
    layers = [layer_config(config.model, layer) for layer in span.layers]
    return span.embedding, span.loss, span.depth, layers


def forecast(config: Config, plan: Plan, shown: Shown, device: Device = NOTHING) -> Forecast:
    """Predict the times of the whole run from the rehearsed ranks: each ran alone on this machine.

    A stage of a rank that was not rehearsed takes the time of an equal stage, or else a time by its
    FLOPs.

    Args:
        shown: the measurements of the rehearsed ranks, by pipeline rank. All have timed the same
            number of steps.
        device: the speeds of links. By default communication takes no time.
    """
    place = plan.schedule.placement
    count = len(next(iter(shown.values())).steps)
    # [step][rank], with an empty row for a rank that was not rehearsed.
    rows: list[list[list[MeasuredPass]]] = []
    copies: list[list[list[MeasuredPass]]] = []
    for n in range(count):
        rows.append([[] for _ in range(place.num_ranks)])
        copies.append([[] for _ in range(place.num_ranks)])
        for rank, found in shown.items():
            stages = place.stages_on(rank)
            rows[n][rank] = found.of(found.steps[n], stages)
            if found.copies:
                copies[n][rank] = found.of(found.copies[n], stages)
    # Costs are medians over the steps. First without communication, then with it.
    timed = measured_costs(rows, place, plan.costs, plan.schedule.cuts, copies)
    alone = _filled(config, plan, timed)
    costs = with_messages(alone, plan, config, device)
    table = unpaired(plan.schedule)
    computed = _durations(alone, table)
    with_communication = _durations(costs, table)

    def replayed(row: list[list[MeasuredPass]]) -> Timeline:
        # The passes of a step with their own times: a rank waits for the slower of two passes,
        # which the medians of their times do not show.
        took = {}
        for x in chain(*row):
            communication = with_communication(x.item) - computed(x.item)
            took[x.item] = x.end - x.begin + costs.overhead + communication
        return simulate(table, costs, took)

    # The step of median length stands for the run.
    timelines = sorted(map(replayed, rows), key=lambda timeline: timeline.makespan)
    timeline = timelines[count // 2]
    passes = timeline.makespan
    # The overhead of a pass is no work, so it counts as bubble.
    busy = sum(timeline.busy) - costs.overhead * sum(len(row) for row in table.ranks)
    # All ranks wait for the slowest one before the next step.
    outside = max(x.outside for x in shown.values())
    outside += exposed(plan, config, device, table, run_clock(table, costs))
    return Forecast(costs, passes, passes + outside, 1 - busy / place.num_ranks / passes)


def _durations(costs: Costs, table: Schedule) -> Callable[[Pass], float]:
    """Return a function from a pass of the table to its seconds."""
    # None is the part of a pass of whole microbatches, or of a whole stage.
    durations = {}
    for part in (*table.parts, None):
        durations[part] = costs.of_slice(table.cuts, part).durations(table.placement)
    return lambda item: durations[table.part(item)][item.kind][item.stage]


def _filled(config: Config, plan: Plan, costs: Costs) -> Costs:
    """Return the costs with times for the stages that no rank has run.

    Such a stage takes the time of an equal stage, or else a time by its FLOPs.
    """
    assert isinstance(costs.f, tuple)
    works = [work_of_stage(config, plan, stage) for stage in range(len(costs.f))]
    timed = [stage for stage, seconds in enumerate(costs.f) if seconds]
    columns: dict[str, Any] = {}
    for name in ("f", "b", "w"):
        took = list(getattr(costs, name))
        flops = getattr(plan.costs, name)
        # Seconds for each FLOP of this kind of pass, over the stages that have run.
        rate = sum(took[s] for s in timed) / (sum(flops[s] for s in timed) or 1.0)
        for stage, work in enumerate(works):
            if stage not in timed:
                equal = next((t for t in timed if works[t] == work), None)
                if equal is None:
                    took[stage] = flops[stage] * rate
                else:
                    took[stage] = took[equal]
        columns[name] = tuple(took)
    return replace(costs, **columns)


def numbers(plan: Plan, shown: Shown, found: Forecast) -> dict[str, Any]:
    """Return the report as JSON: the step, costs of the stages in seconds, the rehearsed ranks.

    Args:
        shown: the measurements of the rehearsed ranks, by pipeline rank.
        found: the times of the whole run.
    """
    return {
        "schedule": plan.schedule.name,
        "passes_s": found.passes,
        "step_s": found.step,
        "bubble": found.bubble,
        "costs_s": {name: getattr(found.costs, name) for name in ("f", "b", "w")},
        "ranks": [
            {"rank": rank, "stages": x.stages, "peak_bytes": x.peak, "bytes": x.parts}
            for rank, x in shown.items()
        ],
    }


def report(
    config: Config, plan: Plan, shown: Shown, found: Forecast, memory_gib: float | None
) -> str:
    """Return the report: memory and times of each rank, the largest peak, the step.

    Args:
        shown: the measurements of the rehearsed ranks, by pipeline rank.
        found: the times of the whole run.
        memory_gib: memory of a device, or None if it is not known.
    """
    place = plan.schedule.placement
    names = [*next(iter(shown.values())).parts]
    header = ["rank", "stages", "F ms", "B ms", "W ms", "outside ms"]
    rows = [[*header, *(f"{name} GiB" for name in names), "peak GiB"]]
    peaks = []
    for rank in range(place.num_ranks):
        stages = place.stages_on(rank)
        at = [place.position(stage) for stage in stages]
        # Times and memory stand in one line for each rank.
        row = [str(rank), ",".join(map(str, stages))]
        for name in ("f", "b", "w"):
            row.append(f"{1e3 * sum(getattr(found.costs, name)[s] for s in at):.4g}")
        if one := shown.get(rank):
            peaks.append(one.peak)
            row.append(f"{1e3 * one.outside:.4g}")
            row += [f"{size / GIB:.3g}" for size in one.parts.values()]
        else:
            # Only the peak of this rank is known, from the plan.
            peaks.append(plan.peak_bytes[rank])
            row += ["", "by the plan", *[""] * (len(names) - 1)]
        rows.append([*row, f"{peaks[-1] / GIB:.4g}"])
    # Cells are aligned at the right of their columns.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        lines.append("  ".join(map(str.rjust, row, widths)))
    most = max(peaks)
    needs = "needs most"
    if memory_gib is not None and most > memory_gib * GIB:
        needs = "runs out of memory first"
    last = f"pipeline rank {peaks.index(most)} {needs}: {most / GIB:.4g} GiB"
    if memory_gib:
        last += f" of {memory_gib:g}"
    tokens = config.global_batch_size * config.batch.sequence / found.step
    step = f"step {found.step * 1e3:.4g} ms, {found.passes * 1e3:.4g} of it passes"
    step += f"; bubble {found.bubble:.1%}; {tokens:,.0f} tokens/s on {config.world_size} processes"
    step += f" under {plan.schedule.name}{in_words(plan.schedule)}"
    return "\n".join([*lines, last, step])
