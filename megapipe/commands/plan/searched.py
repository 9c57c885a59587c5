"""Search for the best plans, as `megapipe plan --search` does, and describe the plans."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from typing import Any, NamedTuple

from megapipe.checks.inputs import answer, ask
from megapipe.checks.numbers import near
from megapipe.checks.run import flag_problems
from megapipe.checks.vocabulary import vocabulary, with_vocabulary
from megapipe.commands.plan.one_change import change_lines, one_change, surest
from megapipe.commands.plan.pasted import flags_of, pasted, undone
from megapipe.commands.plan.search.final import of_run
from megapipe.commands.plan.search.hiding import HIDING, OVERLAP, hides_unmeasured, overlapped
from megapipe.commands.plan.search.judged.found import SearchResults
from megapipe.commands.plan.search.judged.judging import Tell
from megapipe.commands.plan.search.like_yours import like_yours, narrowed
from megapipe.commands.plan.search.listed.asked import SearchRestrictions, asked_of
from megapipe.commands.plan.search.listed.cells import WITHOUT_BARRIER
from megapipe.commands.plan.search.listing import best_of
from megapipe.commands.plan.search.report import UserPlan, report, summary
from megapipe.commands.plan.search.search import search
from megapipe.commands.plan.search.sliced import try_slices
from megapipe.commands.plan.search.taken import names_layout, to_take
from megapipe.commands.plan.search.why import why
from megapipe.commands.plan.telling import Telling, ends_within, goes_on, slow
from megapipe.commands.plan.verdict import NO_HOST, Machine, MemoryFlags, other_device
from megapipe.config import Config, ParallelConfig
from megapipe.config.layers import inline
from megapipe.data.tokenizers.tokenizer import build_tokenizer
from megapipe.errors import ConfigError, ScheduleError
from megapipe.flags.unset import unset
from megapipe.plan import GIB
from megapipe.plan.seconds.device import Device, device_of
from megapipe.plan.seconds.links import by_rates
from megapipe.plan.seconds.page import digest, in_short
from megapipe.plan.seconds.page import numbers as seconds_of
from megapipe.plan.seconds.step import TimedPlan
from megapipe.plan.shapes.slices import number_of
from megapipe.plan.table import host_of


@dataclass(frozen=True)
class SearchFlags(MemoryFlags):
    """The flags of `megapipe plan` on its search. `wrong_bounds` says which numbers cannot be."""

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
    recomputed one by one), pipeline, recompute, vocabulary (--vocab-parallel-pipeline), or
    hiding (of communication: by pairs of passes, so without dualpipe and dualpipe-v too, by
    --tp-comm-overlap or by --overlap-grad-reduce)."""
    why: tuple[str, ...] = ()
    """With --search: compare two plans of the list by cause, such as 1 3, 1 yours or take yours,
    where take is the plan to take."""
    search_jobs: int | None = None
    """Processes of --search. Default: the number of cores."""
    search_seconds: float = 600.0
    """The most seconds of a search, approximately. It ends with the best plans until then."""

    def wrong_bounds(self) -> Iterator[str]:
        """Yield a text for each number out of range."""
        if self.search_jobs is not None and not 1 <= self.search_jobs <= 1024:
            yield f"--search-jobs must be from 1 to 1024, got {self.search_jobs}."
        if not 1 <= self.search_seconds <= 1e7:
            yield f"--search-seconds must be from 1 to 1e7, got {self.search_seconds:g}."


class Sought(NamedTuple):
    """The question of a search: a run, its devices, and restrictions.

    Attributes:
        config: the run without its layout.
        devices: the number of processes.
        asked: the restrictions of the search.
    """

    config: Config
    devices: int
    asked: SearchRestrictions


@dataclass(frozen=True)
class Searching:
    """Searches of one model on one kind of devices, which end at one time.

    `plans` runs a search, and `like_yours` one among plans with the user's own pp and schedule.

    Attributes:
        config: the run without its layout.
        devices: the number of processes.
        vocab: the size of the tokenizer.
        jobs: processes that judge plans.
        ends: the time at which all searches end, by the monotonic clock.
    """

    config: Config
    devices: int
    device: Device
    vocab: int
    jobs: int
    ends: float

    @property
    def left(self) -> float:
        """Return the seconds that are left."""
        return self.ends - time.monotonic()

    def plans(
        self, machine: Machine, asked: SearchRestrictions, tell: Tell = lambda *_: None
    ) -> SearchResults:
        """Return what a search of at least a second finds.

        Args:
            machine: the memory of a device and of a host.
            asked: the restrictions of the search.
            tell: called with the progress of the search.
        """
        return search(
            self.config,
            self.devices,
            machine,
            self.device,
            self.vocab,
            tell,
            asked=asked,
            jobs=self.jobs,
            seconds=max(1, self.left),
        )

    def like_yours(
        self, own: Config, yours: TimedPlan | None, machine: Machine, asked: SearchRestrictions
    ) -> TimedPlan | None:
        """Return the plan to take of those with the user's own pp and schedule.

        Args:
            own: the configuration of the user's own flags.
            yours: the plan of these flags; None if there is none.
            machine: the memory of a device and of a host.
            asked: the user's restrictions of the search.
        Returns: None if no such plan may be had, or if no time is left.
        """
        narrow = narrowed(asked, own, hides=yours is not None and hides_unmeasured(yours))
        if narrow is None or self.left < 1:
            return None
        config = self.config
        # Data-parallel messages are hidden as in all plans of the first search.
        if HIDING not in asked.without:
            config = overlapped(config)
        # An interrupt ends this search alone: the plans of the first one are there.
        with goes_on("searching again, with your own pp and schedule"), suppress(KeyboardInterrupt):
            again = replace(self, config=config).plans(machine, narrow)
            return like_yours(again, own, yours, machine, self.device)
        return None


def sought(own: Config, flags: SearchFlags) -> Sought:
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
    # A plan with such communication keeps the user's overlap of it; a pipeline, its vocabulary.
    kept: tuple[str, ...] = (*OVERLAP, "vocab_parallel_pipeline")
    late = {name: getattr(own.parallel, name) for name in WITHOUT_BARRIER}
    # Flags of the model or of training may exclude it, such as --mtp-num-layers.
    if not flag_problems(config.with_fields(**late)):
        kept += WITHOUT_BARRIER
    config = config.with_fields(**{name: getattr(own.parallel, name) for name in kept})
    return Sought(config, devices, asked)


def searched(
    own: Config, flags: SearchFlags, argv: Sequence[str]
) -> tuple[str, dict[str, Any], ConfigError | None]:
    """Search for the best plans.

    Args:
        own: the configuration of the user's flags.
        argv: the run's flags on the command line. The flags of a found plan take back the ones
            that do not go with it.
    Returns: (the report as text, the numbers as JSON: "plans" has the best ones and "why" each is
        listed, "yours" the user's own plan or None, with "one_change", and "take" the plan to take:
        its number from 1 in "plans", "yours", or None without plans; an error about --why, which no
        list can answer).
    Raises: ConfigError with every problem of the flags.
    """
    config, devices, asked = sought(own, flags)
    device = device_of(config) or Device()
    slices = own.parallel.pipeline_slices
    machine = flags.machine(device, devices)
    # Problems of the tokenizer are reported in words, and the search goes on.
    size, said = vocabulary(config, answer(lambda: build_tokenizer(config.data))[0])
    config = config.with_batch(config.global_batch_size)
    said += _uneven(config, devices, asked)
    said += _unlimited(own, machine)
    config = replace(config, model=inline(config.model))
    jobs = flags.search_jobs or os.cpu_count() or 1
    # The user's own plan is the first that is known, after seconds.
    with goes_on(f"making your own plan{slow(own)}"):
        yours = _yours(own, devices, size, device, machine, asked)
    telling = Telling()
    ends = time.monotonic() + flags.search_seconds
    if yours.plan is not None:
        telling.first(f"yours: {in_short(seconds_of(yours.plan, device))}")
    searching = Searching(config, devices, device, size, jobs, ends)
    found = searching.plans(machine, asked, telling)
    # Slices are tried for the best layouts alone, as they multiply the tables.
    if slices is not None:
        try:
            with ends_within(searching.left):
                try_slices(found, slices, machine, device, config.parallel)
        except KeyboardInterrupt as ended:
            found.stop(str(ended))
    if found.best:
        found.changed = yours.changed
    # Where nothing fits, no plan with the user's own pp does.
    if found.best and not (found.stopped or found.by_schedule):
        found.like_yours = searching.like_yours(own, yours.plan, machine, asked)
    listed = best_of(found)
    best = [x.plan for x in listed]
    lacking = ""
    if not best and not found.stopped and found.lost[NO_HOST]:
        wide = replace(machine, host=inf)
        with goes_on("searching again, for a host with room"):
            others = best_of(searching.plans(wide, asked))
        lacking = _lacks_host([x.plan for x in others], machine, device, argv)
    assumed = f"{device.assumed}, {device.to_host}"
    text = [f"{devices} devices of {machine}; assumed: {assumed}"]
    text += [*other_device(flags.memory_gib, device), *yours.linked, *said]
    text.append(report(found, listed, machine, device, yours, partial(undone, argv), lacking))
    rows = [_row(x.plan, undone(argv, x.plan.config)) | {"why": x.why} for x in listed]
    numbers: dict[str, Any] = {"plans": rows, "yours": None, "take": None}
    if yours.plan is not None:
        numbers["yours"] = _row(yours.plan) | {"one_change": yours.changes}
    advice = None
    if best:
        advice = to_take(best, own, yours.plan, machine)
        numbers["take"] = advice.number
    wrong = None
    if flags.why:
        table, problems = answer(lambda: why(flags.why, best, yours, advice))
        text.append(table or "")
        wrong = ConfigError(problems) if problems else None
    # A terminal shows the end of a long page.
    if advice is not None:
        text += advice.lines(machine, device)
    return "\n".join(text), numbers, wrong


def _uneven(config: Config, devices: int, asked: SearchRestrictions) -> list[str]:
    """Return a line if the batch has no equal share for each device, which excludes layouts.

    Args:
        asked: the user's restrictions. Layouts that they exclude anyway do not count.
    """
    batch = config.global_batch_size
    # The most data-parallel ranks that a layout may have, and the least microbatch of each.
    most = devices
    for axis in ("tp", "cp", "pp"):
        most //= min(asked.numbers(axis), default=1)
    share = most * min(asked.numbers("micro"), default=1)
    if share < 1 or batch % share == 0 or batch < share:
        return []
    return [
        f"--global-batch-size {batch} is no multiple of {share}, so layouts with {most} "
        f"data-parallel ranks are left out: {near(batch, share)} has them too"
    ]


def _unlimited(own: Config, machine: Machine) -> list[str]:
    """Return a line if the user's own limit on memory is less than plans of the search may take."""
    limit = own.parallel.memory_limit_gib
    if limit is None or limit * GIB >= machine.limit:
        return []
    return [
        f"--memory-limit-gib {limit:g} limits your own plan alone: --reserved-gib "
        f"{machine.device / GIB - limit:.4g} limits all others to as much"
    ]


def _row(x: TimedPlan, taken_back: Sequence[str] = ()) -> dict[str, Any]:
    """Return the numbers of a plan as JSON.

    Args:
        taken_back: the user's flags that the plan cannot have.
    """
    return {
        "step_s": x.step,
        "peak_bytes": x.peak,
        "schedule": x.schedule,
        "host_bytes": asdict(host_of(x.plan, x.config)),
        "parts_s": x.parts,
        "flags": [*unset(taken_back), *flags_of(x.config)],
        "leave_out": [*taken_back],
        "plan": digest(x.plan, x.config),
    }


def _lacks_host(
    best: list[TimedPlan], machine: Machine, device: Device, argv: Sequence[str]
) -> str:
    """Return lines on the plans that fit the devices, and for which the host alone is short.

    They are the fastest plan, and the fastest one that a host has room for with --no-save-optim.
    The text is "" if no plan fits the devices.

    Args:
        best: plans that fit the devices, whatever they need of a host, fastest first.
        machine: the memory of a device and of a host.
        argv: the run's flags on the command line.
    """
    if not best:
        return ""
    lines = [f"the host alone is short: {summary(best[0], device)}"]
    lines.append(f"      {machine.fits(best[0].plan, best[0].config)}")
    lines.append(f"      {pasted(best[0].config, undone(argv, best[0].config))}")
    for x in best:
        alone = replace(x, config=x.config.with_fields(no_save_optim=True))
        if not machine.refuses(alone.plan, alone.config):
            lines.append(f"with --no-save-optim this fits: {summary(alone, device)}")
            lines.append(f"      {machine.fits(alone.plan, alone.config)}")
            flags = pasted(x.config, undone(argv, x.config))
            lines.append(f"      {flags} --no-save-optim")
            break
    return "\n".join(lines)


def _yours(
    own: Config,
    devices: int,
    vocab: int,
    device: Device,
    machine: Machine,
    asked: SearchRestrictions,
) -> UserPlan:
    """Return the plan of the user's own flags, for comparison.

    The result is empty, `UserPlan()`, if no flag gives a layout such as
    --pipeline-model-parallel-size.

    Args:
        devices: the number of processes.
        vocab: the size of the tokenizer.
        machine: the memory of a device and of a host.
        asked: the user's restrictions of the search.
    """
    if own.parallel == ParallelConfig() and own.batch.micro_batch_size is None:
        return UserPlan()
    # Plans of the search have no measured times, and this one is compared with them.
    config = replace(own.with_fields(pipeline_costs=None), world_size=devices)
    try:
        if problems := flag_problems(config):
            raise ConfigError(problems)
        config = with_vocabulary(config.with_batch(config.global_batch_size), vocab)
        config, linked = by_rates(config, device)
        mine = of_run(config, device)
        changes = one_change(mine, device, machine, asked)
        lines = change_lines(mine, changes, device, machine)
        changed = None
        if names_layout(own):
            changed = surest(mine, changes, machine, asked)
        return UserPlan(mine, changes=tuple(lines), linked=tuple(linked), changed=changed)
    except (ConfigError, ScheduleError) as error:
        return UserPlan(refused=" ".join(str(error).split()))
