"""Combinations that Megatron-LM ignores: a flag that is given and, beside the others, has nothing to act on.

Each is accepted with one line at start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from megapipe.config import Config
from megapipe.flags.flag import Flag, flags_of
from megapipe.flags.idle_rows import ROWS


def _nowhere(config: Config) -> bool:
    log = config.log
    return not (log.tensorboard_dir or log.wandb_project or log.metrics_file)


_EXPERT_ROWS: tuple[tuple[str, Callable[[Config], bool], str], ...] = (
    (
        "moe_layer_freq moe_ffn_hidden_size moe_router_topk moe_router_load_balancing_type moe_aux_loss_coeff "
        "moe_z_loss_coeff moe_router_score_function moe_router_pre_softmax moe_router_dtype moe_router_num_groups "
        "moe_router_group_topk moe_router_topk_scaling_factor moe_router_enable_expert_bias "
        "moe_router_bias_update_rate moe_router_force_load_balancing moe_input_jitter_eps moe_expert_capacity_factor "
        "moe_token_drop_policy moe_pad_expert_input_to_capacity moe_shared_expert_intermediate_size "
        "moe_shared_expert_gate moe_per_layer_logging",
        lambda c: not c.model.has_experts,
        "there are no experts, without --num-experts",
    ),
    (
        "moe_router_pre_softmax",
        lambda c: c.model.moe_router_score_function != "softmax",
        "there is no softmax, without --moe-router-score-function softmax",
    ),
    (
        "moe_token_drop_policy",
        lambda c: c.model.capacity_factor is None,
        "nothing is dropped, without --moe-expert-capacity-factor",
    ),
    (
        "moe_shared_expert_gate",
        lambda c: not c.model.moe_shared_expert_intermediate_size,
        "there is no shared expert, without --moe-shared-expert-intermediate-size",
    ),
    (
        "moe_router_num_groups",
        lambda c: not c.model.moe_router_group_topk,
        "each token may use all experts, without --moe-router-group-topk",
    ),
    (
        "moe_router_bias_update_rate",
        lambda c: not c.model.moe_router_enable_expert_bias,
        "there is no bias to move, without --moe-router-enable-expert-bias",
    ),
    (
        "moe_per_layer_logging",
        _nowhere,
        "it is shown nowhere, without --tensorboard-dir, --wandb-project or --metrics-file",
    ),
)
_FLAGS = {flag.field: flag for flag in flags_of(Config).values()}
IDLE = tuple((_FLAGS[field], where, text) for fields, where, text in (*ROWS, *_EXPERT_ROWS) for field in fields.split())
"""A flag, in which run it has nothing to act on, and what happens instead."""


def idle(config: Config) -> list[tuple[str, str]]:
    """Flags that were given and change nothing beside the others, each with what happens instead."""
    found: dict[str, tuple[str, str]] = {}
    for flag, text in _given(config):
        value = getattr(getattr(config, flag.section), flag.field)
        said = " ".join(map(str, value)) if isinstance(value, tuple) else value
        found.setdefault(flag.name, (flag.name if value is True else f"{flag.name} {said}", text))
    return list(found.values())


def without_idle(config: Config) -> Config:
    """The same run without the flags that have nothing to act on."""
    while given := list(_given(config)):
        for flag, _ in given:
            section = replace(getattr(config, flag.section), **{flag.field: flag.default})
            config = replace(config, **{flag.section: section})
    return config


def _given(config: Config) -> Iterator[tuple[Flag, str]]:
    for flag, where, text in IDLE:
        if getattr(getattr(config, flag.section), flag.field) != flag.default and where(config):
            yield flag, text
