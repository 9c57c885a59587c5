"""Which single values a flag may have: one table of rules, and the fields that each holds for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from megapipe.config import Config

REQUIRED = {
    "num_layers": "12",
    "hidden_size": "768",
    "num_attention_heads": "12",
    "max_position_embeddings": "1024",
    "seq_length": "1024",
    "micro_batch_size": "4",
    "lr": "3e-4",
}
"""Field -> example."""

RULES: dict[str, Callable[[Any], bool]] = {
    "at least 1": lambda v: v >= 1,
    "at least 1 and at most 100000": lambda v: 1 <= v <= 10**5,
    "above 0": lambda v: v > 0,
    "above 0 and at most 1e9": lambda v: 0 < v <= 1e9,
    "at least 0": lambda v: v >= 0,
    "at least -1": lambda v: v >= -1,
    "at least 0 and below 2^32": lambda v: 0 <= v < 2**32,
    "at least 2": lambda v: v >= 2,
    "at least 0 and below 1": lambda v: 0 <= v < 1,
    "above 0 and at most 1": lambda v: 0 < v <= 1,
}
_FIELDS = {
    "at least 2": "reschedule_after",
    # What is listed, rank by rank or layer by layer, before anything starts.
    "at least 1 and at most 100000": "world_size num_layers num_attention_heads num_query_groups "
    "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
    "num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank",
    "at least 1": "moe_ffn_hidden_size moe_router_topk moe_router_num_groups moe_router_group_topk "
    "moe_shared_expert_intermediate_size "
    "loss_scale_window hysteresis hidden_size ffn_hidden_size kv_channels muon_num_ns_steps "
    "max_position_embeddings padded_vocab_size make_vocab_size_divisible_by "
    "check_weight_hash_across_dp_replicas_interval "
    "microbatch_group_size_per_virtual_pipeline_stage "
    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers micro_batch_size global_batch_size seq_length "
    "train_iters train_samples exit_interval lr_decay_iters lr_decay_samples lr_wsd_decay_iters lr_wsd_decay_samples "
    "save_retain_interval save_keep_last max_bad_iterations_in_a_row "
    "eval_global_batch_size eval_micro_batch_size ddp_bucket_size ddp_num_buckets "
    "vocab_size eval_interval start_eval_at_iter save_interval log_interval recompute_num_layers "
    "tensorboard_log_interval tensorboard_queue_size num_microbatches_with_partial_activation_checkpoints",
    "above 0": "moe_router_topk_scaling_factor loss_scale initial_loss_scale min_loss_scale "
    "norm_epsilon rotary_base rope_scaling_factor memory_limit_gib exit_duration_in_mins lr decoupled_lr adam_eps "
    "device_peak_tflops muon_extra_scale_factor",
    # What a clock of the system can count.
    "above 0 and at most 1e9": "distributed_timeout_minutes distributed_timeout_seconds_after_init",
    "at least 0": "num_experts moe_z_loss_coeff moe_router_bias_update_rate "
    "init_method_std embedding_init_method_std min_lr decoupled_min_lr lr_warmup_iters lr_warmup_samples "
    "post_validation_after lr_warmup_init weight_decay start_weight_decay end_weight_decay clip_grad "
    "num_workers ckpt_step profile_step_start error_injection_rate",
    "at least -1": "eval_iters",
    "at least 0 and below 2^32": "seed",  # numpy's RandomState, which Megatron shuffles with, takes no more
    "at least 0 and below 1": "moe_input_jitter_eps "
    "attention_dropout hidden_dropout lr_warmup_fraction adam_beta1 adam_beta2 "
    "sgd_momentum muon_momentum",
    "above 0 and at most 1": "rotary_percent",
}
RANGES = {field: rule for rule, names in _FIELDS.items() for field in names.split()}
"""Field -> rule. NaN and infinity break every rule."""


def check_numbers(config: Config) -> tuple[Config, list[str]]:
    """Problems of single values, and the configuration with those values at their defaults for the other checks."""
    problems = []
    for section in (section.name for section in fields(config) if is_dataclass(getattr(config, section.name))):
        part = getattr(config, section)
        reset = {}
        for field in fields(part):
            name, value, rule = field.name, getattr(part, field.name), RANGES.get(field.name)
            if value is None and name in REQUIRED:
                problems.append(f"{flag(name)} is missing, for example {flag(name)} {REQUIRED[name]}")
            elif value is not None and rule and (not RULES[rule](value) or value == math.inf):
                finite = " and finite" if RULES[rule](value) else ""
                problems.append(f"{flag(name)} {value} must be {rule}{finite}")
                reset[name] = field.default
        if reset:
            config = replace(config, **{section: replace(part, **reset)})
    return config, problems


def flag(field: str) -> str:
    """The flag of a field."""
    return f"--{field.replace('_', '-')}"


def division(value: int, by: int) -> str:
    """The arithmetic of a division with a rest."""
    return f"{value} = {by} x {value // by} + {value % by}"


def near(value: int, multiple_of: int) -> str:
    """The multiples on both sides, those above 0."""
    low = value // multiple_of * multiple_of
    return f"{low} or {low + multiple_of}" if low else str(multiple_of)
