"""The plan of a run without starting it: stages, ranks, layers, parameters, predicted time and memory.

Takes the flags of megapipe pretrain. With --measure costs are timed on this machine; a layout found so can be copied
into the flags of the run. With --emulate-ms also runs the split, and the even one beside it, on emulated devices: real
processes and messages, passes that sleep as long as the plan says (megapipe/commands/emulate/device.py).
With --search it looks for the best layout, micro batch, recomputation and schedule on --world-size devices
(megapipe/commands/plan/search/); flags that name these are not looked at, but for --pipeline-slices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megapipe.checks.inputs import answer, ask
from megapipe.checks.run import flag_problems, validate
from megapipe.commands.main import tell
from megapipe.commands.plan.links import Device, load_device
from megapipe.commands.plan.measure import measure
from megapipe.commands.plan.parts import parts, parts_table
from megapipe.commands.plan.search.report import best_of, flags_of, report
from megapipe.commands.plan.search.search import search
from megapipe.commands.plan.search.sliced import try_slices
from megapipe.commands.progress import Progress
from megapipe.config import Config, ModelConfig, ParallelConfig
from megapipe.config.layers import inline
from megapipe.data.files import file_problems, write_complete
from megapipe.data.tokenizers.tokenizer import build_tokenizer
from megapipe.distributed.device import has_cuda, pick_device
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse_among
from megapipe.flags.stop import say
from megapipe.models.provider import gpt_provider
from megapipe.partition.layout import layout_string
from megapipe.partition.spans import nearly_even
from megapipe.plan import GIB, Pieces, Plan, changes, layout_of_plan, make_plan, pieces_of, plan_of, table
from megapipe.plan.slices import number_of
from megapipe.plan.transforms.sharded import whole_line
from megapipe.schedule import Costs
from megapipe.schedule.costs_file import dump_costs
from megapipe.schedule.text import to_json
from megapipe.training.check import start_block, vocabulary


@dataclass(frozen=True)
class Flags:
    """The plan of a run without starting it: stages, ranks, layers, parameters, predicted time and memory.

    All other flags are those of megapipe pretrain; --world-size is how many processes the run has, by default tensor x
    context x pipeline ranks.
    """

    measure: bool = False
    """Time the model's pieces here instead of counting FLOPs."""
    parts: bool = False
    """Also what the kinds of parts cost of a microbatch: attention, MLP, experts, both ends."""
    costs: str | None = None
    """A .json of what passes and messages take, as --pipeline-costs of a run."""
    save_costs: str | None = None
    """Write such a file of this plan's stages."""
    save_schedule: str | None = None
    """Write the table, with what is copied and computed again, to this .json, for --pipeline-schedule of a run."""
    emulate_ms: float | None = None
    """Also run the split, and the even one beside it, on emulated devices: the time that a mean rank computes for one
    microbatch."""
    repeats: int = 5
    """Emulated steps of each split."""
    search: bool = False
    """The ten best plans on --world-size devices of --memory-gib."""
    memory_gib: float = 80.0
    """Memory of a device, of --search."""
    device: str | None = None
    """A .json of a device and its links, of --search: flops, node, inside, outside, latency, overhead
    (megapipe/commands/plan/links.py)."""
    json: str | None = None
    """Write the numbers to this file too; - prints them alone."""


def main(argv: Sequence[str]) -> None:
    """Print the plan."""
    for old in ("--gpus", "--processes"):
        if any(token.partition("=")[0] == old for token in argv):
            raise ConfigError(f"{old} is called --world-size, as in megapipe check and megapipe rehearse")
    flags, config = parse_among(Flags, argv)
    if problems := list(
        file_problems({"--save-costs": flags.save_costs, "--save-schedule": flags.save_schedule, "--json": flags.json})
    ):
        raise ConfigError(problems)
    if flags.search:
        tell(*_search(config, flags), flags.json)
        return
    config, plan = _plan(config, flags)
    layout = f"--pipeline-model-parallel-layout '{layout_of_plan(plan)}'"
    text = [
        start_block(config),
        changes(plan),
        table(plan, seconds=flags.measure),
        whole_line(plan.schedule, plan.costs, plan.sharding, plan.given),
        layout,
    ]
    if flags.parts:
        timed = (lambda model: _cost(config, model, flags)) if flags.measure else None
        text += ["", parts_table(parts(config, timed), seconds=flags.measure)]
    tell("\n".join(line for line in text if line), numbers(plan, seconds=flags.measure), flags.json)
    if flags.save_costs:
        _save(plan.costs, flags.save_costs)
    if flags.save_schedule:
        write_complete(flags.save_schedule, to_json(plan.schedule))
        say(f"the table: {flags.save_schedule}, for --pipeline-schedule of a run and megapipe schedules show")
    if flags.emulate_ms is not None:
        _emulate(plan, flags.emulate_ms, flags.repeats)


def _wrong(flags: Flags) -> Iterator[str]:
    """Numbers that mean nothing, and what acts on nothing."""
    for name in ("emulate_ms", "memory_gib"):
        if (number := getattr(flags, name)) is not None and not 0 < number < math.inf:
            yield f"--{name.replace('_', '-')} must be a number above 0, got {number:g}."
    if flags.repeats < 1:
        yield f"--repeats must be at least 1, got {flags.repeats}."
    for name in ("measure", "parts", "costs", "save_costs", "save_schedule", "emulate_ms") if flags.search else ():
        if getattr(flags, name):
            yield f"--{name.replace('_', '-')} is of one plan, and --search compares many. Leave one of the two out."
    if flags.memory_gib != Flags.memory_gib and not flags.search:
        yield f"--memory-gib {flags.memory_gib:g} is of --search. Add that, or leave it out."
    if flags.repeats != Flags.repeats and flags.emulate_ms is None:
        yield f"--repeats {flags.repeats} is of --emulate-ms. Add that, or leave it out."
    if flags.device and not flags.search:
        yield f"--device {flags.device} is of --search. Add that, or leave it out."


def numbers(plan: Plan, *, seconds: bool) -> dict[str, Any]:
    """Numbers of the table and of the step. Times are seconds if they were measured, else FLOPs."""
    place, timeline = plan.schedule.placement, plan.timeline
    stages = [
        {
            "rank": rank,
            "layers": list(span.layers),
            "embedding": span.embedding,
            "loss": span.loss,
            "parameters": work.parameters,
            "forward": work.f,
            "time": work.time,
        }
        for rank, span, work in zip(place.rank_of, plan.spans, plan.works, strict=True)
    ]
    step = {"time": timeline.makespan, "bubble": timeline.bubble / timeline.makespan if timeline.makespan else 0.0}
    layout = layout_of_plan(plan)
    told = {"schedule": plan.schedule.name, "layout": layout, "unit": "s" if seconds else "FLOP", "step": step}
    return told | {"peak_bytes": list(plan.peak_bytes), "stages": stages}


def _search(config: Config, flags: Flags) -> tuple[str, list[dict[str, Any]]]:
    device = load_device(flags.device) if flags.device else Device()
    slices = config.parallel.pipeline_slices
    asked = [] if slices is None else ask(lambda: number_of(config))
    config = replace(config, parallel=ParallelConfig(), train=replace(config.train, micro_batch_size=1))
    problems = [*flag_problems(config), *asked]
    if config.train.global_batch_size is None:
        problems.append("--search needs --global-batch-size, which every plan must keep. Give it.")
    if (devices := config.check.world_size) is None:
        problems.append("--search needs --world-size, the number of devices. Give it.")
    if (problems := [*problems, *_wrong(flags)]) or devices is None:
        raise ConfigError(problems)
    size, said = vocabulary(config, answer(lambda: build_tokenizer(config.data))[0])
    config = config.with_batch(config.global_batch_size)
    memory = flags.memory_gib * GIB
    found = search(replace(config, model=inline(config.model)), devices, memory, device, size, Progress())
    if slices is not None:
        try_slices(found, slices, memory, device)
    told = f"{devices} devices of {flags.memory_gib:g} GiB, {device.flops / 1e12:g} TFLOP/s and {device.links}"
    best = [
        {
            "step_s": x.step,
            "peak_bytes": x.peak,
            "schedule": x.schedule,
            "parts_s": x.parts,
            "flags": flags_of(x.config),
        }
        for x in best_of(found)
    ]
    return "\n".join([told, *said, report(found, memory)]), best


def _plan(config: Config, flags: Flags) -> tuple[Config, Plan]:
    """The plan, and the configuration with its vocabulary and ranks."""
    if problems := list(_wrong(flags)):
        raise ConfigError(problems)
    if flags.costs is not None:
        config = replace(config, parallel=replace(config.parallel, pipeline_costs=flags.costs))
    if flags.measure and config.parallel.pipeline_costs is not None:
        raise ConfigError("--measure times the stages that --costs gives. Leave one out.")
    par, given = config.parallel, config.check.world_size
    pipeline = par.pipeline_model_parallel_size
    config = replace(config, world_size=given if given and given > 0 else max(1, par.least_ranks))
    vocab = config.model.padded_vocab(validate(config, has_cuda=has_cuda()).vocab_size)
    config = replace(config, model=replace(inline(config.model), padded_vocab_size=vocab))
    if not flags.measure:
        return config, make_plan(config)
    return config, plan_of(config, _cost(config, config.model, flags).on(pipeline))


def _cost(config: Config, model: ModelConfig, flags: Flags) -> Pieces:
    """The pieces of a model of this run, counted or timed."""
    counted = pieces_of(config, model)
    if not flags.measure:
        return counted
    return measure(replace(config, model=model), counted, gpt_provider, pick_device(config.parallel))


def _save(costs: Costs, path: str) -> None:
    write_complete(path, dump_costs(costs))
    say(f"costs of the stages: {path}, for --pipeline-costs of a run and --costs of megapipe schedules")


def _emulate(plan: Plan, ms: float, repeats: int) -> None:
    from megapipe.commands.emulate import main as bench
    from megapipe.commands.emulate.pool import Job, Turns, run_pool

    place = plan.schedule.placement
    total = sum(work.time for work in plan.works)
    unit = ms / 1e3 * place.num_ranks / total
    job = Job("megapipe", plan.schedule)
    settings = Turns(place.num_ranks, message_kib=64, repeats=repeats)
    print(f"emulated on {place.num_ranks} processes, {ms:g} ms per mean rank and microbatch:")
    steps = []
    for counts in (nearly_even(len(plan.pieces.layers), place.chain), plan.counts):
        costs = scaled(plan.pieces.costs(counts), unit)
        (measured,) = run_pool([job], costs, settings)
        row = bench._row(job, costs, measured)
        steps.append(row.step_ms)
        print(
            f"  step {row.step_ms:7.0f} ms  predicted {row.predicted_ms:7.0f}  measured/predicted {row.ratio:.3f}  "
            f"of the even split {row.step_ms / steps[0]:.3f}  {layout_string(counts)}"
        )


def scaled(costs: Costs, unit: float) -> Costs:
    """The times of passes, of each stage, in another unit."""

    def column(times: float | tuple[float, ...]) -> float | tuple[float, ...]:
        return tuple(x * unit for x in times) if isinstance(times, tuple) else times * unit

    return Costs(column(costs.f), column(costs.b), column(costs.w))
