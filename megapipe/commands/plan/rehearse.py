"""A run before its launch: what each rank needs and what a step takes, from the real program of one rank at a time.

megapipe rehearse --world-size 64 [--ranks 0,3,7] -- <flags of the run>

Each different rank of the pipeline runs alone on one device, in a process of its own: its stages, table and optimizer,
on noise (rehearsed_rank.py). The simulator makes a step of the passes that were timed. Communication is not
measured: --device says how fast links are, and without it they cost nothing. Models and optimizers of your own are
rehearsed (--model-provider, --optimizer of the run); the loss is that of megapipe pretrain, not of a program of yours.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
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
"""Ranks that were rehearsed, by pipeline rank."""


@dataclass(frozen=True)
class Flags:
    """Flags of this tool, before `--`; behind it those of the run.

    Models and optimizers of your own are rehearsed as the run's --model-provider and --optimizer name them; the loss is
    that of megapipe pretrain, whatever your own program computes.
    """

    world_size: int = 1
    """Processes of the run."""
    ranks: str | None = None
    """Ranks to rehearse, by commas. Default: each that differs from the others."""
    steps: int = 3
    """Timed steps; one before them warms up."""
    memory_gib: float | None = None
    """Memory of a device."""
    device: str | None = None
    """The speeds of links: a .json as megapipe plan --search takes it."""
    save_costs: str | None = None
    """Write what the stages take to this .json, for --pipeline-costs of the run."""
    json: str | None = None
    """Write the numbers to this file too; - prints them alone."""


@dataclass(frozen=True)
class Forecast:
    """A forecast of the whole run.

    Attributes:
        costs: of the stages, in seconds.
        passes, step: seconds; a step also has what its slowest rank does beside its passes, and the sum of gradients.
        bubble: mean share of the passes' time in which a rank runs none.
    """

    costs: Costs
    passes: float
    step: float
    bubble: float


def main(argv: Sequence[str]) -> None:
    at = place_of_dashes(argv, "megapipe rehearse --world-size 4 -- --num-layers 8 ...")
    flags = parse(Flags, argv[:at])
    counts = {"--world-size": flags.world_size, "--steps": flags.steps, "--memory-gib": flags.memory_gib}
    wrong = [f"{name} must be above 0, got {n:g}." for name, n in counts.items() if n is not None and not n > 0]
    if wrong := [*wrong, *file_problems({"--save-costs": flags.save_costs, "--json": flags.json})]:
        raise ConfigError(wrong)
    device = load_device(flags.device) if flags.device else NOTHING
    config, plan = prepared(argv[at + 1 :], flags.world_size)
    shown = rehearse(config, plan, _positions(config, flags.ranks), flags.steps)
    told = forecast(config, plan, shown, device)
    text = report(config, plan, shown, told, flags.memory_gib)
    text += f"\ncommunication is not measured: {'it takes no time here' if device == NOTHING else device.links}"
    tell(text, numbers(plan, shown, told), flags.json)
    if flags.save_costs:
        save_costs(told.costs, flags.save_costs)


def prepared(argv: Sequence[str], world_size: int) -> tuple[Config, Plan]:
    """The configuration of a run of so many processes, and its plan. Raises: ConfigError with every problem."""
    config = as_here(parse(Config, argv))
    problems = []
    if (behind := config.check.world_size) not in (None, world_size):
        problems.append(
            f"--world-size {world_size} stands before --, and --world-size {behind} behind it. Leave it out."
        )
    config = replace(config, world_size=max(1, world_size), check=replace(config.check, world_size=world_size))
    if config.parallel.vocab_parallel_pipeline:
        problems.append("--vocab-parallel-pipeline has passes that are not timed one by one. Rehearse without it.")
    if config.parallel.enable_optimizer_post_validation:
        problems.append("--enable-optimizer-post-validation lets steps overlap. Rehearse without it.")
    if (impl := config.model.transformer_impl) != "local":
        problems.append(f"--transformer-impl {impl}: a rehearsal runs layers of plain torch. Use local.")
    config, plan = planned(config, problems)
    return chosen(config, len(plan.schedule.cuts) or 1), plan


def planned(config: Config, problems: Sequence[str] = ()) -> tuple[Config, Plan]:
    """A configuration as its ranks have it, and its plan. Raises: ConfigError with these problems and its own."""
    if problems := [*flag_problems(config), *problems]:
        raise ConfigError(problems)
    vocab = config.model.padded_vocab(vocabulary(config, answer(lambda: build_tokenizer(config.data))[0])[0])
    config = replace(config, model=replace(inline(config.model), padded_vocab_size=vocab))
    config = config.with_batch(config.global_batch_size)
    return config, make_plan(config)


def _pipelines(config: Config) -> list[tuple[int, ...]]:
    """The ranks of each."""
    return Grids.of(config.parallel, config.world_size).sets("pp")


def world_ranks(config: Config) -> list[int]:
    """The ranks of one pipeline."""
    return [*_pipelines(config)[0]]


def _positions(config: Config, ranks: str | None) -> set[int] | None:
    """Places in their pipelines of the ranks that were asked for."""
    if ranks is None:
        return None
    numbers = ranks.split(",")
    if not all(r.isdecimal() and len(r) < 20 and int(r) < config.world_size for r in numbers):
        raise ConfigError(f"--ranks {ranks} must be numbers from 0 to {config.world_size - 1}, by commas.")
    return {line.index(int(r)) for r in numbers for line in _pipelines(config) if int(r) in line}


def alike(config: Config, plan: Plan) -> list[int]:
    """The first rank with the same to do, for each pipeline rank: equal stages, in the same order of passes."""
    place = plan.schedule.placement

    def work(rank: int) -> object:
        own = place.stages_on(rank)
        rows = [[p._replace(stage=own.index(p.stage)) for p in step] for step in plan.schedule.ranks[rank]]
        return [stage_like(config, plan, s) for s in own], rows

    works = [work(rank) for rank in range(place.num_ranks)]
    return [works.index(mine) for mine in works]


def stage_like(config: Config, plan: Plan, stage: int) -> object:
    """All that a stage's time depends on."""
    span = plan.spans[stage]
    return span.embedding, span.loss, span.depth, [layer_config(config.model, layer) for layer in span.layers]


def rehearse(config: Config, plan: Plan, positions: set[int] | None = None, steps: int = 3) -> Shown:
    """Each different pipeline rank, or those given, one after the other, in processes of their own."""
    ranks, same = world_ranks(config), alike(config, plan)
    answers = answers_of(config, plan, ranks)
    context = multiprocessing.get_context("fork")  # of this process, which has no memory on a GPU
    shown: dict[int, Rehearsed] = {}
    for at in sorted({same[r] for r in (range(len(ranks)) if positions is None else positions)}):
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(sender, config, plan, ranks[at], answers, steps), daemon=True)
        child.start()
        sender.close()
        try:
            found = receiver.recv()
        except EOFError:
            raise UserError(f"pipeline rank {at} could not be rehearsed; its error is above") from None
        finally:
            child.join()
        if isinstance(found, str):
            raise UserError(found)
        shown[at] = found
    return {r: shown[same[r]] for r in range(len(ranks)) if same[r] in shown}


def _child(sender, config: Config, plan: Plan, rank: int, answers: Answers, steps: int) -> None:  # type: ignore
    # As many threads as torchrun gives a rank. OpenMP's, if this process's parent had some, are gone after a fork, and
    # the first operation that asks for them waits for ever.
    torch.set_num_threads(int((os.environ.get("OMP_NUM_THREADS") or "1").split(",")[0]))
    try:
        sender.send(rehearse_rank(config, plan, rank, answers, steps))
    except UserError as error:
        sender.send(str(error))


def forecast(config: Config, plan: Plan, shown: Shown, device: Device = NOTHING) -> Forecast:
    """The whole run, from ranks of it. Stages of ranks that were not rehearsed cost what equal ones do, or by FLOPs."""
    place, ranks = plan.schedule.placement, range(plan.schedule.placement.num_ranks)
    count = len(next(iter(shown.values())).steps)
    own = [(shown[r], place.stages_on(r)) if r in shown else None for r in ranks]
    rows = [[x[0].of(x[0].steps[n], x[1]) if x else [] for x in own] for n in range(count)]
    copies = [[x[0].of(x[0].copies[n], x[1]) if x and x[0].copies else [] for x in own] for n in range(count)]
    alone = _filled(config, plan, measured_costs(rows, place, plan.costs, plan.schedule.cuts, copies))
    costs, table = with_messages(alone, plan, config, device), unpaired(plan.schedule)
    before, after = _lengths(alone, table), _lengths(costs, table)

    def replayed(row: list[list[Ran]]) -> Timeline:
        """A step by its own passes: a rank waits for the slower one of two, which medians do not know."""
        beside = {x: after(x) - before(x) for x in (ran.item for ran in chain(*row))}
        return simulate(table, costs, {x.item: x.end - x.begin + costs.overhead + beside[x.item] for x in chain(*row)})

    timeline = sorted(map(replayed, rows), key=lambda x: x.makespan)[count // 2]
    busy = sum(timeline.busy) - costs.overhead * sum(len(row) for row in table.ranks)
    beside = max(x.beside for x in shown.values()) + sums(plan, config, device)
    return Forecast(costs, timeline.makespan, timeline.makespan + beside, 1 - busy / len(ranks) / timeline.makespan)


def _lengths(costs: Costs, table: Schedule) -> Callable[[Pass], float]:
    """The time of a pass."""
    of = {part: costs.of_slice(table.cuts, part).durations(table.placement) for part in (*table.parts, None)}
    return lambda x: of[table.part(x)][x.kind][x.stage]


def _filled(config: Config, plan: Plan, costs: Costs) -> Costs:
    """The costs with the stages that nobody has timed."""
    assert isinstance(costs.f, tuple)
    kinds = [stage_like(config, plan, s) for s in range(len(costs.f))]
    timed = [s for s, f in enumerate(costs.f) if f]
    columns: dict[str, Any] = {}
    for name in ("f", "b", "w"):
        took, flops = getattr(costs, name), getattr(plan.costs, name)
        rate = sum(took[s] for s in timed) / (sum(flops[s] for s in timed) or 1.0)
        like = [next((t for t in timed if kinds[t] == kind), None) for kind in kinds]
        columns[name] = tuple(
            x if s in timed else flops[s] * rate if like[s] is None else took[like[s]] for s, x in enumerate(took)
        )
    return replace(costs, **columns)


def numbers(plan: Plan, shown: Shown, told: Forecast) -> dict[str, Any]:
    """Numbers of the report: ranks that were rehearsed, costs of the stages in seconds, the step."""
    ranks = [{"rank": r, "stages": x.stages, "peak_bytes": x.peak, "bytes": x.parts} for r, x in shown.items()]
    step = {"schedule": plan.schedule.name, "passes_s": told.passes, "step_s": told.step, "bubble": told.bubble}
    return step | {"costs_s": {name: getattr(told.costs, name) for name in ("f", "b", "w")}, "ranks": ranks}


def report(config: Config, plan: Plan, shown: Shown, told: Forecast, memory_gib: float | None) -> str:
    """The report: what each rank needs and takes, and the step."""
    place, costs = plan.schedule.placement, told.costs
    names = [*next(iter(shown.values())).parts]
    rows = [("rank", "stages", "F ms", "B ms", "W ms", "beside ms", *(f"{name} GiB" for name in names), "peak GiB")]
    peaks = []
    for rank in range(place.num_ranks):
        own = place.stages_on(rank)
        at = [place.position(s) for s in own]
        times = [f"{1e3 * sum(getattr(costs, name)[s] for s in at):.4g}" for name in ("f", "b", "w")]
        found = shown.get(rank)
        parts = [f"{x / GIB:.3g}" for x in found.parts.values()] if found else ["by the plan"] + [""] * (len(names) - 1)
        peaks.append(found.peak if found else plan.peak_bytes[rank])
        beside = f"{1e3 * found.beside:.4g}" if found else ""
        rows.append((str(rank), ",".join(map(str, own)), *times, beside, *parts, f"{peaks[-1] / GIB:.4g}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    worst = peaks.index(max(peaks))
    over = memory_gib is not None and peaks[worst] > memory_gib * GIB
    tokens = config.global_batch_size * config.batch.sequence / told.step
    lines += [
        f"pipeline rank {worst} {'runs out of memory first' if over else 'needs most'}: {peaks[worst] / GIB:.4g} GiB"
        + (f" of {memory_gib:g}" if memory_gib else ""),
        f"step {told.step * 1e3:.4g} ms, {told.passes * 1e3:.4g} of it passes; bubble {told.bubble:.1%}; "
        f"{tokens:,.0f} tokens/s on {config.world_size} processes under {plan.schedule.name}{in_words(plan.schedule)}",
    ]
    return "\n".join(lines)
