"""The plan of a run without starting it: stages, ranks, layers, parameters, predicted time and memory.

Takes the flags of megapipe pretrain. With --search it looks for the best layout, micro batch, recomputation and
schedule on --world-size devices (megapipe/commands/plan/search/); flags that name these are not looked at, but for
--pipeline-slices.
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
from megapipe.commands.plan.parts import parts, parts_table
from megapipe.commands.plan.search.report import best_of, flags_of, report
from megapipe.commands.plan.search.search import search
from megapipe.commands.plan.search.sliced import try_slices
from megapipe.commands.progress import Progress
from megapipe.config import Config, ParallelConfig
from megapipe.config.layers import inline
from megapipe.data.files import file_problems, write_complete
from megapipe.data.tokenizers.tokenizer import build_tokenizer
from megapipe.distributed.device import has_cuda
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse_among
from megapipe.flags.stop import say
from megapipe.plan import GIB, Plan, changes, layout_of_plan, make_plan, own_lines, table
from megapipe.plan.shapes.slices import number_of
from megapipe.schedule import Costs
from megapipe.schedule.costs_file import dump_costs
from megapipe.schedule.text import to_json
from megapipe.training.check import start_block, vocabulary

_RENAMED = "is called --world-size, as in megapipe check and megapipe rehearse"
FORMER = {
    "--gpus": _RENAMED,
    "--processes": _RENAMED,
    "--emulate-ms": "is gone: in a clone tools/bench/schedules.py emulates the file of --save-schedule",
    "--measure": "is gone: megapipe rehearse times the stages of a run, and its --save-costs writes them for --costs",
}
"""Flags of earlier versions, and what to write now."""


@dataclass(frozen=True)
class Flags:
    """The plan of a run without starting it: stages, ranks, layers, parameters, predicted time and memory.

    All other flags are those of megapipe pretrain; --world-size is how many processes the run has, by default tensor x
    context x pipeline ranks.
    """

    parts: bool = False
    """Also what the kinds of parts cost of a microbatch: attention, MLP, experts, both ends."""
    costs: str | None = None
    """A .json of what passes and messages take, as --pipeline-costs of a run."""
    save_costs: str | None = None
    """Write such a file of this plan's stages."""
    save_schedule: str | None = None
    """Write the table, with what is copied and computed again, to this .json, for --pipeline-schedule of a run."""
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
    given = {token.partition("=")[0] for token in argv}
    if problems := [f"{flag} {now}" for flag, now in FORMER.items() if flag in given]:
        raise ConfigError(problems)
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
        table(plan),
        *own_lines(plan),
        layout,
    ]
    if flags.parts:
        text += ["", parts_table(parts(config))]
    tell("\n".join(line for line in text if line), numbers(plan), flags.json)
    if flags.save_costs:
        save_costs(plan.costs, flags.save_costs)
    if flags.save_schedule:
        write_complete(flags.save_schedule, to_json(plan.schedule))
        say(f"the table: {flags.save_schedule}, for --pipeline-schedule of a run and megapipe schedules show")


def _wrong(flags: Flags) -> Iterator[str]:
    """Numbers that mean nothing, and what acts on nothing."""
    if not 0 < flags.memory_gib < math.inf:
        yield f"--memory-gib must be a number above 0, got {flags.memory_gib:g}."
    for name in ("parts", "costs", "save_costs", "save_schedule") if flags.search else ():
        if getattr(flags, name):
            yield f"--{name.replace('_', '-')} is of one plan, and --search compares many. Leave one of the two out."
    if flags.memory_gib != Flags.memory_gib and not flags.search:
        yield f"--memory-gib {flags.memory_gib:g} is of --search. Add that, or leave it out."
    if flags.device and not flags.search:
        yield f"--device {flags.device} is of --search. Add that, or leave it out."


def numbers(plan: Plan) -> dict[str, Any]:
    """Return the numbers of the table and of the step."""
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
    told = {"schedule": plan.schedule.name, "layout": layout, "unit": "FLOP", "step": step}
    return told | {"peak_bytes": list(plan.peak_bytes), "stages": stages}


def _search(config: Config, flags: Flags) -> tuple[str, list[dict[str, Any]]]:
    device = load_device(flags.device) if flags.device else Device()
    slices = config.parallel.pipeline_slices
    asked = [] if slices is None else ask(lambda: number_of(config))
    config = replace(config.with_fields(micro_batch_size=1), parallel=ParallelConfig())
    problems = [*flag_problems(config), *asked]
    if config.batch.global_batch_size is None:
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
        config = config.with_fields(pipeline_costs=flags.costs)
    given = config.check.world_size
    config = replace(config, world_size=given if given and given > 0 else max(1, config.parallel.least_ranks))
    vocab = config.model.padded_vocab(validate(config, has_cuda=has_cuda()).vocab_size)
    config = replace(config, model=replace(inline(config.model), padded_vocab_size=vocab))
    return config, make_plan(config)


def save_costs(costs: Costs, path: str) -> None:
    """Write the costs of a plan's stages, and say what reads them."""
    write_complete(path, dump_costs(costs))
    say(f"costs of the stages: {path}, for --pipeline-costs of a run and --costs of megapipe schedules")
