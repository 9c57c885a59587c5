"""Say the flags of a found plan, what they change of the user's flags, and which plan to take."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import fields

from megapipe.commands.plan.search.hiding import OVERLAP
from megapipe.commands.plan.search.listed.asked import own_schedule
from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.flags.flag import flags_of as all_flags
from megapipe.flags.fork import SWITCHES
from megapipe.flags.old_names import OLD_NAMES
from megapipe.flags.parse import read
from megapipe.flags.unset import unset
from megapipe.plan.split import chunks_of

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

_STAGES = "--num-virtual-stages-per-pipeline-rank"
_LAYERS = "--num-layers-per-virtual-pipeline-stage"


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
    schedule = own_schedule(own)
    micro = own.batch.micro_batch_size or 1
    own = own.with_fields(pipeline_schedule=schedule, micro_batch_size=micro)
    names = left_out(_by_number(own), _by_number(config))
    if own.parallel.num_layers_per_virtual_pipeline_stage is not None:
        # The flag that the user gave, and not the one that says the same.
        names = [_LAYERS if name == _STAGES else name for name in names]
    return names


def _by_number(config: Config) -> Config:
    """Return the configuration with the number of stages on a rank in place of their layers.

    Two flags say the same, and a plan has the first one.
    """
    if config.parallel.num_layers_per_virtual_pipeline_stage is None:
        return config
    try:
        chunks = chunks_of(config)
    except ConfigError:
        # The layers do not fill the stages, which another check reports.
        return config
    return config.with_fields(
        num_layers_per_virtual_pipeline_stage=None, num_virtual_stages_per_pipeline_rank=chunks
    )
