"""Measure each rank of a run alone on this machine: what memory it needs and how long a step takes.

megapipe rehearse --world-size 64 [--ranks 0,3,7] -- <flags of the run>

Each different rank of a pipeline runs the real program on one device, in a process of its own.
Random tensors take the place of messages (rehearsed_rank.py). The simulator makes a step of the
timed passes. Communication is not measured: --device gives the speeds of links, and without it they
take no time. --model-provider and --optimizer of the run work. The loss is megapipe pretrain's.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any

import torch

from megapipe.checks.inputs import answer
from megapipe.checks.run import flag_problems
from megapipe.commands.main import tell
from megapipe.commands.plan.links import NOTHING, Device, load_device, sums, with_messages
from megapipe.commands.plan.main import save_costs
from megapipe.commands.plan.rehearsed_rank import Answers, Rehearsed, answers_of, rehearse_rank
from megapipe.config import Config
from megapipe.config.layers import inline, layer_config
from megapipe.data.files import file_problems
from megapipe.data.tokenizers.tokenizer import build_tokenizer
from megapipe.distributed.grid import Grids
from megapipe.errors import ConfigError, UserError
from megapipe.flags.parse import parse, place_of_dashes
from megapipe.plan import GIB, Plan, in_words, make_plan
from megapipe.plan.shapes.slices import chosen
from megapipe.schedule import Costs, Pass, Schedule, Timeline, simulate, unpaired
from megapipe.schedule.measured.costs import Ran, measured_costs
from megapipe.training.check import as_here, vocabulary

Shown = Mapping[int, Rehearsed]
"""The ranks that were rehearsed, by pipeline rank."""


@dataclass(frozen=True)
class Flags:
    """Measure each rank of a run alone on this machine. The flags of the run stand after --.

    Models and optimizers of your own are rehearsed, as --model-provider and --optimizer of the run
    name them. The loss is megapipe pretrain's, whatever your own program computes.
    """

    world_size: int = 1
    """Number of processes of the run."""
    ranks: str | None = None
    """Ranks to rehearse, separated by commas. Default: one of each kind of equal ranks."""
    steps: int = 3
    """Number of timed steps. One step before them is not timed."""
    memory_gib: float | None = None
    """Memory of a device; the report says whether the run fits."""
    device: str | None = None
    """A .json with the speeds of links, as megapipe plan --search takes it."""
    save_costs: str | None = None
    """Write the times of the stages to this .json, for --pipeline-costs of the run."""
    json: str | None = None
    """Also write the numbers to this file; - prints them instead of the text."""


@dataclass(frozen=True)
class Forecast:
    """The times of a step of the whole run.

    Attributes:
        costs: the times of the stages, in seconds.
        passes: seconds from the first pass to the last.
        step: seconds of a step: passes, the slowest rank's work outside passes, gradient sums.
        bubble: mean share of `passes` in which a rank runs no pass.
    """

    costs: Costs
    passes: float
    step: float
    bubble: float


def main(argv: Sequence[str]) -> None:
    """Rehearse the ranks, print the report, and write the files that the flags name."""
    at = place_of_dashes(argv, "megapipe rehearse --world-size 4 -- --num-layers 8 ...")
    flags = parse(Flags, argv[:at])
    wrong = []
    for name in ("world_size", "steps", "memory_gib"):
        number = getattr(flags, name)
        if number is not None and not number > 0:
            wrong.append(f"--{name.replace('_', '-')} must be above 0, got {number:g}.")
    wrong += file_problems({"--save-costs": flags.save_costs, "--json": flags.json})
    if wrong:
        raise ConfigError(wrong)
    device = load_device(flags.device) if flags.device else NOTHING
    config, plan = prepared(argv[at + 1 :], flags.world_size)
    shown = rehearse(config, plan, _positions(config, flags.ranks), flags.steps)
    found = forecast(config, plan, shown, device)
    links = "it takes no time here" if device == NOTHING else device.links
    text = report(config, plan, shown, found, flags.memory_gib)
    text += f"\ncommunication is not measured: {links}"
    tell(text, numbers(plan, shown, found), flags.json)
    if flags.save_costs:
        save_costs(found.costs, flags.save_costs)


def prepared(argv: Sequence[str], world_size: int) -> tuple[Config, Plan]:
    """Return the configuration of a run of `world_size` processes, and its plan.

    Raises: ConfigError with every problem.
    """
    config = as_here(parse(Config, argv))
    problems = []
    given = config.check.world_size
    if given is not None and given != world_size:
        problems.append(
            f"--world-size {world_size} stands before --, and --world-size {given} after it. "
            "Leave out the second."
        )
    check = replace(config.check, world_size=world_size)
    config = replace(config, world_size=max(1, world_size), check=check)
    if config.parallel.vocab_parallel_pipeline:
        problems.append(
            "--vocab-parallel-pipeline has passes that are not timed one by one. "
            "Rehearse without it."
        )
    if config.parallel.enable_optimizer_post_validation:
        problems.append(
            "--enable-optimizer-post-validation lets steps overlap. Rehearse without it."
        )
    if (impl := config.model.transformer_impl) != "local":
        problems.append(
            f"--transformer-impl {impl}: a rehearsal runs layers of plain torch. "
            "Give --transformer-impl local."
        )
    config, plan = planned(config, problems)
    return chosen(config, len(plan.schedule.cuts) or 1), plan


def planned(config: Config, problems: Sequence[str] = ()) -> tuple[Config, Plan]:
    """Return the configuration as its ranks complete it, and its plan.

    Args:
        problems: texts to report together with the problems of the flags.
    Raises: ConfigError with all problems.
    """
    if problems := [*flag_problems(config), *problems]:
        raise ConfigError(problems)
    tokenizer, _ = answer(lambda: build_tokenizer(config.data))
    vocab = config.model.padded_vocab(vocabulary(config, tokenizer)[0])
    config = replace(config, model=replace(inline(config.model), padded_vocab_size=vocab))
    config = config.with_batch(config.global_batch_size)
    return config, make_plan(config)


def _pipelines(config: Config) -> list[tuple[int, ...]]:
    """Return the global ranks of each pipeline, in the order of the stages."""
    return Grids.of(config.parallel, config.world_size).sets("pp")


def world_ranks(config: Config) -> list[int]:
    """Return the global ranks of the first pipeline."""
    return [*_pipelines(config)[0]]


def _positions(config: Config, ranks: str | None) -> set[int] | None:
    """Return the pipeline ranks of the global ranks that --ranks lists; None for all."""
    if ranks is None:
        return None
    numbers = ranks.split(",")
    # A number of 20 digits is no rank, and int() refuses one of thousands.
    if not all(r.isdecimal() and len(r) < 20 and int(r) < config.world_size for r in numbers):
        raise ConfigError(
            f"--ranks {ranks} must be numbers from 0 to {config.world_size - 1}, by commas, "
            "such as --ranks 0."
        )
    wanted = {int(r) for r in numbers}
    found = set()
    for pipeline in _pipelines(config):
        found |= {at for at, rank in enumerate(pipeline) if rank in wanted}
    return found


def first_equal(config: Config, plan: Plan) -> list[int]:
    """Return for each pipeline rank the first one that has equal work.

    Such ranks have equal stages and the same order of passes, so that one of them is rehearsed.
    """
    place = plan.schedule.placement

    def work(rank: int) -> object:
        own = place.stages_on(rank)
        rows = []
        for step in plan.schedule.ranks[rank]:
            rows.append([item._replace(stage=own.index(item.stage)) for item in step])
        return [work_of_stage(config, plan, stage) for stage in own], rows

    works = [work(rank) for rank in range(place.num_ranks)]
    return [works.index(mine) for mine in works]


def work_of_stage(config: Config, plan: Plan, stage: int) -> object:
    """Return all that the times of a stage depend on; stages of equal work compare equal."""
    span = plan.spans[stage]
    layers = [layer_config(config.model, layer) for layer in span.layers]
    return span.embedding, span.loss, span.depth, layers


def rehearse(
    config: Config, plan: Plan, positions: set[int] | None = None, steps: int = 3
) -> Shown:
    """Rehearse one pipeline rank after another, each in a process of its own.

    Args:
        positions: the pipeline ranks that are asked for; None for all.
        steps: the number of timed steps.
    Returns: the results, also for the ranks that have equal work.
    Raises: UserError if a rank cannot run.
    """
    ranks = world_ranks(config)
    same = first_equal(config, plan)
    answers = answers_of(config, plan, ranks)
    # A fork has the plan without another start. This process must have no CUDA context, which a
    # fork could not use.
    context = multiprocessing.get_context("fork")
    asked = range(len(ranks)) if positions is None else positions
    shown: dict[int, Rehearsed] = {}
    for at in sorted({same[rank] for rank in asked}):
        receiver, sender = context.Pipe(duplex=False)
        given = (sender, config, plan, ranks[at], answers, steps)
        child = context.Process(target=_child, args=given, daemon=True)
        child.start()
        sender.close()
        try:
            found = receiver.recv()
        except EOFError:
            raise UserError(
                f"pipeline rank {at} could not be rehearsed; its error is above"
            ) from None
        finally:
            child.join()
        if isinstance(found, str):
            raise UserError(found)
        shown[at] = found
    return {r: shown[same[r]] for r in range(len(ranks)) if same[r] in shown}


def _child(
    sender: Connection, config: Config, plan: Plan, rank: int, answers: Answers, steps: int
) -> None:
    # As many threads as torchrun gives a rank. A fork does not have the threads of OpenMP that its
    # parent had, and the first operation that uses them would deadlock.
    torch.set_num_threads(int((os.environ.get("OMP_NUM_THREADS") or "1").split(",")[0]))
    try:
        sender.send(rehearse_rank(config, plan, rank, answers, steps))
    except UserError as error:
        sender.send(str(error))


def forecast(config: Config, plan: Plan, shown: Shown, device: Device = NOTHING) -> Forecast:
    """Return the times of the whole run, given the ranks that were rehearsed.

    A stage of another rank takes the time of an equal stage, or else a time by its FLOPs.
    """
    place = plan.schedule.placement
    count = len(next(iter(shown.values())).steps)
    rows: list[list[list[Ran]]] = []
    copies: list[list[list[Ran]]] = []
    for n in range(count):
        rows.append([[] for _ in range(place.num_ranks)])
        copies.append([[] for _ in range(place.num_ranks)])
        for rank, found in shown.items():
            stages = place.stages_on(rank)
            rows[n][rank] = found.of(found.steps[n], stages)
            if found.copies:
                copies[n][rank] = found.of(found.copies[n], stages)
    timed = measured_costs(rows, place, plan.costs, plan.schedule.cuts, copies)
    alone = _filled(config, plan, timed)
    costs = with_messages(alone, plan, config, device)
    table = unpaired(plan.schedule)
    computed = _durations(alone, table)
    with_communication = _durations(costs, table)

    def replayed(row: list[list[Ran]]) -> Timeline:
        # The passes of a step with their own times: a rank waits for the slower of two passes,
        # which the medians of their times do not show.
        took = {}
        for x in chain(*row):
            communication = with_communication(x.item) - computed(x.item)
            took[x.item] = x.end - x.begin + costs.overhead + communication
        return simulate(table, costs, took)

    timelines = sorted(map(replayed, rows), key=lambda timeline: timeline.makespan)
    timeline = timelines[count // 2]
    passes = timeline.makespan
    busy = sum(timeline.busy) - costs.overhead * sum(len(row) for row in table.ranks)
    outside = max(x.outside for x in shown.values()) + sums(plan, config, device)
    return Forecast(costs, passes, passes + outside, 1 - busy / place.num_ranks / passes)


def _durations(costs: Costs, table: Schedule) -> Callable[[Pass], float]:
    """Return a function from a pass of the table to its seconds."""
    durations = {}
    for part in (*table.parts, None):
        durations[part] = costs.of_slice(table.cuts, part).durations(table.placement)
    return lambda item: durations[table.part(item)][item.kind][item.stage]


def _filled(config: Config, plan: Plan, costs: Costs) -> Costs:
    """Return the costs with times for the stages that no rank has run."""
    assert isinstance(costs.f, tuple)
    works = [work_of_stage(config, plan, stage) for stage in range(len(costs.f))]
    timed = [stage for stage, seconds in enumerate(costs.f) if seconds]
    columns: dict[str, Any] = {}
    for name in ("f", "b", "w"):
        took = list(getattr(costs, name))
        flops = getattr(plan.costs, name)
        rate = sum(took[s] for s in timed) / (sum(flops[s] for s in timed) or 1.0)
        for stage, work in enumerate(works):
            if stage not in timed:
                equal = next((t for t in timed if works[t] == work), None)
                took[stage] = flops[stage] * rate if equal is None else took[equal]
        columns[name] = tuple(took)
    return replace(costs, **columns)


def numbers(plan: Plan, shown: Shown, found: Forecast) -> dict[str, Any]:
    """Return the report as JSON: the step, costs of the stages in seconds, the rehearsed ranks."""
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
