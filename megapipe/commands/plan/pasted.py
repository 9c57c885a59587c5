"""Say the flags of a found plan, what they change of the user's flags, and which plan to take."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import fields

from megapipe.commands.plan.search.hiding import OVERLAP
from megapipe.config import Config
from megapipe.flags.flag import flags_of as all_flags
from megapipe.flags.fork import SWITCHES
from megapipe.flags.old_names import OLD_NAMES
from megapipe.flags.parse import read
from megapipe.flags.unset import unset
from megapipe.plan.seconds.step import TimedPlan
from megapipe.schedule.catalogue import PLAIN

_ALWAYS = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
    "pipeline_schedule",
    "micro_batch_size",
)
"""Fields that are printed even at their defaults; see flags_of."""
_MODEL = (
    "recompute_granularity",
    "recompute_activations",
    "recompute_modules",
    "recompute_method",
    "recompute_num_layers",
    "num_microbatches_with_partial_activation_checkpoints",
    "sequence_parallel",
    "tp_comm_overlap",
)
"""Fields of the model that a search chooses."""
CLOSE = 0.05
"""Predictions cannot distinguish plans with the same layout whose steps differ by less.

`is_equal` says which plans these are. Of 32 published pairs of layouts the ratio of the steps of 30
is predicted with a smaller error (tools/bench/published/pairs.py).
"""


def chosen_fields(config: Config) -> dict[str, set[str]]:
    """Return the configuration fields of the flags to paste, by section such as "model"."""
    chosen = {
        "model": set(_MODEL),
        "parallel": {field.name for field in fields(config.parallel)},
        "batch": {"micro_batch_size"},
        # Not chosen, but megapipe check predicts other seconds without them.
        "check": {"rates"},
    }
    if config.model.has_experts:
        chosen["model"].add("moe_token_dispatcher_type")
    return chosen


def flags_of(config: Config) -> list[str]:
    """Return the flags that the search has chosen, each with its values as separate words.

    Pasted after the user's own flags they override these, so some are given at their defaults too.
    A switch that is off cannot be written as a flag, and neither can None: `left_out` names the
    user's flags that --unset takes back for that reason.
    """
    chosen = chosen_fields(config)
    always = set(_ALWAYS)
    if config.model.has_experts:
        always |= {"moe_token_dispatcher_type", "expert_model_parallel_size"}
    tokens: list[str] = []
    for flag in all_flags(Config).values():
        if flag.field not in chosen.get(flag.section, ()):
            continue
        value = config.value(flag.field)
        if value != flag.default or (value is not None and flag.field in always):
            if flag.count == "many":
                values = value
            elif flag.count == "none":
                values = ()
            else:
                values = (value,)
            tokens += flag.spell([str(v) for v in values])
    return tokens


def left_out(given: Config, config: Config) -> list[str]:
    """Return the flags that would change a plan even with the plan's flags after them.

    Args:
        given: the configuration of the user's own flags with the plan's flags after them.
        config: the configuration of the plan.
    """
    chosen = chosen_fields(config)
    # What one tensor-parallel rank has nothing to do with may stay.
    idle = set[str]()
    if config.parallel.tensor_model_parallel_size == 1:
        idle = {"sequence_parallel", "tp_comm_overlap"}
    # Passes of the table reduce and gather, and overlap by themselves.
    if config.parallel.use_megatron_fsdp:
        idle |= {*OVERLAP}
    names = []
    for name, flag in all_flags(Config).items():
        if flag.field not in chosen.get(flag.section, ()):
            continue
        # Which flag shards the optimizer makes no difference where another one shards it too.
        same = flag.field == "use_distributed_optimizer" and config.parallel.use_megatron_fsdp
        if flag.field in idle or same:
            continue
        if given.value(flag.field) != config.value(flag.field):
            names.append(name)
    return names


def undone(argv: Sequence[str], config: Config) -> list[str]:
    """Return the user's flags that --unset has to take back before a plan's flags.

    Old names and switches of other programs are among them if they say what the plan's flags say.

    Args:
        argv: the user's own flags as typed.
        config: the configuration of the plan.
    """
    own = flags_of(config)
    left = left_out(read(Config, [*argv, *own]).value, config)
    said = {*left, *own}
    typed = dict.fromkeys(word.partition("=")[0] for word in argv)
    others = [name for name in typed if name in SWITCHES or said & {*OLD_NAMES.get(name, ())}]
    return [*left, *others]


def pasted(config: Config, taken_back: Sequence[str] = ()) -> str:
    """Return the flags that the search has chosen as one text, to paste in a shell.

    Values with spaces, | or quotes, such as a layout, are quoted.

    Args:
        taken_back: the user's flags that `undone` returns.
    """
    return shlex.join([*unset(taken_back), *flags_of(config)])


def changed(own: Config, config: Config) -> list[str]:
    """Return the flags of a plan whose values differ from the user's own.

    Args:
        own: the configuration of the user's own flags.
        config: the configuration of the plan.
    """
    # Without these flags a run has the same values.
    schedule = own.parallel.pipeline_schedule or PLAIN
    micro = own.batch.micro_batch_size or 1
    own = own.with_fields(pipeline_schedule=schedule, micro_batch_size=micro)
    return left_out(own, config)


def choices(config: Config) -> list[str]:
    """Return the fields that a search has set to other values than their defaults.

    The fewer there are, the plainer is the plan. The schedule 1f1b counts as a default.
    """
    chosen = chosen_fields(config)
    found = []
    for flag in all_flags(Config).values():
        is_chosen = flag.field in chosen.get(flag.section, ())
        if is_chosen and config.value(flag.field) not in (flag.default, PLAIN):
            found.append(flag.field)
    return found


def plainness(config: Config) -> tuple[bool, int]:
    """Return (whether weights are sharded, number of choices); less is plainer."""
    return config.parallel.use_megatron_fsdp, len(choices(config))


def plainest(plans: Sequence[TimedPlan]) -> TimedPlan | None:
    """Return the plan with the fewest choices of those within CLOSE of the fastest.

    Plans with sharded weights come after all others. Of several such plans the fastest is
    returned; None without plans.
    """
    least = min((x.step for x in plans), default=0.0)
    near = [x for x in plans if x.step < (1 + CLOSE) * least]
    return min(near, key=lambda x: (*plainness(x.config), x.step), default=None)


def plainest_line(best: Sequence[TimedPlan]) -> str:
    """Return a line on the plan that `plainest` returns; "" if the first is about as plain.

    Args:
        best: the plans of the report, fastest first.
    """
    x = plainest(best)
    if x is None:
        return ""
    few = len(choices(x.config))
    many = len(choices(best[0].config))
    # One flag less is no reason to look at another plan.
    if many - few < 2:
        return ""
    number = next(n for n, other in enumerate(best, 1) if other is x)
    slower = f"{x.step / best[0].step - 1:.1%} slower than the first"
    return (
        f"the plainest within {CLOSE:.0%}: number {number}, {slower}, {few} flags away from their "
        f"defaults against {many}"
    )


def is_equal(first: TimedPlan, x: TimedPlan) -> bool:
    """Return whether a plan is slower than the first by less than predictions can tell.

    The two must have the same layout, microbatch and sharding: of other pairs of plans nobody has
    published enough steps to say how far their predicted ratio is off.
    """
    *sizes, _ = first.layout
    *others, _ = x.layout
    shards = [one.config.parallel.use_megatron_fsdp for one in (first, x)]
    same = sizes == others and shards[0] == shards[1]
    return same and x.step < (1 + CLOSE) * first.step


def to_take(best: Sequence[TimedPlan], own: Config) -> int:
    """Return the index of the plan to take among those as fast as the first, within CLOSE.

    The plan to take changes the fewest of the user's own flags. Of several such plans it needs the
    least memory.

    Args:
        best: the plans of the report, fastest first.
        own: the configuration of the user's own flags.
    """
    equal = [n for n, x in enumerate(best) if is_equal(best[0], x)]
    return min(equal, key=lambda n: (len(changed(own, best[n].config)), best[n].peak))


def near_line(best: Sequence[TimedPlan], own: Config) -> str:
    """Return a line on the plans that are nearly as fast as the first and have another layout.

    The line is empty if there are none.

    Args:
        best: the plans of the report, fastest first.
        own: the configuration of the user's own flags.
    """
    near = [n for n, x in enumerate(best) if x.step < (1 + CLOSE) * best[0].step]
    if len(near) == 1:
        return ""
    counts = {n: len(changed(own, best[n].config)) for n in near}
    fewest = min(near, key=lambda n: counts[n])
    lean = min(near, key=lambda n: best[n].peak)
    return (
        f"take 1, or measure it next to others: plans {', '.join(str(n + 1) for n in near[1:])} "
        f"have other layouts and are slower by less than {CLOSE:.0%}, and how far such ratios are "
        f"off is not known. Fewest of your flags change with plan {fewest + 1} "
        f"({counts[fewest]}), and plan {lean + 1} needs least memory"
    )
