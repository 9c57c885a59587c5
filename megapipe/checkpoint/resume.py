"""May this run go on from that checkpoint? Settings are compared by what they mean, and every difference is named."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from megapipe.config import Config, ModelConfig
from megapipe.optim.lr import LRSchedule

TOKENS = "tokens"
"""In `contents`, of what stands in the .bin files."""

_MUST, _CURVE, _CONTENTS, _NAMED, _FREE = "must match", "curve", "contents", "when named", "free"
_MICRO = "microbatch"

_TABLE = {
    "model": {
        _MUST: "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels group_query_attention "
        "num_query_groups max_position_embeddings position_embedding_type rotary_base rotary_percent "
        "rotary_interleaved use_rope_scaling rope_scaling_factor window_size normalization norm_epsilon "
        "apply_layernorm_1p swiglu quick_geglu squared_relu no_bias_gelu_fusion disable_bias_linear add_qkv_bias "
        "qk_layernorm untie_embeddings_and_output_weights per_layer_overrides no_attention no_mlp "
        "num_experts moe_layer_freq moe_ffn_hidden_size moe_router_topk moe_router_score_function "
        "moe_router_pre_softmax moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor "
        "moe_router_enable_expert_bias moe_shared_expert_intermediate_size moe_shared_expert_gate",
        _NAMED: "attention_dropout hidden_dropout moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff "
        "moe_router_bias_update_rate moe_router_dtype moe_router_force_load_balancing moe_input_jitter_eps "
        "moe_expert_capacity_factor moe_token_drop_policy moe_pad_expert_input_to_capacity",
        # How the model is computed or was begun; the embedding's shape and the parameters' names say the rest.
        _FREE: "attention_backend cp_comm_type cross_entropy_loss_fusion embedding_init_method_std init_method_std "
        "init_method_xavier_uniform make_vocab_size_divisible_by model_provider padded_vocab_size "
        "num_microbatches_with_partial_activation_checkpoints recompute_activations recompute_granularity "
        "recompute_method recompute_modules recompute_num_layers sequence_parallel transformer_impl",
    },
    "train": {
        _CURVE: "lr min_lr lr_decay_style lr_decay_iters lr_decay_samples lr_warmup_fraction lr_warmup_iters "
        "lr_warmup_samples lr_warmup_init lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples weight_decay "
        "weight_decay_incr_style start_weight_decay end_weight_decay",
        _NAMED: "global_batch_size rampup_batch_size step_batch_size_schedule seq_length seed "
        "calculate_per_token_loss optimizer clip_grad adam_beta1 adam_beta2 adam_eps sgd_momentum "
        "muon_momentum muon_no_split_qkv muon_nesterov muon_num_ns_steps muon_coefficient_type muon_scale_mode "
        "muon_extra_scale_factor "
        "decoupled_lr decoupled_min_lr grad_reduce_in_bf16 loss_scale min_loss_scale loss_scale_window "
        "hysteresis use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype",
        _MICRO: "micro_batch_size",
        # The tensors' types say bf16 and fp16; the length is the curve's where the curve has none of its own.
        _FREE: "train_iters train_samples exit_interval exit_duration_in_mins exit_signal_handler "
        "exit_signal bf16 fp16 initial_loss_scale compile deterministic_mode freeze_all_layers "
        "check_weight_hash_across_dp_replicas_interval no_check_for_nan_in_loss_and_grad rerun_mode "
        "error_injection_rate error_injection_type check_for_spiky_loss max_bad_iterations_in_a_row "
        "override_opt_param_scheduler use_checkpoint_opt_param_scheduler",
    },
    "data": {
        _CONTENTS: "data_path data_args_path train_data_path valid_data_path test_data_path per_split_data_args_path "
        "tokenizer_model vocab_file merge_file",
        _NAMED: "mock_data split dataloader_type no_data_sharding eod_mask_loss reset_position_ids "
        "reset_attention_mask tokenizer_type vocab_size null_tokenizer_eod_id tokenizer_hf_no_include_special_tokens "
        "tiktoken_pattern tiktoken_num_special_tokens",
        _FREE: "data_cache_path num_workers eval_iters eval_interval eval_global_batch_size eval_micro_batch_size "
        "start_eval_at_iter skip_train",
    },
}
RULES = {
    section: {name: rule for rule, names in rows.items() for name in names.split()} for section, rows in _TABLE.items()
}
"""What becomes of a setting that is not the checkpoint's, by section of Config. `must match`: refused, the weights mean
something else. `curve`: refused without --override-opt_param-scheduler or its like. `contents`: those of the files are
compared, as `when named`: refused unless --override-on-load has the name. `microbatch`: likewise, where a number hangs
on what is computed together. `free`: decides no number, or its rounding alone. All
other sections are free: layout, schedule, files, logs."""

_CONTENTS_NAMES = ("data_path", "tokenizer_model")

FREE = {name for name, rule in RULES["model"].items() if rule in (_FREE, _NAMED)}
"""What weights do not depend on."""
_ROTARY = ("rotary_base", "rotary_percent", "rotary_interleaved", "use_rope_scaling", "rope_scaling_factor")


def settings(config: Config, schedule: LRSchedule | None = None) -> dict[str, Any]:
    """What Megatron-LM calls opt_param_scheduler: the learning-rate curve in samples, and the weight decay."""
    schedule = schedule or LRSchedule.of(config)
    return {**dataclasses.asdict(schedule), "weight_decay": schedule.weight_decay.saved()}


def changed_settings(
    saved: Mapping[str, Any], contents: Mapping[str, str] | None, config: Config, here: Mapping[str, str] | None
) -> dict[str, str]:
    """What decides the numbers and is not what it was in the run that saved: name -> what is here and there.

    Args:
        saved: the configuration as it was saved; fields that it lacks, and one that has never trained, pass.
        contents, here: `same.contents` as saved and now; None passes.
    """
    changed = {}
    trained = saved["train"].get("seq_length") is not None
    for section, rules in RULES.items() if trained else ():
        for name in (n for n, rule in rules.items() if rule == _NAMED and n in saved[section] and _decides(n, config)):
            mine, its = getattr(getattr(config, section), name), saved[section][name]
            if name == "global_batch_size" and not config.train.step_batch_size_schedule:
                mine, its = config.global_batch_size, _batch(saved)
            if isinstance(mine, tuple):
                mine, its = list(mine), list(its)
            if mine != its:
                changed[name] = f"{_flag(name)} is {mine}, and was {its}"
    if trained:
        changed |= _cut_otherwise(saved, config)
    if trained and contents is not None and here is not None:
        for name in sorted((here.keys() | contents.keys()) - {TOKENS}):
            if here.get(name) != contents.get(name):
                changed[name] = f"{_flag(name)} is another file or has other contents than what was trained with"
        # Checkpoints of earlier versions do not know it.
        if "data_path" not in changed and here.get(TOKENS, "") != contents.get(TOKENS, here.get(TOKENS, "")):
            changed["data_path"] = "--data-path has other tokens than what was trained with, in files of the same sizes"
    return changed


def _decides(name: str, config: Config) -> bool:
    """Whether this run's numbers hang on the setting: Muon's momentum decides nothing under another optimizer."""
    optimizer = name.partition("_")[0]
    return optimizer not in ("muon", "sgd") or optimizer == config.train.optimizer


def _cut_otherwise(saved: Mapping[str, Any], config: Config) -> dict[str, str]:
    """The same samples in other microbatches or on other replicas, where that decides numbers."""
    changed, model, data = dict[str, str](), config.model, config.data
    cyclic = data.dataloader_type == "cyclic"
    reasons = {
        "draws other dropout": model.attention_dropout
        or model.hidden_dropout
        or "dropout" in str(model.per_layer_overrides),
        "weighs tokens otherwise under --eod-mask-loss": data.eod_mask_loss
        and not config.train.calculate_per_token_loss,
        "reads other samples under --dataloader-type cyclic": cyclic,
    }
    micro, its = config.train.micro_batch_size, saved["train"].get("micro_batch_size")
    if (why := " and ".join(text for text, holds in reasons.items() if holds)) and its not in (None, micro):
        changed["micro_batch_size"] = f"--micro-batch-size is {micro}, and was {its}, which {why}"
    replicas, theirs = config.data_parallel_size, _replicas(saved)
    if cyclic and replicas != theirs:
        changed["dataloader_type"] = (
            f"--dataloader-type cyclic reads other samples on {replicas} data-parallel ranks than on {theirs}, as then"
        )
    return changed


def unnamed(changed: Mapping[str, str], config: Config, folder: str) -> list[str]:
    """What forbids to go on of it: all that --override-on-load does not name."""
    names = [name.strip("-").replace("-", "_") for name in config.checkpoint.override_on_load]
    may = (_NAMED, _MICRO)
    known = {*_CONTENTS_NAMES, *(name for rules in RULES.values() for name, rule in rules.items() if rule in may)}
    problems = [
        f"--override-on-load {name}: no setting that may be overridden so. There are {' '.join(sorted(known))}"
        for name in names
        if name not in known
    ]
    if config.train.override_opt_param_scheduler:
        names += ["decoupled_lr", "decoupled_min_lr"]
    if left := [name for name in changed if name not in names]:
        problems.append(
            f"this would not be the training of {folder} any more: {'; '.join(changed[name] for name in left)}. Give "
            f"its settings, or to go on with yours add --override-on-load {' '.join(sorted({*names, *left} & known))}"
        )
    return problems


def _batch(saved: Mapping[str, Any]) -> int:
    train = saved["train"]
    return int(train["global_batch_size"] or train["micro_batch_size"] * _replicas(saved))


def _replicas(saved: Mapping[str, Any]) -> int:
    axes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    return int(saved["world_size"] // math.prod(saved["parallel"].get(axis, 1) for axis in axes))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def resume_problems(
    model: Mapping[str, Any], scheduler: Mapping[str, Any] | None, config: Config, name: str
) -> list[str]:
    """One text for each setting that forbids to go on.

    Args:
        model, scheduler: as saved: ModelConfig's fields, and `settings`; None to leave the latter out.
        name: of the checkpoint.
    """
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    there = _meaning(ModelConfig(**{key: value for key, value in model.items() if key in known}))
    here = _meaning(config.model)
    problems = [
        f"--{key.replace('_', '-')} is {here[key]}, but {name} has {there[key]}"
        for key in here
        if key in there and there[key] != here[key]
    ]
    train = config.train
    if scheduler is None or train.override_opt_param_scheduler or train.use_checkpoint_opt_param_scheduler:
        return problems
    mine = settings(config)
    differ = [f"{key} {scheduler.get(key)} / {mine[key]}" for key in mine if scheduler.get(key) != mine[key]]
    if differ:
        problems.append(
            f"{name} was trained with other settings (checkpoint / here, lengths in samples): {', '.join(differ)}. "
            "Add --override-opt_param-scheduler to go on with those of the command line, or "
            "--use-checkpoint-opt_param-scheduler with the checkpoint's"
        )
    return problems


def _meaning(model: ModelConfig) -> dict[str, Any]:
    """The settings that the weights depend on, defaults filled in, and what has no effect at its default."""
    fields = {name: value for name, value in dataclasses.asdict(model).items() if name not in FREE}
    fields |= {"window_size": model.window, "no_bias_gelu_fusion": model.erf_gelu}
    if model.per_layer_overrides is None:  # a layer that differs may make use of them
        if model.bias:
            fields["add_qkv_bias"] = False
        if model.position_embedding_type != "rope":
            fields |= {name: getattr(ModelConfig, name) for name in _ROTARY}
        elif not model.use_rope_scaling:
            fields["rope_scaling_factor"] = ModelConfig.rope_scaling_factor
    if model.hidden_size:
        fields |= {"ffn_hidden_size": model.ffn, "kv_channels": model.head_dim, "num_query_groups": model.query_groups}
        del fields["group_query_attention"]
    return _of_experts(model, fields) if model.num_layers and model.hidden_size else fields


def _of_experts(model: ModelConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """The same, where no setting of experts means anything in a model without them."""
    if not model.has_experts:
        return {name: x for name, x in fields.items() if not name.startswith("moe_")} | {"num_experts": 0}
    layers = [model.has_experts_in(layer) for layer in range(model.layers)]
    fields |= {"moe_ffn_hidden_size": model.expert_ffn, "moe_layer_freq": [int(sparse) for sparse in layers]}
    if all(layers):
        del fields["ffn_hidden_size"]
    return fields
