"""The rows of `flags.idle` that are about experts."""

from __future__ import annotations

from collections.abc import Callable

from megapipe.config import Config


def _nowhere(config: Config) -> bool:
    log = config.log
    return not (log.tensorboard_dir or log.wandb_project or log.metrics_file)


EXPERT_ROWS: tuple[tuple[str, Callable[[Config], bool], str], ...] = (
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
