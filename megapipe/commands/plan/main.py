"""Print the plan of a run without starting it: stages, layers, parameters, time and memory.

The command takes the flags of megapipe pretrain. With --search it looks for the best layout, micro
batch, recomputation and schedule on --world-size devices (megapipe/commands/plan/search/). It then
ignores the flags that name these, except --pipeline-slices.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megapipe.checks.inputs import answer, ask, path_problems
from megapipe.checks.run import flag_problems
from megapipe.checks.vocabulary import vocabulary, vocabulary_problems, with_vocabulary
from megapipe.commands.main import tell
from megapipe.commands.plan.one_change import one_change, one_change_of
from megapipe.commands.plan.parts import parts, parts_table
from megapipe.commands.plan.search.asked import SearchRestrictions, asked_of
from megapipe.commands.plan.search.final import of_run
from megapipe.commands.plan.search.hiding import OVERLAP
from megapipe.commands.plan.search.report import (
    UserPlan,
    best_of,
    flags_of,
    left_out,
    report,
    why,
)
from megapipe.commands.plan.search.search import search
from megapipe.commands.plan.search.sliced import try_slices
from megapipe.commands.plan.search.telling import Telling
from megapipe.commands.plan.verdict import Machine, MemoryFlags, at_other_times
from megapipe.config import CheckConfig, Config, ParallelConfig
from megapipe.config.layers import inline
from megapipe.data.files import file_problems, write_complete
from megapipe.data.tokenizers.tokenizer import build_tokenizer
from megapipe.errors import ConfigError, ScheduleError
from megapipe.flags.parse import parse_among, read_among
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
from megapipe.plan.seconds.page import digest, in_short, page, predicted
from megapipe.plan.seconds.page import numbers as seconds_of
from megapipe.plan.shapes.slices import number_of
from megapipe.schedule import Costs
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
class Flags(MemoryFlags):
    """Print the plan of a run without starting it: stages, layers, parameters, time and memory.

    All other flags are flags of megapipe pretrain. --world-size is the number of processes of the
    run, by default tensor x context x pipeline ranks.
    """

    parts: bool = False
    """Also print each rank's memory by purpose, as megapipe check does, and the cost of each kind
    of part: attention, MLP, experts, embedding and head."""
    costs: str | None = None
    """A .json with times of passes and messages, as --pipeline-costs of a run."""
    save_costs: str | None = None
    """Write the costs of this plan's stages to this .json, for --pipeline-costs of a run."""
    save_schedule: str | None = None
    """Write the table to this .json, for --pipeline-schedule of a run. It has copies and
    recomputations too."""
    search: bool = False
    """Search for the best plans on --world-size devices of --memory-gib, of several kinds, and
    compare the plan of the run's own layout flags with them."""
    fix: tuple[str, ...] = ()
    """With --search: axes that keep the value of the run's own flags, of tp, cp, pp, micro, ep,
    etp, schedule, recompute and sharding."""
    among: tuple[str, ...] = ()
    """With --search: values that an axis may have, such as tp=2,4 pp=1..8 schedule=1f1b,zb-v
    recompute=none sharding=no."""
    without: tuple[str, ...] = ()
    """With --search: schedules to leave out, and sharding, moves (activations offloaded or
    recomputed one by one), pipeline, recompute, or
    hiding (of communication: by pairs of passes, --tp-comm-overlap or --overlap-grad-reduce)."""
    why: tuple[str, ...] = ()
    """With --search: compare two plans of the list by cause, such as 1 3 or 1 yours."""
    search_jobs: int | None = None
    """Processes of --search. Default: the number of cores."""
    json: str | None = None
    """Also write the numbers to this file; - prints them instead of the text."""


def main(argv: Sequence[str]) -> None:
    """Print the plan, and write the files that the flags name."""
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
    problems += [*file_problems(files), *_wrong(flags)]
    if problems:
        others = ask(lambda: _sought(config, flags) if flags.search else _ready(config))
        raise ConfigError([*problems, *tool.without_unread(run.without_unread(others))])
    if flags.search:
        tell(*_search(config, flags, argv), flags.json)
        return
    # These import torch, which takes two seconds: as long as a search until its first plan.
    from megapipe.training.check import start_block

    if flags.costs is not None:
        config = config.with_fields(pipeline_costs=flags.costs)
    config, unknown = _ready(config)
    plan = make_plan(config)
    device = device_of(config) or Device()
    # A user who wants another layout pastes this flag and changes it.
    layout = f"--pipeline-model-parallel-layout '{layout_of_plan(plan)}'"
    verdict = ""
    machine = None
    if flags.memory_gib is not None:
        machine = flags.machine(device, config.world_size)
        verdict = f"a device has {machine}\n{machine.fits(plan, config)}"
    text = [
        # --world-size and --rates are this command's here.
        start_block(replace(config, check=CheckConfig())),
        changes(plan),
        table(plan),
        *own_lines(plan),
        page(plan, config, device),
        verdict,
        *one_change_of(plan, config, device, machine),
        *unknown,
        layout,
    ]
    if flags.parts:
        text += ["", memory_table(plan, config), "", parts_table(parts(config))]
    tell("\n".join(line for line in text if line), numbers(plan, config, device), flags.json)
    # The files come last, so that a full disk does not cost the printed plan.
    if flags.save_costs:
        save_costs(plan.costs, flags.save_costs)
    if flags.save_schedule:
        write_complete(flags.save_schedule, to_json(plan.schedule))
        readers = "--pipeline-schedule of a run and megapipe schedules show"
        say(f"the table: {flags.save_schedule}, for {readers}")


def _ready(config: Config) -> tuple[Config, list[str]]:
    """Check the flags, and fill in the number of processes and the size of the vocabulary.

    With --check-paths no, files of the run need not be on this machine.

    Returns: (the configuration, lines on assumptions, such as an assumed vocabulary size).
    Raises: ConfigError with every problem.
    """
    from megapipe.library.runs import ready, with_processes

    if config.check.check_paths == "yes":
        try:
            return ready(config), []
        except ConfigError as error:
            if not any(path_problems(config)):
                raise
            way_out = "A plan needs none of the run's files: --check-paths no leaves them out."
            raise ConfigError([*error.problems, way_out]) from None
    config = with_processes(config)
    tokenizer, _ = answer(lambda: build_tokenizer(config.data))
    size, said = vocabulary(config, tokenizer)
    problems = [*flag_problems(config), *vocabulary_problems(config, size)]
    if problems:
        raise ConfigError(problems)
    return with_vocabulary(config, size), said


def _wrong(flags: Flags) -> Iterator[str]:
    """Yield a text for each number out of range and each flag without effect."""
    yield from flags.wrong_sizes()
    if flags.search:
        for name in ("parts", "costs", "save_costs", "save_schedule"):
            if getattr(flags, name):
                yield (
                    f"--{name.replace('_', '-')} is of one plan, and --search compares many. "
                    "Leave one of the two out."
                )
        if flags.search_jobs is not None and not 1 <= flags.search_jobs <= 1024:
            yield f"--search-jobs must be from 1 to 1024, got {flags.search_jobs}."
        if flags.why and len(flags.why) != 2:
            given = " ".join(flags.why)
            yield f"--why {given}: give two plans, such as --why 1 yours."
        return
    names = ["fix", "among", "without", "why", "search_jobs"]
    if flags.memory_gib is None:
        names += ["reserved_gib", "host_memory_gib"]
    for name in names:
        value = getattr(flags, name)
        if value != getattr(Flags, name):
            of = "--search"
            if isinstance(value, tuple):
                value = " ".join(value)
            elif isinstance(value, float):
                value = f"{value:g}"
                of = "--memory-gib"
            flag = f"--{name.replace('_', '-')}"
            yield f"{flag} {value} is of {of}. Add that, or leave it out."


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
        "step": {
            "time": timeline.makespan,
            "bubble": bubble,
            "predicted": predicted(plan, config, device),
        },
        "plan": digest(plan, config),
        "peak_bytes": list(plan.peak_bytes),
        **at_other_times(plan, config),
        "stages": stages,
    }


class _Sought(NamedTuple):
    """The question of a search: a run, its devices, and restrictions.

    Attributes:
        config: the run without its layout.
        devices: the number of processes.
        asked: the restrictions of the search.
    """

    config: Config
    devices: int
    asked: SearchRestrictions


def _sought(own: Config, flags: Flags) -> _Sought:
    """Return the question of a search: the model, the number of devices and the restrictions.

    Args:
        own: the configuration of the user's flags for training.
        flags: the flags of the command itself, such as --fix and --without.
    Raises: ConfigError with every problem of the flags.
    """
    problems: list[str] = []
    if own.parallel.pipeline_slices is not None:
        problems += ask(lambda: number_of(own))
    # The search chooses the layout, so the user's is put aside before the checks.
    config = replace(own.with_fields(micro_batch_size=1), parallel=ParallelConfig())
    problems = [*flag_problems(config), *problems]
    if config.batch.global_batch_size is None:
        problems.append(
            "--search needs --global-batch-size, which every plan keeps. "
            "Add --global-batch-size 512."
        )
    devices = config.check.world_size
    if devices is None:
        problems.append("--search needs --world-size, the number of devices. Add --world-size 64.")
    asked, wrong = answer(lambda: asked_of(flags.fix, flags.among, flags.without, own))
    problems += wrong
    if problems or devices is None or asked is None:
        raise ConfigError(problems)
    # A plan with such communication keeps the user's overlap of it.
    overlap = {name: getattr(own.parallel, name) for name in OVERLAP}
    return _Sought(config.with_fields(**overlap), devices, asked)


def _search(own: Config, flags: Flags, argv: Sequence[str]) -> tuple[str, list[dict[str, Any]]]:
    """Search for the best plans.

    Args:
        own: the configuration of the user's flags.
        argv: the command line. The report names its flags that do not go with the found plans.
    Returns: (the report as text, the best plans as JSON).
    Raises: ConfigError with every problem of the flags.
    """
    config, devices, asked = _sought(own, flags)
    device = device_of(config) or Device()
    slices = own.parallel.pipeline_slices
    # Problems of the tokenizer are reported in words, and the search goes on.
    size, said = vocabulary(config, answer(lambda: build_tokenizer(config.data))[0])
    config = config.with_batch(config.global_batch_size)
    config = replace(config, model=inline(config.model))
    machine = flags.machine(device, devices)
    jobs = flags.search_jobs or os.cpu_count() or 1
    # The user's own plan is the first that is known, after seconds.
    yours = _yours(own, devices, size, device, machine)
    telling = Telling()
    if yours.plan is not None:
        telling.first(f"yours: {in_short(seconds_of(yours.plan, device))}")
    found = search(config, devices, machine, device, size, telling, asked=asked, jobs=jobs)
    # Slices are tried for the best layouts alone, as they multiply the tables.
    if slices is not None:
        try_slices(found, slices, machine, device, config.parallel)
    best = best_of(found)
    rows: list[dict[str, Any]] = [
        {
            "step_s": x.step,
            "peak_bytes": x.peak,
            "schedule": x.schedule,
            **at_other_times(x.plan, x.config),
            "parts_s": x.parts,
            "flags": flags_of(x.config),
            "leave_out": _left_out(argv, x.config),
            "plan": digest(x.plan, x.config),
        }
        for x in best
    ]
    assumed = f"{device.assumed}, {device.to_host}"
    text = [f"{devices} devices of {machine}; assumed: {assumed}", *said]
    text.append(report(found, machine, device, yours, lambda one: _left_out(argv, one)))
    if flags.why:
        text.append(why(flags.why, best, yours))
    return "\n".join(text), rows


def _left_out(argv: Sequence[str], config: Config) -> list[str]:
    """Return the flags of `argv`, such as a switch, that a plan's flags after them cannot undo."""
    _, given = parse_among(Flags, [*argv, *flags_of(config)])
    return left_out(given, config)


def _yours(own: Config, devices: int, vocab: int, device: Device, machine: Machine) -> UserPlan:
    """Return the plan of the user's own flags, for comparison.

    The result is empty, `UserPlan()`, if no flag gives a layout such as
    --pipeline-model-parallel-size.

    Args:
        devices: the number of processes.
        vocab: the size of the tokenizer.
        machine: the memory of a device and of a host.
    """
    if own.parallel == ParallelConfig() and own.batch.micro_batch_size is None:
        return UserPlan()
    # Plans of the search have no measured times, and this one is compared with them.
    config = replace(own.with_fields(pipeline_costs=None), world_size=devices)
    try:
        if problems := flag_problems(config):
            raise ConfigError(problems)
        config = with_vocabulary(config.with_batch(config.global_batch_size), vocab)
        mine = of_run(config, device)
        return UserPlan(mine, changes=tuple(one_change(mine, device, machine)))
    except (ConfigError, ScheduleError) as error:
        return UserPlan(refused=" ".join(str(error).split()))


def save_costs(costs: Costs, path: str) -> None:
    """Write the costs of a plan's stages to the .json at `path`, and print which flags read it."""
    write_complete(path, dump_costs(costs))
    readers = "--pipeline-costs of a run and --costs of megapipe schedules"
    say(f"costs of the stages: {path}, for {readers}")
