"""Print the plan of a run without starting it: stages, layers, parameters, time and memory.

The command takes the flags of megapipe pretrain. With --search it looks for the best layout, micro
batch, recomputation and schedule on --world-size devices (megapipe/commands/plan/search/). It then
ignores the flags that name these, except --pipeline-slices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megapipe.checks.inputs import answer, ask
from megapipe.checks.run import flag_problems
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
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse_among
from megapipe.flags.stop import say
from megapipe.library.runs import ready
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
    "--emulate-ms": "is gone: in a clone tools/bench/schedules.py emulates the file of "
    "--save-schedule",
    "--measure": "is gone: megapipe rehearse times the stages of a run, and its --save-costs "
    "writes a file for --costs",
}
"""Flags of earlier versions, and what to write now."""


@dataclass(frozen=True)
class Flags:
    """Print the plan of a run without starting it: stages, layers, parameters, time and memory.

    All other flags are flags of megapipe pretrain. --world-size is the number of processes of the
    run, by default tensor x context x pipeline ranks.
    """

    parts: bool = False
    """Also print the cost of each kind of part: attention, MLP, experts, embedding and head."""
    costs: str | None = None
    """A .json with times of passes and messages, as --pipeline-costs of a run."""
    save_costs: str | None = None
    """Write the costs of this plan's stages to this .json, for --pipeline-costs of a run."""
    save_schedule: str | None = None
    """Write the table to this .json, for --pipeline-schedule of a run. It has copies and
    recomputations too."""
    search: bool = False
    """Search for the ten best plans on --world-size devices of --memory-gib."""
    memory_gib: float = 80.0
    """Memory of a device, for --search."""
    device: str | None = None
    """A .json with the speeds of a device and its links, for --search: flops, node, inside,
    outside, latency, overhead (megapipe/commands/plan/links.py)."""
    json: str | None = None
    """Also write the numbers to this file; - prints them instead of the text."""


def main(argv: Sequence[str]) -> None:
    """Print the plan, and write the files that the flags name."""
    # The parser would call these unknown, and not say what to write.
    given = {token.partition("=")[0] for token in argv}
    if problems := [f"{flag} {now}" for flag, now in FORMER.items() if flag in given]:
        raise ConfigError(problems)
    flags, config = parse_among(Flags, argv)
    files = {
        "--save-costs": flags.save_costs,
        "--save-schedule": flags.save_schedule,
        "--json": flags.json,
    }
    if problems := list(file_problems(files)):
        raise ConfigError(problems)
    if flags.search:
        tell(*_search(config, flags), flags.json)
        return
    config, plan = _plan(config, flags)
    # A user who wants another layout pastes this flag and changes it.
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
    # Most plans have no changes, whose text is then empty.
    tell("\n".join(line for line in text if line), numbers(plan), flags.json)
    # The files come last, so that a full disk does not cost the printed plan.
    if flags.save_costs:
        save_costs(plan.costs, flags.save_costs)
    if flags.save_schedule:
        write_complete(flags.save_schedule, to_json(plan.schedule))
        readers = "--pipeline-schedule of a run and megapipe schedules show"
        say(f"the table: {flags.save_schedule}, for {readers}")


def _wrong(flags: Flags) -> Iterator[str]:
    """Yield a text for each number out of range and each flag without effect."""
    if not 0 < flags.memory_gib < math.inf:
        yield f"--memory-gib must be a number above 0, got {flags.memory_gib:g}."
    if flags.search:
        for name in ("parts", "costs", "save_costs", "save_schedule"):
            if getattr(flags, name):
                yield (
                    f"--{name.replace('_', '-')} is of one plan, and --search compares many. "
                    "Leave one of the two out."
                )
        return
    if flags.memory_gib != Flags.memory_gib:
        yield f"--memory-gib {flags.memory_gib:g} is of --search. Add that, or leave it out."
    if flags.device:
        yield f"--device {flags.device} is of --search. Add that, or leave it out."


def numbers(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON: its stages, the peak of each rank in bytes, and the step in FLOP."""
    place = plan.schedule.placement
    timeline = plan.timeline
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
    # An empty table takes no time and has no bubble.
    bubble = timeline.bubble / timeline.makespan if timeline.makespan else 0.0
    return {
        "schedule": plan.schedule.name,
        "layout": layout_of_plan(plan),
        "unit": "FLOP",
        "step": {"time": timeline.makespan, "bubble": bubble},
        "peak_bytes": list(plan.peak_bytes),
        "stages": stages,
    }


def _search(config: Config, flags: Flags) -> tuple[str, list[dict[str, Any]]]:
    """Search for the best plans. Return the report as text, and the best plans as JSON.

    Raises: ConfigError with every problem of the flags.
    """
    device = Device()
    if flags.device:
        device = load_device(flags.device)
    slices = config.parallel.pipeline_slices
    asked: list[str] = []
    if slices is not None:
        asked = ask(lambda: number_of(config))
    # The search chooses the layout, so the user's is put aside before the checks.
    config = replace(config.with_fields(micro_batch_size=1), parallel=ParallelConfig())
    problems = [*flag_problems(config), *asked]
    if config.batch.global_batch_size is None:
        problems.append(
            "--search needs --global-batch-size, which every plan keeps. "
            "Add --global-batch-size 512."
        )
    devices = config.check.world_size
    if devices is None:
        problems.append("--search needs --world-size, the number of devices. Add --world-size 64.")
    problems += _wrong(flags)
    if problems or devices is None:
        raise ConfigError(problems)
    # Problems of the tokenizer are reported in words, and the search goes on.
    size, said = vocabulary(config, answer(lambda: build_tokenizer(config.data))[0])
    config = config.with_batch(config.global_batch_size)
    config = replace(config, model=inline(config.model))
    memory = flags.memory_gib * GIB
    found = search(config, devices, memory, device, size, Progress())
    # Slices are tried for the best layouts alone, as they multiply the tables.
    if slices is not None:
        try_slices(found, slices, memory, device)
    first = f"{devices} devices of {flags.memory_gib:g} GiB, {device.flops / 1e12:g} TFLOP/s"
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
    return "\n".join([f"{first} and {device.links}", *said, report(found, memory)]), best


def _plan(config: Config, flags: Flags) -> tuple[Config, Plan]:
    """Return the configuration with its vocabulary and number of processes, and its plan.

    Raises: ConfigError with every problem of the flags.
    """
    if problems := list(_wrong(flags)):
        raise ConfigError(problems)
    if flags.costs is not None:
        config = config.with_fields(pipeline_costs=flags.costs)
    config = ready(config)
    return config, make_plan(config)


def save_costs(costs: Costs, path: str) -> None:
    """Write the costs of a plan's stages, and print which flags read the file."""
    write_complete(path, dump_costs(costs))
    readers = "--pipeline-costs of a run and --costs of megapipe schedules"
    say(f"costs of the stages: {path}, for {readers}")
