"""Combinations that Megatron-LM ignores: a flag that is given and, beside the others, has nothing to act on.

Each is accepted with one line at start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from megapipe.config import CheckpointConfig, Config, DataConfig, LogConfig, ModelConfig, ParallelConfig, TrainConfig


class Idle(NamedTuple):
    """section and field of the flag; without: what is missing, in words; when; what happens instead."""

    section: str
    field: str
    without: str
    when: Callable[[Config], bool]
    instead: str


def _tokenizer_is(*kinds: str) -> Callable[[Config], bool]:
    return lambda config: config.data.tokenizer in kinds


def _not(rule: Callable[[Config], bool]) -> Callable[[Config], bool]:
    return lambda config: not rule(config)


def _no_load(config: Config) -> bool:
    return not config.checkpoint.load


def _kept(config: Config) -> bool:
    return config.model.recompute_granularity is None and not config.model.recompute_activations


def _one_reduction(config: Config) -> bool:
    return not config.parallel.overlap_grad_reduce


def _one_chunk(config: Config) -> bool:
    par = config.parallel
    chunks = par.num_layers_per_virtual_pipeline_stage or par.num_virtual_stages_per_pipeline_rank
    name = par.pipeline_schedule or ("interleaved" if chunks or par.pipeline_model_parallel_layout else "1f1b")
    return "interleaved" not in name.lower()


def _no_evaluation(config: Config) -> bool:
    return config.data.eval_interval is None and not config.data.skip_train


_NOTHING_LOADED = "nothing is loaded"
_DYNAMIC = "a dynamic loss scale (--fp16 without --loss-scale)"

IDLE: tuple[Idle, ...] = (
    *(
        Idle("checkpoint", name, "--save", lambda c: not c.checkpoint.save, "nothing is saved")
        for name in ("save_interval", "save_retain_interval", "save_keep_last", "save_failure", "async_save")
    ),
    Idle("checkpoint", "no_load_optim", "--load", _no_load, _NOTHING_LOADED),
    Idle("checkpoint", "finetune", "--load", _no_load, _NOTHING_LOADED),
    Idle("checkpoint", "ckpt_step", "--load", _no_load, _NOTHING_LOADED),
    Idle("checkpoint", "exit_on_missing_checkpoint", "--load", _no_load, _NOTHING_LOADED),
    Idle("checkpoint", "override_on_load", "--load", _no_load, _NOTHING_LOADED),
    Idle(
        "model",
        "sequence_parallel",
        "--tensor-model-parallel-size of at least 2",
        lambda c: c.parallel.tensor_model_parallel_size == 1,
        "there is nothing to share",
    ),
    Idle(
        "model",
        "cp_comm_type",
        "--context-parallel-size of at least 2",
        lambda c: c.parallel.context_parallel_size == 1,
        "there is nothing to exchange",
    ),
    Idle(
        "model",
        "num_query_groups",
        "--group-query-attention",
        lambda c: not c.model.group_query_attention and c.model.per_layer_overrides is None,
        "each query head has its own key and value",
    ),
    *(
        Idle("parallel", name, "--overlap-grad-reduce", _one_reduction, "all is reduced at the end")
        for name in ("ddp_bucket_size", "ddp_num_buckets")
    ),
    Idle("model", "recompute_num_layers", "--recompute-granularity full", _kept, "nothing is computed again"),
    Idle("model", "recompute_method", "--recompute-granularity full", _kept, "nothing is computed again"),
    Idle(
        "model",
        "no_bias_gelu_fusion",
        "GELU",
        lambda c: c.model.gated or c.model.squared_relu,
        "the MLP has another activation",
    ),
    Idle(
        "model",
        "attention_backend",
        "--cp-comm-type a2a",
        lambda c: c.parallel.context_parallel_size > 1 and "a2a" not in c.model.cp_comm_type,
        "context-parallel ranks compute attention in blocks of plain torch",
    ),
    Idle("log", "log_progress", "--save", lambda c: not c.checkpoint.save, "there is no folder for progress.txt"),
    *(
        Idle("log", name, "--timing-log-level 1 or 2", lambda c: not c.log.timing_log_level, instead)
        for name, instead in (
            ("timing_log_option", "no timers are told"),
            ("log_timers_to_tensorboard", "iteration-time alone is in TensorBoard"),
        )
    ),
    *(
        Idle("log", name, "--wandb-project", lambda c: not c.log.wandb_project, "nothing is sent")
        for name in ("wandb_exp_name", "wandb_entity", "wandb_save_dir")
    ),
    *(
        Idle("log", name, "--use-pytorch-profiler", lambda c: not c.log.use_pytorch_profiler, "nothing is recorded")
        for name in ("profile", "pytorch_profiler_collect_shapes", "pytorch_profiler_collect_callstack")
    ),
    Idle(
        "data",
        "vocab_size",
        "NullTokenizer or TikTokenizer",
        _not(_tokenizer_is("NullTokenizer", "TikTokenizer")),
        "the tokenizer knows its size",
    ),
    Idle(
        "data",
        "no_data_sharding",
        "--dataloader-type cyclic",
        lambda c: c.data.dataloader_type != "cyclic",
        "samples are read in order",
    ),
    Idle(
        "data",
        "tokenizer_model",
        "a tokenizer that reads it",
        _tokenizer_is("NullTokenizer", "GPT2BPETokenizer"),
        "it is not read",
    ),
    *(
        Idle("data", name, "GPT2BPETokenizer", _not(_tokenizer_is("GPT2BPETokenizer")), "it is not read")
        for name in ("vocab_file", "merge_file")
    ),
    *(
        Idle("data", name, "TikTokenizer", _not(_tokenizer_is("TikTokenizer")), "there is nothing to cut")
        for name in ("tiktoken_pattern", "tiktoken_num_special_tokens")
    ),
    *(
        Idle("data", name, "--eval-interval", _no_evaluation, "nothing is evaluated")
        for name in ("eval_global_batch_size", "eval_micro_batch_size", "start_eval_at_iter")
    ),
    Idle("data", "null_tokenizer_eod_id", "NullTokenizer", _not(_tokenizer_is("NullTokenizer")), "it has its own"),
    Idle(
        "train",
        "weight_decay",
        "--weight-decay-incr-style constant",
        lambda c: c.train.weight_decay_incr_style != "constant",
        "it grows to --end-weight-decay",
    ),
    Idle("train", "decoupled_min_lr", "--decoupled-lr", lambda c: c.train.decoupled_lr is None, "one rate for all"),
    Idle(
        "parallel",
        "microbatch_group_size_per_virtual_pipeline_stage",
        "several stages on a rank",
        _one_chunk,
        "there is no chunk to visit",
    ),
    Idle(
        "train",
        "exit_signal",
        "--exit-signal-handler",
        lambda c: not c.train.exit_signal_handler,
        "no signal is caught",
    ),
    Idle(
        "train",
        "error_injection_rate",
        "--rerun-mode validate_results",
        lambda c: c.train.rerun_mode == "disabled",
        "no step is run again",
    ),
    Idle(
        "train",
        "error_injection_type",
        "--error-injection-rate",
        lambda c: not c.train.error_injection_rate,
        "nothing is injected",
    ),
    *(
        Idle("train", name, _DYNAMIC, lambda c: not c.train.dynamic_loss_scale, "the scale does not move")
        for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    ),
)

_DEFAULTS = {
    "checkpoint": CheckpointConfig(),
    "data": DataConfig(),
    "log": LogConfig(),
    "model": ModelConfig(),
    "parallel": ParallelConfig(),
    "train": TrainConfig(),
}


def idle(config: Config) -> list[tuple[str, str]]:
    """Flags that were given and change nothing beside the others, each with what happens instead."""
    found = []
    for section, field, without, _, instead in _rows(config):
        name, value = f"--{field.replace('_', '-')}", getattr(getattr(config, section), field)
        said = " ".join(value) if isinstance(value, tuple) else value
        found.append((name if value is True else f"{name} {said}", f"{instead}, without {without}"))
    if config.data.eval_iters < 0:
        found.append((f"--eval-iters {config.data.eval_iters}", "nothing is evaluated"))
    return found


def without_idle(config: Config) -> Config:
    """The same run without the flags that have nothing to act on."""
    for section, field, *_ in list(_rows(config)):
        default = getattr(_DEFAULTS[section], field)
        config = replace(config, **{section: replace(getattr(config, section), **{field: default})})
    return config


def _rows(config: Config) -> Iterator[Idle]:
    for row in IDLE:
        if getattr(getattr(config, row.section), row.field) != getattr(_DEFAULTS[row.section], row.field):
            yield from (row,) if row.when(config) else ()
