"""Try a plan with one flag changed, and say which changes shorten its step most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import floor
from typing import Any, NamedTuple

from megapipe.checks.run import flag_problems
from megapipe.commands.plan.search.final import of_run
from megapipe.commands.plan.search.hiding import BUCKET, HIDING, OVERLAP, hides_unmeasured
from megapipe.commands.plan.search.listed.asked import (
    ANYTHING,
    VOCABULARY,
    SearchRestrictions,
    allows_change,
    allows_plan,
)
from megapipe.commands.plan.search.listed.cells import schedules_of, short
from megapipe.commands.plan.verdict import Machine, published_range
from megapipe.config import Config, ModelConfig
from megapipe.config.notes import flag
from megapipe.errors import ConfigError, ScheduleError
from megapipe.flags.fork import SWITCHES
from megapipe.flags.unset import unset
from megapipe.plan import GIB, Plan
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.step import TimedPlan, timed
from megapipe.schedule import SCHEDULES

_MOST = 4
"""Changes that are printed."""
_LEAST_GAIN = 0.01
"""The least gain, as a fraction of the step, of a change that is printed."""
_HIDES = frozenset({*OVERLAP, "tp_comm_overlap"})
"""Fields that hide communication under passes."""
_PASSES = 4096
"""The largest number of forwards of a table: larger ones take seconds for each change."""
_PAIRED = 512
"""The same for a table whose pairs are chosen by --overlap-moe-expert-parallel-comm."""


class ChangedPlan(NamedTuple):
    """A plan with one flag changed.

    Attributes:
        plan: the plan.
        text: the change as flags to append.
        unsure: whether it hides messages under products, which no GPU has measured.
    """

    plan: TimedPlan
    text: str
    unsure: bool


def one_change(
    mine: TimedPlan, device: Device, machine: Machine, asked: SearchRestrictions = ANYTHING
) -> list[ChangedPlan]:
    """Return plans with one flag changed, fastest first, whatever their step.

    Of each flag the best value counts; of schedules the best that pairs passes, and the best of the
    others. A bucket size brings the flag that it needs. A run has to accept the change, and the
    changed plan has to fit the machine. The list is empty for tables that take long to make.

    Args:
        mine: the plan that is changed.
        machine: the memory of a device and of a host. A changed plan that needs more is left out.
        asked: the user's restrictions of a search, which a changed plan keeps.
    """
    config = mine.config
    if _takes_long(mine):
        return []
    entry = SCHEDULES.get(mine.schedule)
    searched = entry is not None and entry.searched
    # The best change of each flag, by (name, unsure).
    found: dict[tuple[str, bool], ChangedPlan] = {}
    fits = machine.has_room(mine)
    for fields in _changes(config, None if fits else machine.limit):
        changed = config.with_fields(**fields)
        hides = not _HIDES.isdisjoint(fields)
        left_out = hides and HIDING in asked.without
        left_out |= VOCABULARY in asked.without and "vocab_parallel_pipeline" in fields
        # Another search would take seconds, and flags that hide messages leave the table as it is.
        left_out |= searched and not hides and "pipeline_schedule" not in fields
        if left_out or not allows_change(asked, config, changed):
            continue
        with suppress(ConfigError, ScheduleError):
            if not flag_problems(short(changed, 1)):
                if searched and hides:
                    other = replace(timed(mine.plan, changed, device), peak=mine.peak)
                else:
                    other = of_run(changed, device)
                if machine.has_room(other):
                    one = ChangedPlan(other, _said(fields, config), hides_unmeasured(other))
                    key = (next(iter(fields)), one.unsure)
                    found[key] = min(one, found.get(key, one), key=_rank)
    return sorted(found.values(), key=_rank)


def _rank(one: ChangedPlan) -> tuple[float, str]:
    return one.plan.step, one.text


def _takes_long(x: TimedPlan) -> bool:
    """Return whether the table of a plan takes seconds for each change."""
    forwards = x.plan.schedule.placement.num_stages * x.config.num_microbatches
    paired = x.config.parallel.overlap_moe_expert_parallel_comm
    return forwards > (_PAIRED if paired else _PASSES)


def surest(
    mine: TimedPlan, changes: Sequence[ChangedPlan], machine: Machine, asked: SearchRestrictions
) -> TimedPlan | None:
    """Return the fastest changed plan that hides no messages as assumed, unless `mine` does.

    Args:
        mine: the plan that is changed.
        changes: what `one_change` returns for it.
        machine: the memory of a device and of a host.
        asked: the user's restrictions of a search, which the whole plan has to keep.
    Returns: None if there is none, or if `mine` fits and is as fast.
    """
    fits = machine.has_room(mine)
    hides = hides_unmeasured(mine)
    for plan, _, unsure in changes:
        faster = plan.step < mine.step or not fits
        if faster and (hides or not unsure) and allows_plan(asked, plan):
            if plan.config.parallel.tensor_model_parallel_size > 1:
                return plan
            # One tensor-parallel rank has nothing to split.
            return replace(plan, config=plan.config.with_fields(sequence_parallel=False))
    return None


def change_lines(
    mine: TimedPlan, changes: Sequence[ChangedPlan], device: Device, machine: Machine
) -> list[str]:
    """Return lines on the changes of one flag that shorten a step most: at most four.

    A step has to be 1% shorter. If the plan does not fit the machine, the lines name changes that
    make it fit, however long the step. If no change does, a line says so.

    Args:
        mine: the plan that is changed.
        changes: what `one_change` returns for it.
        machine: the memory of a device and of a host.
    """
    if _takes_long(mine):
        return []
    lines = []
    within = []
    fits = machine.has_room(mine)
    for plan, text, unsure in changes[:_MOST]:
        if not fits or plan.step <= (1 - _LEAST_GAIN) * mine.step:
            gain = f"{plan.step / mine.step - 1:+.1%} of a step, peak {plan.peak / GIB:.3g} GiB"
            if unsure:
                gain += ", if messages hide under products as assumed, which no GPU has measured"
            does = "" if fits else " makes it fit"
            lines.append(f"one change alone{does}: {text}: {plan.step:.4g} s, {gain}")
            # What published runs say of changes that take the messages of experts into a node.
            if known := published_range(mine, plan, device):
                within.append(f"{known} as with {text}")
    if within:
        lines.append(f"by the two published pairs yours takes {', '.join(within)}")
    if not fits and not lines:
        lines.append("no change of one flag alone makes it fit: --search changes several")
    return lines


def _said(fields: dict[str, Any], config: Config) -> str:
    """Return a change as flags to append, such as "--tp-comm-overlap".

    Args:
        fields: {field: its new value}; None, False or a default tuple for a flag that is taken
            back.
        config: the configuration that is changed.
    """
    gone = [flag(name) for name, x in fields.items() if _is_taken_back(x)]
    if "pipeline_schedule" in fields and not SWITCHES.keys().isdisjoint(_replaced(config)):
        # A run refuses a schedule and switches of the zero-bubble fork that choose another.
        gone.append(flag("pipeline_schedule"))
    words = unset(gone)
    for name, x in fields.items():
        if x is True:
            words.append(flag(name))
        elif not _is_taken_back(x):
            words.append(f"{flag(name)} {x}")
    return " ".join(words)


def _replaced(config: Config) -> list[str]:
    """Return the words of the flags in whose place others hold, such as the fork's switches."""
    return [word for text, _ in config.noop_flags for word in text.split()]


def _is_taken_back(value: object) -> bool:
    return value is None or value is False or isinstance(value, tuple)


def one_change_of(plan: Plan, config: Config, device: Device, machine: Machine) -> list[str]:
    """Return the lines on changes of one flag of a plan.

    The list is empty if --pipeline-costs gave the times, which are no seconds.

    Args:
        machine: the memory of a device and of a host.
    """
    if plan.given is not None:
        return []
    mine = replace(timed(plan, config, device), peak=max(plan.peak_bytes))
    return change_lines(mine, one_change(mine, device, machine), device, machine)


def _changes(config: Config, limit: float | None) -> Iterator[dict[str, Any]]:
    """Yield each change to try, as {field: its new value}.

    Args:
        limit: bytes of a device that the plan may take, if it takes more.
    """
    par = config.parallel
    model = config.model
    if par.pipeline_model_parallel_size > 1 and not par.use_megatron_fsdp:
        # Schedules with any number of chunks need a second flag.
        for name, chunks in schedules_of(config):
            if chunks is None and name != par.pipeline_schedule:
                yield {"pipeline_schedule": name}
    if par.overlap_moe_expert_parallel_comm:
        yield {"overlap_moe_expert_parallel_comm": False}
    # With a memory limit such a table may take minutes.
    may_share = par.pipeline_model_parallel_size > 1 and par.memory_limit_gib is None
    if may_share and not par.vocab_parallel_pipeline:
        yield {"vocab_parallel_pipeline": True}
    if par.use_megatron_fsdp and par.pipeline_model_parallel_size == 1:
        # Only within a limit a run lets go of weights that it has gathered.
        limited = {}
        if limit is not None:
            limited = {"memory_limit_gib": floor(1000 * limit / GIB) / 1000}
        for name, chunks in schedules_of(config):
            units = {"pipeline_schedule": name, "num_virtual_stages_per_pipeline_rank": chunks}
            yield units | limited
    yield from _recomputed(model, limit)
    if limit is not None:
        yield from _smaller(config)
    if model.has_experts:
        ep = par.expert_model_parallel_size
        # By default experts are split like other layers, often across nodes.
        if par.etp > 1:
            yield {"expert_tensor_parallel_size": 1}
        yield {"expert_model_parallel_size": 2 * ep}
        if ep > 1:
            yield {"expert_model_parallel_size": ep // 2}
    if par.tensor_model_parallel_size > 1:
        if not model.sequence_parallel:
            yield {"sequence_parallel": True}
        if not model.tp_comm_overlap:
            yield {"tp_comm_overlap": True}
    if config.weight_replicas > 1 and not par.shards_grads:
        if not par.splits_optimizer:
            yield {"use_distributed_optimizer": True}
        elif not par.overlap_param_gather and par.overlap_grad_reduce:
            yield {"overlap_param_gather": True}
        # Without buckets the last reduction hides under nothing.
        fields: dict[str, Any] = {"overlap_grad_reduce": True}
        if par.ddp_bucket_size is None and par.ddp_num_buckets is None:
            fields["ddp_bucket_size"] = BUCKET
        changed = {name: x for name, x in fields.items() if x != config.value(name)}
        if changed:
            yield changed


def _recomputed(model: ModelConfig, limit: float | None) -> Iterator[dict[str, Any]]:
    """Yield changes of recomputation: of nothing, of core attention, or if memory is short, of all.

    Each is {field: its new value}. Flags that say more of a recomputation go with it.

    Args:
        limit: bytes of a device that the plan may take, if it takes more.
    """
    given = model.recompute_granularity
    if model.recompute_activations:
        given = "selective"
    of_kind: dict[str, Any] = {"recompute_method": None, "recompute_num_layers": None}
    if given == "selective":
        of_kind = {
            "recompute_activations": False,
            "recompute_modules": ModelConfig.recompute_modules,
        }
    gone = {name: x for name, x in of_kind.items() if getattr(model, name) != x}
    if given is not None:
        partial = "num_microbatches_with_partial_activation_checkpoints"
        nothing = {"recompute_granularity": None, **gone, partial: None}
        yield {name: x for name, x in nothing.items() if getattr(model, name) != x}
    if given != "selective":
        yield {"recompute_granularity": "selective", **gone}
    if given != "full" and limit is not None:
        yield {"recompute_granularity": "full", **gone}


def _smaller(config: Config) -> Iterator[dict[str, Any]]:
    """Yield changes that leave less on a rank, as {field: its new value}."""
    micro = config.batch.micro_batch
    if micro > 1:
        yield {"micro_batch_size": micro // 2}
        yield {"micro_batch_size": 1}
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        # Half of the replicas give their ranks.
        if config.data_parallel_size % 2 == 0:
            yield {name: 2 * config.value(name)}
