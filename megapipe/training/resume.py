"""May this run go on from that checkpoint? Settings are compared by what they mean, and every difference is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megapipe.config import Config, ModelConfig
from megapipe.optim.lr import LRSchedule

# These may differ: they say how the model is computed, trained or begun, not what its weights mean.
FREE = {
    "attention_backend",
    "attention_dropout",
    "cp_comm_type",
    "cross_entropy_loss_fusion",
    "embedding_init_method_std",
    "hidden_dropout",
    "init_method_std",
    "init_method_xavier_uniform",
    "make_vocab_size_divisible_by",
    "num_microbatches_with_partial_activation_checkpoints",
    "model_provider",  # the names and shapes of the parameters say it
    "recompute_activations",
    "recompute_granularity",
    "recompute_method",
    "recompute_modules",
    "recompute_num_layers",
    "padded_vocab_size",  # the embedding's shape says it
    "sequence_parallel",
    "transformer_impl",
}


def settings(config: Config, schedule: LRSchedule | None = None) -> dict[str, Any]:
    """What Megatron-LM calls opt_param_scheduler: the learning-rate curve in samples, and the weight decay."""
    schedule = schedule or LRSchedule.of(config)
    return {**dataclasses.asdict(schedule), "weight_decay": schedule.weight_decay.saved()}


# Settings that a run may change on its way, but seldom means to: what it reads, and how it follows the gradient.
_WATCHED = {
    "train": "seq_length seed calculate_per_token_loss optimizer clip_grad adam_beta1 adam_beta2 adam_eps",
    "data": "mock_data data_path data_args_path train_data_path valid_data_path test_data_path "
    "per_split_data_args_path split "
    "dataloader_type no_data_sharding eod_mask_loss reset_position_ids "
    "reset_attention_mask tokenizer_type tokenizer_model vocab_size",
    "model": "attention_dropout hidden_dropout",
}


def other_settings(saved: Mapping[str, Any], config: Config) -> list[str]:
    """Flags of what is trained on and how that are not those of the run that saved; Megatron-LM goes on without a word.

    Args:
        saved: the configuration as it was saved.
    """
    return [
        f"--{name.replace('_', '-')} {_shown(here)}, there {_shown(there)}"
        for section, names in _WATCHED.items()
        for name in names.split()
        if isinstance(saved.get(section), Mapping) and name in saved[section]
        for here, there in [(getattr(getattr(config, section), name), saved[section][name])]
        if (list(here) if isinstance(here, tuple) else here) != there
    ]


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


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
        if there.get(key) != here[key]
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
    """The settings that the weights depend on, defaults filled in."""
    fields = {name: value for name, value in dataclasses.asdict(model).items() if name not in FREE}
    fields |= {"window_size": model.window, "no_bias_gelu_fusion": model.erf_gelu}
    if model.hidden_size and model.num_attention_heads:
        fields |= {"ffn_hidden_size": model.ffn, "kv_channels": model.head_dim, "num_query_groups": model.query_groups}
        del fields["group_query_attention"]
    return fields
