"""Rules for going on from a checkpoint.

Settings are compared by their meaning for this model, and every difference is named. A setting that
has no effect may differ.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Mapping
from typing import Any, get_args

from megapipe.config import Config, ModelConfig, OptimizerConfig
from megapipe.config.model.delta import DeltaConfig
from megapipe.config.model.mla import MLAConfig
from megapipe.config.model.pattern import PatternConfig
from megapipe.config.model.rotary import LongRopeConfig, RotaryConfig
from megapipe.config.model.stream import Matrix
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
"""Rules of settings that may differ from the checkpoint's, by name; no rule means free."""

FREE = {name for name, rule in RULES.items() if rule in (Resume.FREE, Resume.NAMED)}
"""Settings that weights do not depend on."""
_CONTENTS_NAMES = ("data_path", "tokenizer_model")
_LATENTS = "multi_latent_attention"
_INTERPOLATION = "rotary_seq_len_interpolation_factor"
_STRETCH = ("rotary_scaling_factor", "mscale", "mscale_all_dim")
_ROTARY = (
    _INTERPOLATION,
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "use_rope_scaling",
    "rope_scaling_factor",
)


def settings(config: Config, schedule: LRSchedule | None = None) -> dict[str, Any]:
    """Return {name: value} of the settings of learning-rate curve and weight decay.

    A checkpoint's state.json has this dict under the key opt_param_scheduler.

    Args:
        config: the flags of this run.
        schedule: the curve in use; None for the curve of the flags.
    """
    schedule = schedule or LRSchedule.of(config)
    return {**dataclasses.asdict(schedule), "weight_decay": schedule.weight_decay.saved()}


def saved_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return {name: value} of all settings of a saved configuration, from all sections.

    Args:
        config: the configuration as JSON: {section: {name: value}}.
    """
    # Not by section: earlier versions had others, such as `train`.
    sections = [section for section in config.values() if isinstance(section, dict)]
    return {name: value for section in sections for name, value in section.items()}


def changed_settings(
    saved: Mapping[str, Any],
    contents: Mapping[str, str] | None,
    config: Config,
    here: Mapping[str, str] | None,
) -> dict[str, str]:
    """Return the settings that affect the results of training and differ from the saved run's.

    Args:
        saved: the configuration as it was saved. A field that is missing there is not compared.
            Nothing is compared if the configuration has no seq_length, as nothing was trained yet.
        contents: {name: digest} of data and tokenizer files, as saved; None if none was saved.
        config: the flags of this run.
        here: the same digests of this run. Digests are compared only if neither argument is None.
    Returns: {name of the setting: a text with both values}.
    """
    changed: dict[str, str] = {}
    fields = saved_fields(saved)
    if fields.get("seq_length") is None:
        return changed
    for name, rule in RULES.items():
        if rule != Resume.NAMED or name not in fields or not _decides(name, config):
            continue
        mine = config.value(name)
        its = fields[name]
        # Without a schedule of batch sizes the flag may be left out: it then follows from others.
        if name == "global_batch_size" and not config.batch.step_batch_size_schedule:
            mine = config.global_batch_size
            its = _batch(fields, _replicas(saved))
        # JSON has no tuples.
        if isinstance(mine, tuple):
            mine = list(mine)
            its = list(its)
        if mine != its:
            changed[name] = f"{flag(name)} is {mine}, and was {its}"
    changed |= _cut_otherwise(fields, _replicas(saved), config)
    if contents is not None and here is not None:
        changed |= _other_contents(contents, here)
        # The order depends on all settings above, and is compared only if they agree.
        if not changed and ORDER in here and here[ORDER] != contents.get(ORDER, here[ORDER]):
            name = "train_iters" if config.batch.train_samples is None else "train_samples"
            changed[name] = (
                f"{flag(name)} is {config.value(name)}, and was {fields.get(name)}: data that is "
                "read more than once is shuffled by how often, so the rest would not be the "
                "samples that are still unread"
            )
    return changed


def _other_contents(contents: Mapping[str, str], here: Mapping[str, str]) -> dict[str, str]:
    """Return {flag: text} for each flag whose files have other contents than before.

    Args:
        contents: {flag: digest of its files} of data and tokenizer, as saved.
        here: the same digests of this run.
    """
    changed = {
        name: f"{flag(name)} is another file or has other contents than the run trained with"
        for name in sorted((here.keys() | contents.keys()) - {TOKENS, ORDER})
        if here.get(name) != contents.get(name)
    }
    # Checkpoints of earlier versions do not have the tokens.
    mine = here.get(TOKENS, "")
    if "data_path" not in changed and mine != contents.get(TOKENS, mine):
        changed["data_path"] = (
            "--data-path has other tokens than the run trained with, in files of the same sizes"
        )
    return changed


def _decides(name: str, config: Config) -> bool:
    """Return whether this run's optimizer reads a setting; only Muon reads `muon_momentum`.

    Args:
        name: the setting's name; for one that is no field of OptimizerConfig the result is True.
    """
    read_by = note_of(OptimizerConfig, ReadBy).get(name)
    return read_by is None or not read_by.where(config)


def _cut_otherwise(saved: Mapping[str, Any], theirs: int, config: Config) -> dict[str, str]:
    """Return changes of microbatch size and number of replicas, if results depend on them.

    Dropout, for example, is drawn for each microbatch.

    Args:
        saved: the settings of the run that saved, by name.
        theirs: the number of data-parallel replicas of that run.
        config: the flags of this run.
    Returns: {name of the setting: a text with both values}.
    """
    changed: dict[str, str] = {}
    model = config.model
    data = config.data
    cyclic = data.dataloader_type == "cyclic"
    dropout = model.attention_dropout or model.hidden_dropout
    reasons = []
    # A mask is drawn for each microbatch.
    if dropout or "dropout" in str(model.per_layer_overrides):
        reasons.append("draws other dropout")
    # Each microbatch takes a mean over the tokens that count, and these differ in number.
    if data.eod_mask_loss and not config.batch.calculate_per_token_loss:
        reasons.append("weighs tokens otherwise under --eod-mask-loss")
    if cyclic:
        reasons.append("reads other samples under --dataloader-type cyclic")
    micro = config.batch.micro_batch_size
    its = saved.get("micro_batch_size")
    if reasons and its not in (None, micro):
        why = " and ".join(reasons)
        changed["micro_batch_size"] = f"--micro-batch-size is {micro}, and was {its}, which {why}"
    replicas = config.data_parallel_size
    if cyclic and replicas != theirs:
        changed["dataloader_type"] = (
            f"--dataloader-type cyclic reads other samples on {replicas} data-parallel ranks than "
            f"on {theirs}, as then"
        )
    return changed


def unnamed(changed: Mapping[str, str], config: Config, folder: str) -> list[str]:
    """Return an error that lists all settings which differ and are not in --override-on-load.

    Each name in --override-on-load that is no such setting gives an error of its own.

    Args:
        changed: {name of a setting: a text with both values}, from `changed_settings`.
        config: the flags of this run.
        folder: the checkpoint's name.
    """
    names = [name.strip("-").replace("-", "_") for name in config.checkpoint.override_on_load]
    known = {*_CONTENTS_NAMES, "train_iters", "train_samples"}
    for name, rule in RULES.items():
        if rule in (Resume.NAMED, Resume.MICROBATCH):
            known.add(name)
    there = " ".join(sorted(known))
    problems = [
        f"--override-on-load {name}: no setting that may be overridden so. There are {there}"
        for name in names
        if name not in known
    ]
    # That flag takes the whole curve from the command line, also these two of its rates.
    if config.optimizer.override_opt_param_scheduler:
        names += ["decoupled_lr", "decoupled_min_lr"]
    left = [name for name in changed if name not in names]
    if left:
        listed = "; ".join(changed[name] for name in left)
        override = " ".join(sorted({*names, *left} & known))
        problems.append(
            f"this would not be the training of {folder} any more: {listed}. Give its settings, or "
            f"to go on with yours add --override-on-load {override}"
        )
    return problems


def _batch(saved: Mapping[str, Any], replicas: int) -> int:
    """Return a saved run's global batch size: the flag's, or one microbatch for each replica.

    Args:
        saved: the settings of that run, by name.
        replicas: the number of data-parallel replicas of that run.
    """
    return int(saved["global_batch_size"] or saved["micro_batch_size"] * replicas)


def _replicas(saved: Mapping[str, Any]) -> int:
    """Return a saved run's number of data-parallel replicas.

    Args:
        saved: the configuration as JSON, section by section.
    """
    axes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    # Earlier versions lack the newer axes.
    sizes = (saved["parallel"].get(axis, 1) for axis in axes)
    # Rounded up: a replica may have lacked a rank.
    return -int(-saved["world_size"] // math.prod(sizes))


def resume_problems(
    model: Mapping[str, Any], scheduler: Mapping[str, Any] | None, config: Config, name: str
) -> list[str]:
    """Return an error for each setting with which a run cannot continue from a checkpoint.

    Args:
        model: the fields of the saved ModelConfig.
        scheduler: the result of `settings` in the checkpoint; None to compare only the model.
        config: the flags of this run.
        name: the checkpoint's name.
    """
    # A later version may have saved fields that this one does not know.
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    there = _meaning(ModelConfig(**{key: value for key, value in model.items() if key in known}))
    here = _meaning(config.model)
    problems = [
        f"{flag(key)} is {here[key]}, but {name} has {there[key]}"
        for key in here
        if key in there and there[key] != here[key]
    ]
    # Both flags say which of two curves to use, so these may differ.
    flags = config.optimizer
    chosen = flags.override_opt_param_scheduler or flags.use_checkpoint_opt_param_scheduler
    if scheduler is None or chosen:
        return problems
    mine = settings(config)
    # A setting that an older version did not have was at its default there.
    defaults = {field.name: field.default for field in dataclasses.fields(LRSchedule)}
    its = {key: scheduler.get(key, defaults[key]) for key in mine}
    differ = [f"{key} {its[key]} / {mine[key]}" for key in mine if its[key] != mine[key]]
    if differ:
        problems.append(
            f"{name} was trained with other settings (checkpoint / here, lengths in samples): "
            f"{', '.join(differ)}. Add --override-opt_param-scheduler to go on with the command "
            "line's, or --use-checkpoint-opt_param-scheduler with the checkpoint's"
        )
    return problems


def _meaning(model: ModelConfig) -> dict[str, Any]:
    """Return {name: value} of the settings on which weights depend, equal for equal models.

    A size that follows from others is filled in, such as kv_channels. A setting without effect in
    this model is removed, such as moe_router_topk without experts, or is set to its default.
    """
    fields = {name: value for name, value in dataclasses.asdict(model).items() if name not in FREE}
    # JSON has no tuples.
    for name, value in fields.items():
        if isinstance(value, list):
            fields[name] = tuple(value)
    fields |= {"window_size": model.window, "no_bias_gelu_fusion": model.erf_gelu}
    # A bias that all linear layers have need not be named.
    own = [name for name in get_args(Matrix) if model.has_bias(name)]
    fields["add_bias_to"] = tuple(name for name in own if not model.bias or name == "head")
    # A layer that differs may make use of a setting that the others ignore.
    if model.per_layer_overrides is None:
        if model.bias:
            fields["add_qkv_bias"] = False
        if not model.rotates and not model.multi_latent_attention:
            fields |= {name: getattr(ModelConfig, name) for name in _ROTARY}
        elif not model.use_rope_scaling:
            fields["rope_scaling_factor"] = ModelConfig.rope_scaling_factor
    # Sizes that may be left out, as far as they follow from given ones.
    if model.hidden_size:
        fields |= {
            "ffn_hidden_size": model.ffn,
            "kv_channels": model.head_dim,
            "num_query_groups": model.query_groups,
        }
        del fields["group_query_attention"]
    if model.per_layer_overrides is None:
        fields = _of_attention(model, fields)
    if model.num_layers and model.has_patterns:
        # A pattern may be given as a number or as a list.
        fields = _without(fields, PatternConfig.__dataclass_fields__)
        layers = range(model.num_layers)
        fields["patterns"] = [sorted(map(str, model.patterns_of(n).items())) for n in layers]
    if model.num_layers and model.hidden_size:
        delta = model.delta_settings(model.num_layers)
        fields = _without(_of_experts(model, fields), DeltaConfig.__dataclass_fields__) | delta
    return fields


def _of_attention(model: ModelConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields without attention's settings that have no effect in this model.

    Args:
        fields: fields of ModelConfig by name.
    """
    if not model.multi_latent_attention:
        return _of_heads(model, fields) | {_LATENTS: False}
    # Heads come from latents, which have settings of their own.
    of_heads = (
        "kv_channels",
        "num_query_groups",
        "add_qkv_bias",
        "rotary_interleaved",
        "use_rope_scaling",
        "rope_scaling_factor",
    )
    fields = _without(fields, of_heads)
    fields["latent_norm_epsilon"] = model.latent_norm_epsilon or model.norm_epsilon
    if model.rope_type == "rope":
        return fields | {"mscale": MLAConfig.mscale}
    return fields | {"rope_type": "yarn", "rotary_percent": 1.0}


def _of_heads(model: ModelConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Return `fields` of ModelConfig without the settings of latent attention.

    Settings of YaRN and of longrope are removed too, unless the model's positions use them.
    """
    names = [name for name in MLAConfig.__dataclass_fields__ if name not in _STRETCH]
    if model.position_embedding_type != "longrope":
        names += LongRopeConfig.__dataclass_fields__
    if model.position_embedding_type == "yarn":
        return _without(fields, names)
    return _without(fields, [*names, *_STRETCH, *RotaryConfig.__dataclass_fields__]) | {
        _INTERPOLATION: fields[_INTERPOLATION]
    }


def _of_experts(model: ModelConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with settings of experts in one form, whatever flags gave them.

    For example, a layer frequency becomes a list of layers. For a dense model the settings are
    removed.

    Args:
        fields: fields of ModelConfig by name.
    """
    if not model.has_experts:
        moe = [name for name in fields if name.startswith("moe_")]
        return _without(fields, moe) | {"num_experts": 0}
    layers = [model.has_experts_in(layer) for layer in range(model.layers)]
    # A frequency may be given as a number or as a list.
    fields |= {
        "moe_ffn_hidden_size": model.expert_ffn,
        "moe_layer_freq": [int(sparse) for sparse in layers],
        "moe_router_group_score_topk": model.group_scores,
    }
    if all(layers):
        del fields["ffn_hidden_size"]
    return fields


def _without(fields: dict[str, Any], names: Container[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}
