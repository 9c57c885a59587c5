"""Print the plan of a run without starting it: stages, layers, parameters, time and memory.

The command takes the flags of megapipe pretrain. With --search it looks for the best layout, micro
batch, recomputation and schedule on --world-size devices (megapipe/commands/plan/search/). It then
ignores the flags that name these, except --pipeline-slices, --vocab-parallel-pipeline and flags
that overlap data-parallel communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megapipe.checks.inputs import answer, ask
from megapipe.checks.run import problems_of
from megapipe.checks.vocabulary import vocabulary, vocabulary_problems, with_vocabulary
from megapipe.commands.main import tell
from megapipe.commands.plan.one_change import one_change_of
from megapipe.commands.plan.parts import parts, parts_table
from megapipe.commands.plan.search.listed.asked import joined
from megapipe.commands.plan.search.taken import YOURS
from megapipe.commands.plan.search.why import TAKE
from megapipe.commands.plan.searched import SearchFlags, searched, sought
from megapipe.commands.plan.telling import goes_on, slow
from megapipe.commands.plan.verdict import crossing_line, load_line, other_device
from megapipe.config import CheckConfig, Config
from megapipe.data.files import file_problems, write_complete
from megapipe.errors import ConfigError
from megapipe.flags.parse import read_among, split_among
from megapipe.flags.stop import say
from megapipe.plan import (
    Plan,
    changes,
    layout_of_plan,
    make_plan,
    memory_table,
    own_lines,
    table,
)
from megapipe.plan.seconds.device import Device, device_of
from megapipe.plan.seconds.links import by_rates
from megapipe.plan.seconds.messages import with_messages
from megapipe.plan.seconds.page import digest, page, predicted
from megapipe.plan.seconds.step import in_seconds, of_a_flop
from megapipe.plan.table import host_of
from megapipe.schedule import Costs
from megapipe.schedule.costs import HEAD
from megapipe.schedule.costs_file import dump_costs
from megapipe.schedule.text import to_json

_RENAMED = "is called --world-size, as in megapipe check and megapipe rehearse"
FORMER = {
    "--gpus": _RENAMED,
    "--processes": _RENAMED,
    "--device": "is called --rates now, as in megapipe check",
    "--emulate-ms": "is gone: in a clone tools/bench/schedules.py emulates the file of "
    "--save-schedule",
    "--measure": "is gone: megapipe rehearse times the stages of a run, and its --save-costs "
    "writes a file for --costs",
}
"""Flags of earlier versions, and what to write now."""


@dataclass(frozen=True)
class Flags(SearchFlags):
    """Print the plan of a run without starting it: stages, layers, parameters, time and memory.

    All other flags are flags of megapipe pretrain. --world-size is the number of processes of the
    run, by default tensor x context x pipeline ranks. --rates names the device whose speeds count:
    h100 (default), h200, h800, a100, a100-40, a100-80, b200, rtx4090, l40s, mi300x, or a .json.
    """

    parts: bool = False
    """Also print each rank's memory by purpose, as megapipe check does, and the cost of each kind
    of part: attention, MLP, experts, embedding and head."""
    costs: str | None = None
    """A .json with times of passes and messages, as --pipeline-costs of a run."""
    save_costs: str | None = None
    """Write the costs of this plan's stages to this .json, for --pipeline-costs of a run: seconds
    with --rates, else FLOPs."""
    save_schedule: str | None = None
    """Write the table to this .json, for --pipeline-schedule of a run. It has copies and
    recomputations too."""
    json: str | None = None
    """Also write the numbers to this file; - prints them instead of the text."""


def main(argv: Sequence[str]) -> None:
    """Print the plan, and write the files that the flags name."""
    # A second --among asks for one more axis, and would otherwise replace the first.
    argv = joined(argv, ("--fix", "--among", "--without"))
    tool, run = read_among(Flags, argv)
    flags = tool.value
    config = run.value
    given = {token.partition("=")[0] for token in argv}
    problems = [f"{flag} {now}" for flag, now in FORMER.items() if flag in given]
    # Every other command line calls these flags unknown.
    former = tuple(f"unknown flag {flag}" for flag in FORMER)
    unread = [*tool.problems, *run.problems]
    problems += [line for line in unread if not line.startswith(former)]
    files = {
        "--save-costs": flags.save_costs,
        "--save-schedule": flags.save_schedule,
        "--json": flags.json,
    }
    problems += [*file_problems(files), *_wrong(flags, config)]
    if problems:
        others = ask(lambda: sought(config, flags) if flags.search else _ready(config))
        raise ConfigError([*problems, *tool.without_unread(run.without_unread(others))])
    if flags.search:
        _, of_run = split_among(Flags, argv)
        report, found, wrong = searched(config, flags, of_run)
        tell(report, found, flags.json)
        # After minutes of a search the page must not be lost to a wrong number of a plan.
        if wrong is not None:
            raise wrong
        return
    # These import torch, which takes two seconds: as long as a search until its first plan.
    from megapipe.training.check import start_block

    if flags.costs is not None:
        config = config.with_fields(pipeline_costs=flags.costs)
    config, unknown = _ready(config)
    device = device_of(config) or Device()
    config, link = by_rates(config, device)
    with goes_on(f"making the plan{slow(config)}"):
        plan = make_plan(config)
    # A user who wants another layout pastes this flag and changes it.
    layout = f"--pipeline-model-parallel-layout '{layout_of_plan(plan)}'"
    machine = flags.machine(device, config.world_size)
    verdict = f"a device has {machine}\n{machine.fits(plan, config)}"
    if flags.memory_gib is None and not _known(config).capacity:
        verdict = machine.assumed(plan, config)
    with goes_on("trying changes of one flag"):
        changed = one_change_of(plan, config, device, machine)
    text = [
        # --world-size and --rates are this command's here.
        start_block(replace(config, check=CheckConfig())),
        changes(plan),
        table(plan),
        *own_lines(plan),
        page(plan, config, device),
        *link,
        *other_device(flags.memory_gib, device),
        verdict,
        load_line(plan, config, machine.limit),
        crossing_line(config, device),
        *changed,
        *unknown,
        layout,
    ]
    if flags.parts:
        text += ["", memory_table(plan, config), "", parts_table(parts(config))]
    tell("\n".join(line for line in text if line), numbers(plan, config, device), flags.json)
    # The files come last, so that a full disk does not cost the printed plan.
    if flags.save_costs:
        save_costs(*to_save(plan, config, device), flags.save_costs)
    if flags.save_schedule:
        write_complete(flags.save_schedule, to_json(plan.schedule))
        readers = "--pipeline-schedule of a run and megapipe schedules show"
        say(f"the table: {flags.save_schedule}, for {readers}")


def _ready(config: Config) -> tuple[Config, list[str]]:
    """Check the flags, and fill in the number of processes and the size of the vocabulary.

    A plan needs none of the run's files. Files that are not on this machine are named; with
    --check-paths no nobody looks for them.

    Returns: (the configuration, lines on missing files and on an assumed vocabulary size).
    Raises: ConfigError with every problem.
    """
    from megapipe.distributed.device import has_cuda
    from megapipe.library.runs import with_processes

    config = with_processes(config)
    found = problems_of(config, has_cuda=has_cuda())
    size, said = vocabulary(config, found.tokenizer)
    problems = found.flags
    if found.tokenizer is None:
        problems += vocabulary_problems(config, size)
    if config.check.check_paths == "yes":
        problems += found.machine
        said += [f"missing here, and no plan needs it: {text}" for text in found.files]
    if problems:
        raise ConfigError(problems)
    return with_vocabulary(config, size), said


def _known(config: Config) -> Device:
    """Return the device that --rates names; one without a memory if it names none."""
    if config.check.rates is None:
        return Device()
    # An unreadable file of rates is refused elsewhere.
    return answer(lambda: device_of(config))[0] or Device()


def _wrong(flags: Flags, config: Config) -> Iterator[str]:
    """Yield a text for each number out of range and each flag without effect.

    Args:
        config: the run's flags.
    """
    yield from flags.wrong_sizes(_known(config))
    if flags.search:
        for name in ("parts", "costs", "save_costs", "save_schedule"):
            if getattr(flags, name):
                yield (
                    f"--{name.replace('_', '-')} is of one plan, and --search compares many. "
                    "Leave one of the two out."
                )
        yield from flags.wrong_bounds()
        if flags.why and len(flags.why) != 2:
            given = " ".join(flags.why)
            yield f"--why {given}: give two plans, such as --why 1 yours."
        for word in flags.why:
            if not word.isdecimal() and word not in (YOURS, TAKE):
                yield f"--why {word}: give a number of the list, {YOURS} or {TAKE}."
        return
    for name in ("fix", "among", "without", "why", "search_jobs", "search_seconds"):
        value = getattr(flags, name)
        if value != getattr(Flags, name):
            if isinstance(value, tuple):
                value = " ".join(value)
            elif isinstance(value, float):
                value = f"{value:g}"
            flag = f"--{name.replace('_', '-')}"
            yield f"{flag} {value} is of --search. Add that, or leave it out."


def numbers(plan: Plan, config: Config, device: Device) -> dict[str, Any]:
    """Return the plan as JSON: its stages, the peak of each rank, and the step.

    In "step", `time` is in FLOPs, and `bubble` follows from FLOPs too: messages take no time.
    `predicted` has the seconds of a step on the device, communication included; None with --costs.
    """
    place = plan.schedule.placement
    timeline = plan.timeline
    stages = [
        {
            "rank": rank,
            "layers": list(span.layers),
            "embedding": span.embedding,
            "loss": span.loss,
            "parameters": work.parameters - round(plan.repeated(stage)),
            "forward": work.f,
            "time": work.time,
        }
        for stage, (rank, span, work) in enumerate(
            zip(place.rank_of, plan.spans, plan.works, strict=True)
        )
    ]
    # An empty table takes no time and has no bubble.
    bubble = timeline.bubble / timeline.makespan if timeline.makespan else 0.0
    return {
        "schedule": plan.schedule.name,
        "layout": layout_of_plan(plan),
        "unit": "FLOP",
        "step": {
            "time": timeline.makespan,
            "bubble": bubble,
            "predicted": predicted(plan, config, device),
        },
        "plan": digest(plan, config),
        "peak_bytes": list(plan.peak_bytes),
        "host_bytes": asdict(host_of(plan, config)),
        "stages": stages,
    }


def to_save(plan: Plan, config: Config, device: Device) -> tuple[Costs, str]:
    """Return the costs of a plan's stages, and their unit in words.

    Costs are in seconds with --rates, messages included, and else in FLOPs. They say what of the
    last stage is the head, if that is so.

    Args:
        config: the configuration of the plan.
        device: the device of --rates.
    """
    if plan.given is not None:
        return plan.costs, "in the unit of --costs"
    costs = plan.costs
    unit = "FLOPs"
    of_head = 1.0
    if config.check.rates is not None:
        costs = with_messages(in_seconds(plan, config, device), plan, config, device)
        unit = "seconds, by --rates"
        of_head = of_a_flop(plan, config, device)
    # Elsewhere the head is no part of the last stage.
    if not (plan.pieces.depths or plan.schedule.placement.vocabulary):
        head = plan.pieces.head
        parts = {name: of_head * x for name, x in zip(HEAD, (head.f, head.b, head.w), strict=True)}
        costs = replace(costs, **parts)
    return costs, f"in {unit}"


def save_costs(costs: Costs, unit: str, path: str) -> None:
    """Write the costs of stages to the .json at `path`, and print their unit and readers."""
    write_complete(path, dump_costs(costs))
    readers = "--pipeline-costs of a run and --costs of megapipe schedules"
    say(f"costs of the stages, {unit}: {path}, for {readers}")
