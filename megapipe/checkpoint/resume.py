"""Rules for going on from a checkpoint: settings are compared by what they mean, and every difference is named."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from megapipe.config import Config, ModelConfig, OptimizerConfig
from megapipe.config.model.mla import MLAConfig
from megapipe.config.notes import ReadBy, Resume, flag, note_of
from megapipe.optim.lr import LRSchedule

TOKENS = "tokens"
"""The key in `contents` of the tokens in the .bin files."""

ORDER = "order"
"""The key in `contents` of the order in which the first training samples are read."""

RULES = {
    name: rule
    for section in Config().sections
    for name, rule in note_of(type(section), Resume).items()
}
"""Rules for a setting that is not the checkpoint's; all others are free."""

_CONTENTS_NAMES = ("data_path", "tokenizer_model")

FREE = {name for name, rule in RULES.items() if rule in (Resume.FREE, Resume.NAMED)}
"""Settings that weights do not depend on."""
_LATENTS = "multi_latent_attention"
_ROTARY = (
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "use_rope_scaling",
    "rope_scaling_factor",
)


def settings(config: Config, schedule: LRSchedule | None = None) -> dict[str, Any]:
    """The settings that Megatron-LM calls opt_param_scheduler: the learning rate over samples, and the weight decay."""
    schedule = schedule or LRSchedule.of(config)
    return {**dataclasses.asdict(schedule), "weight_decay": schedule.weight_decay.saved()}


def saved_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a saved configuration by name: earlier versions had other sections, such as `train`."""
    sections = [section for section in config.values() if isinstance(section, dict)]
    return {name: value for section in sections for name, value in section.items()}


def changed_settings(
    saved: Mapping[str, Any],
    contents: Mapping[str, str] | None,
    config: Config,
    here: Mapping[str, str] | None,
) -> dict[str, str]:
    """Settings that decide the numbers and are not those of the run that saved: name -> what is here and there.

    Args:
        saved: the configuration as it was saved; fields that it lacks, and one that has never trained, pass.
        contents, here: `same.contents` as saved and now; None passes.
    """
    fields, changed = saved_fields(saved), dict[str, str]()
    if fields.get("seq_length") is None:
        return changed
    named = [name for name, rule in RULES.items() if rule == Resume.NAMED and name in fields]
    for name in (name for name in named if _decides(name, config)):
        mine, its = config.value(name), fields[name]
        if name == "global_batch_size" and not config.batch.step_batch_size_schedule:
            mine, its = config.global_batch_size, _batch(fields, _replicas(saved))
        if isinstance(mine, tuple):
            mine, its = list(mine), list(its)
        if mine != its:
            changed[name] = f"{flag(name)} is {mine}, and was {its}"
    changed |= _cut_otherwise(fields, _replicas(saved), config)
    if contents is not None and here is not None:
        for name in sorted((here.keys() | contents.keys()) - {TOKENS, ORDER}):
            if here.get(name) != contents.get(name):
                changed[name] = (
                    f"{flag(name)} is another file or has other contents than what was trained with"
                )
        # Checkpoints of earlier versions do not know it.
        if "data_path" not in changed and here.get(TOKENS, "") != contents.get(
            TOKENS, here.get(TOKENS, "")
        ):
            changed["data_path"] = (
                "--data-path has other tokens than what was trained with, in files of the same sizes"
            )
        if not changed and ORDER in here and here[ORDER] != contents.get(ORDER, here[ORDER]):
            name = "train_iters" if config.batch.train_samples is None else "train_samples"
            changed[name] = (
                f"{flag(name)} is {config.value(name)}, and was {fields.get(name)}: data that is read "
                "more than once is shuffled by how often, so the rest would not be the samples that are still unread"
            )
    return changed


def _decides(name: str, config: Config) -> bool:
    """Do this run's numbers hang on the setting? Muon's momentum decides nothing under another optimizer."""
    read_by = note_of(OptimizerConfig, ReadBy).get(name)
    return read_by is None or not read_by.where(config)


def _cut_otherwise(saved: Mapping[str, Any], theirs: int, config: Config) -> dict[str, str]:
    """Other microbatches or replicas of the same samples, where that decides numbers."""
    changed, model, data = dict[str, str](), config.model, config.data
    cyclic = data.dataloader_type == "cyclic"
    reasons = {
        "draws other dropout": model.attention_dropout
        or model.hidden_dropout
        or "dropout" in str(model.per_layer_overrides),
        "weighs tokens otherwise under --eod-mask-loss": data.eod_mask_loss
        and not config.batch.calculate_per_token_loss,
        "reads other samples under --dataloader-type cyclic": cyclic,
    }
    micro, its = config.batch.micro_batch_size, saved.get("micro_batch_size")
    if (why := " and ".join(text for text, holds in reasons.items() if holds)) and its not in (
        None,
        micro,
    ):
        changed["micro_batch_size"] = f"--micro-batch-size is {micro}, and was {its}, which {why}"
    replicas = config.data_parallel_size
    if cyclic and replicas != theirs:
        changed["dataloader_type"] = (
            f"--dataloader-type cyclic reads other samples on {replicas} data-parallel ranks than on {theirs}, as then"
        )
    return changed


def unnamed(changed: Mapping[str, str], config: Config, folder: str) -> list[str]:
    """Problems that forbid to go on of it: all changes that --override-on-load does not name."""
    names = [name.strip("-").replace("-", "_") for name in config.checkpoint.override_on_load]
    known = {
        *_CONTENTS_NAMES,
        "train_iters",
        "train_samples",
        *(name for name, rule in RULES.items() if rule in (Resume.NAMED, Resume.MICROBATCH)),
    }
    problems = [
        f"--override-on-load {name}: no setting that may be overridden so. There are {' '.join(sorted(known))}"
        for name in names
        if name not in known
    ]
    if config.optimizer.override_opt_param_scheduler:
        names += ["decoupled_lr", "decoupled_min_lr"]
    if left := [name for name in changed if name not in names]:
        problems.append(
            f"this would not be the training of {folder} any more: {'; '.join(changed[name] for name in left)}. Give "
            f"its settings, or to go on with yours add --override-on-load {' '.join(sorted({*names, *left} & known))}"
        )
    return problems


def _batch(saved: Mapping[str, Any], replicas: int) -> int:
    return int(saved["global_batch_size"] or saved["micro_batch_size"] * replicas)


def _replicas(saved: Mapping[str, Any]) -> int:
    axes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    return int(saved["world_size"] // math.prod(saved["parallel"].get(axis, 1) for axis in axes))


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
        f"{flag(key)} is {here[key]}, but {name} has {there[key]}"
        for key in here
        if key in there and there[key] != here[key]
    ]
    flags = config.optimizer
    if (
        scheduler is None
        or flags.override_opt_param_scheduler
        or flags.use_checkpoint_opt_param_scheduler
    ):
        return problems
    mine = settings(config)
    # A setting that an older version did not have was at its default there.
    defaults = {field.name: field.default for field in dataclasses.fields(LRSchedule)}
    its = {key: scheduler.get(key, defaults[key]) for key in mine}
    differ = [f"{key} {its[key]} / {mine[key]}" for key in mine if its[key] != mine[key]]
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
        if model.position_embedding_type != "rope" and not model.multi_latent_attention:
            fields |= {name: getattr(ModelConfig, name) for name in _ROTARY}
        elif not model.use_rope_scaling:
            fields["rope_scaling_factor"] = ModelConfig.rope_scaling_factor
    if model.hidden_size:
        fields |= {
            "ffn_hidden_size": model.ffn,
            "kv_channels": model.head_dim,
            "num_query_groups": model.query_groups,
        }
        del fields["group_query_attention"]
    if model.per_layer_overrides is None:
        fields = _of_attention(model, fields)
    return _of_experts(model, fields) if model.num_layers and model.hidden_size else fields


def _of_attention(model: ModelConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, where no setting of heads means anything in a model with latents, and none of latents without."""
    if not model.multi_latent_attention:
        return {
            name: x for name, x in fields.items() if name not in MLAConfig.__dataclass_fields__
        } | {_LATENTS: False}
    none = (
        "kv_channels",
        "num_query_groups",
        "add_qkv_bias",
        "rotary_interleaved",
        "use_rope_scaling",
    )
    fields = {name: x for name, x in fields.items() if name not in (*none, "rope_scaling_factor")}
    if model.rope_type == "rope":
        return fields | {"mscale": MLAConfig.mscale}
    return fields | {"rope_type": "yarn", "rotary_percent": 1.0}


def _of_experts(model: ModelConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, where no setting of experts means anything in a model without them."""
    if not model.has_experts:
        return {name: x for name, x in fields.items() if not name.startswith("moe_")} | {
            "num_experts": 0
        }
    layers = [model.has_experts_in(layer) for layer in range(model.layers)]
    fields |= {
        "moe_ffn_hidden_size": model.expert_ffn,
        "moe_layer_freq": [int(sparse) for sparse in layers],
    }
    fields["moe_router_group_score_topk"] = model.group_scores
    if all(layers):
        del fields["ffn_hidden_size"]
    return fields
