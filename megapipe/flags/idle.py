"""Combinations that Megatron-LM ignores: a flag that is given and, beside the others, has nothing to act on.

Each is accepted with one line at start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import NamedTuple

from megapipe.config import Config


class Idle(NamedTuple):
    """section and field of the flag; without: what is missing, in words, a key of LACKS; what happens instead."""

    section: str
    field: str
    without: str
    instead: str


def _one_chunk(config: Config) -> bool:
    par = config.parallel
    chunks = par.num_layers_per_virtual_pipeline_stage or par.num_virtual_stages_per_pipeline_rank
    name = par.pipeline_schedule or ("interleaved" if chunks or par.pipeline_model_parallel_layout else "1f1b")
    return "interleaved" not in name.lower()


_DYNAMIC = "a dynamic loss scale (--fp16 without --loss-scale)"
_RETAIN = "--save-keep-last or --save-retain-interval"
_NULL, _GPT2, _TIK = "NullTokenizer", "GPT2BPETokenizer", "TikTokenizer"

LACKS: Mapping[str, Callable[[Config], bool]] = {
    "--save": lambda c: not c.checkpoint.save,
    "--load": lambda c: not c.checkpoint.load,
    _RETAIN: lambda c: not (c.checkpoint.save_keep_last or c.checkpoint.save_retain_interval),
    "--tensor-model-parallel-size of at least 2": lambda c: c.parallel.tensor_model_parallel_size == 1,
    "--context-parallel-size of at least 2": lambda c: c.parallel.context_parallel_size == 1,
    "--group-query-attention": lambda c: not c.model.group_query_attention and c.model.per_layer_overrides is None,
    "--overlap-grad-reduce": lambda c: not c.parallel.overlap_grad_reduce,
    "--recompute-granularity full": lambda c: not (c.model.recompute_granularity or c.model.recompute_activations),
    "GELU": lambda c: c.model.gated or c.model.squared_relu,
    "--cp-comm-type a2a": lambda c: c.parallel.context_parallel_size > 1 and "a2a" not in c.model.cp_comm_type,
    "--timing-log-level 1 or 2": lambda c: not c.log.timing_log_level,
    "--wandb-project": lambda c: not c.log.wandb_project,
    "--use-pytorch-profiler": lambda c: not c.log.use_pytorch_profiler,
    f"{_NULL} or {_TIK}": lambda c: c.data.tokenizer not in (_NULL, _TIK),
    "--dataloader-type cyclic": lambda c: c.data.dataloader_type != "cyclic",
    "a tokenizer that reads it": lambda c: c.data.tokenizer in (_NULL, _GPT2),
    _GPT2: lambda c: c.data.tokenizer != _GPT2,
    _TIK: lambda c: c.data.tokenizer != _TIK,
    "--eval-interval": lambda c: c.data.eval_interval is None and not c.data.skip_train,
    _NULL: lambda c: c.data.tokenizer != _NULL,
    "--weight-decay-incr-style constant": lambda c: c.train.weight_decay_incr_style != "constant",
    "--decoupled-lr": lambda c: c.train.decoupled_lr is None,
    "several stages on a rank": _one_chunk,
    "--exit-signal-handler": lambda c: not c.train.exit_signal_handler,
    "--rerun-mode validate_results": lambda c: c.train.rerun_mode == "disabled",
    "--error-injection-rate": lambda c: not c.train.error_injection_rate,
    _DYNAMIC: lambda c: not c.train.dynamic_loss_scale,
}
"""What a flag may need beside it, and whether that is missing."""

_ROWS: tuple[tuple[str, str, str], ...] = (
    ("save_interval save_retain_interval save_keep_last save_failure async_save", "--save", "nothing is saved"),
    ("save_remove_earlier", _RETAIN, "nothing is removed"),
    ("no_load_optim finetune ckpt_step exit_on_missing_checkpoint override_on_load", "--load", "nothing is loaded"),
    ("sequence_parallel", "--tensor-model-parallel-size of at least 2", "there is nothing to share"),
    ("cp_comm_type", "--context-parallel-size of at least 2", "there is nothing to exchange"),
    ("num_query_groups", "--group-query-attention", "each query head has its own key and value"),
    ("ddp_bucket_size ddp_num_buckets", "--overlap-grad-reduce", "all is reduced at the end"),
    ("recompute_num_layers recompute_method", "--recompute-granularity full", "nothing is computed again"),
    ("no_bias_gelu_fusion", "GELU", "the MLP has another activation"),
    ("attention_backend", "--cp-comm-type a2a", "context-parallel ranks compute attention in blocks of plain torch"),
    ("log_progress", "--save", "there is no folder for progress.txt"),
    ("timing_log_option", "--timing-log-level 1 or 2", "no timers are told"),
    ("log_timers_to_tensorboard", "--timing-log-level 1 or 2", "iteration-time alone is in TensorBoard"),
    ("wandb_exp_name wandb_entity wandb_save_dir", "--wandb-project", "nothing is sent"),
    (
        "profile pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack",
        "--use-pytorch-profiler",
        "nothing is recorded",
    ),
    ("vocab_size", f"{_NULL} or {_TIK}", "the tokenizer knows its size"),
    ("no_data_sharding", "--dataloader-type cyclic", "samples are read in order"),
    ("tokenizer_model", "a tokenizer that reads it", "it is not read"),
    ("vocab_file merge_file", _GPT2, "it is not read"),
    ("tiktoken_pattern tiktoken_num_special_tokens", _TIK, "there is nothing to cut"),
    ("eval_global_batch_size eval_micro_batch_size start_eval_at_iter", "--eval-interval", "nothing is evaluated"),
    ("null_tokenizer_eod_id", _NULL, "it has its own"),
    ("weight_decay", "--weight-decay-incr-style constant", "it grows to --end-weight-decay"),
    ("decoupled_min_lr", "--decoupled-lr", "one rate for all"),
    ("microbatch_group_size_per_virtual_pipeline_stage", "several stages on a rank", "there is no chunk to visit"),
    ("exit_signal", "--exit-signal-handler", "no signal is caught"),
    ("error_injection_rate", "--rerun-mode validate_results", "no step is run again"),
    ("error_injection_type", "--error-injection-rate", "nothing is injected"),
    ("initial_loss_scale min_loss_scale loss_scale_window hysteresis", _DYNAMIC, "the scale does not move"),
)
_DEFAULTS = Config()
_SECTION = {f.name: s for s, section in vars(_DEFAULTS).items() if is_dataclass(section) for f in fields(section)}
IDLE = tuple(Idle(_SECTION[name], name, *row) for names, *row in _ROWS for name in names.split())


def idle(config: Config) -> list[tuple[str, str]]:
    """Flags that were given and change nothing beside the others, each with what happens instead."""
    found = []
    for section, field, without, instead in _rows(config):
        name, value = f"--{field.replace('_', '-')}", getattr(getattr(config, section), field)
        said = " ".join(value) if isinstance(value, tuple) else value
        found.append((name if value is True else f"{name} {said}", f"{instead}, without {without}"))
    if config.data.eval_iters < 0:
        found.append((f"--eval-iters {config.data.eval_iters}", "nothing is evaluated"))
    return found


def without_idle(config: Config) -> Config:
    """The same run without the flags that have nothing to act on."""
    for section, field, *_ in list(_rows(config)):
        default = getattr(getattr(_DEFAULTS, section), field)
        config = replace(config, **{section: replace(getattr(config, section), **{field: default})})
    return config


def _rows(config: Config) -> Iterator[Idle]:
    for row in IDLE:
        given = getattr(getattr(config, row.section), row.field) != getattr(getattr(_DEFAULTS, row.section), row.field)
        if given and LACKS[row.without](config):
            yield row
