"""The table of `flags.idle`: fields that have nothing to act on, in which run, and what happens instead."""

from __future__ import annotations

from collections.abc import Callable

from megapipe.config import Config


def _one_chunk(config: Config) -> bool:
    par = config.parallel
    chunks = par.num_layers_per_virtual_pipeline_stage or par.num_virtual_stages_per_pipeline_rank
    name = par.pipeline_schedule or ("interleaved" if chunks or par.pipeline_model_parallel_layout else "1f1b")
    return "interleaved" not in name.lower()


def _one_stage(config: Config) -> bool:
    par = config.parallel
    several = par.num_layers_per_virtual_pipeline_stage or par.num_virtual_stages_per_pipeline_rank
    return par.pipeline_model_parallel_size == 1 and not (several or par.pipeline_schedule)


def _no_board(config: Config) -> bool:
    return not (config.log.tensorboard_dir or config.log.wandb_project)


def _not_shown(config: Config) -> bool:
    return config.log.log_format == "short" and _no_board(config) and config.log.metrics_file is None


def _no_rope(config: Config) -> bool:
    return config.model.position_embedding_type != "rope" and config.model.per_layer_overrides is None


def _no_warmup(config: Config) -> bool:
    t = config.train
    return not (t.lr_warmup_fraction or t.lr_warmup_iters or t.lr_warmup_samples)


_PROFILE = "profile_step_start profile_step_end profile_ranks pytorch_profiler_collect_shapes"
_MUON = "momentum no_split_qkv nesterov num_ns_steps coefficient_type scale_mode extra_scale_factor"
_NULL, _GPT2, _TIK, _HUGGING = "NullTokenizer", "GPT2BPETokenizer", "TikTokenizer", "HuggingFaceTokenizer"

ROWS: tuple[tuple[str, Callable[[Config], bool], str], ...] = (
    ("check_paths world_size", lambda c: not c.check.check, "the launch tells, without --check"),
    (
        "save_interval save_retain_interval save_keep_last save_failure async_save save_remove_earlier no_save_optim",
        lambda c: not c.checkpoint.save,
        "nothing is saved, without --save",
    ),
    ("log_progress", lambda c: not c.checkpoint.save, "there is no folder for progress.txt, without --save"),
    (
        "save_remove_earlier",
        lambda c: not (c.checkpoint.save_keep_last or c.checkpoint.save_retain_interval),
        "nothing is removed, without --save-keep-last or --save-retain-interval",
    ),
    (
        "no_load_optim finetune ckpt_step exit_on_missing_checkpoint override_on_load use_checkpoint_args "
        "override_opt_param_scheduler use_checkpoint_opt_param_scheduler",
        lambda c: not c.checkpoint.load,
        "nothing is loaded, without --load",
    ),
    (
        "sequence_parallel",
        lambda c: c.parallel.tensor_model_parallel_size == 1,
        "there is nothing to share, without --tensor-model-parallel-size of at least 2",
    ),
    (
        "cp_comm_type",
        lambda c: c.parallel.context_parallel_size == 1,
        "there is nothing to exchange, without --context-parallel-size of at least 2",
    ),
    (
        "no_overlap_p2p_communication use_ring_exchange_p2p use_tp_pp_dp_mapping",
        lambda c: c.parallel.pipeline_model_parallel_size == 1,
        "there is one pipeline rank, without --pipeline-model-parallel-size of at least 2",
    ),
    (
        "no_overlap_p2p_communication",
        lambda c: c.parallel.use_ring_exchange_p2p,
        "messages go as ring exchanges, with --use-ring-exchange-p2p",
    ),
    (
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        _one_stage,
        "one stage has all layers, without --pipeline-model-parallel-size of at least 2",
    ),
    (
        "microbatch_group_size_per_virtual_pipeline_stage",
        _one_chunk,
        "there is no chunk to visit, without several stages on a rank",
    ),
    (
        "use_distributed_optimizer overlap_grad_reduce overlap_param_gather grad_reduce_in_bf16 ddp_bucket_size "
        "ddp_num_buckets",
        lambda c: c.weight_replicas <= 1,
        "there is one copy of the weights, without several data- or context-parallel ranks",
    ),
    (
        "check_weight_hash_across_dp_replicas_interval",
        lambda c: c.world_size == 1,
        "there is no replica, without several ranks",
    ),
    (
        "ddp_bucket_size ddp_num_buckets",
        lambda c: not c.parallel.overlap_grad_reduce,
        "all is reduced at the end, without --overlap-grad-reduce",
    ),
    (
        "post_validation_after",
        lambda c: not c.parallel.enable_optimizer_post_validation,
        "each update waits for the norm, without --enable-optimizer-post-validation",
    ),
    (
        "num_query_groups",
        lambda c: not c.model.group_query_attention and c.model.per_layer_overrides is None,
        "each query head has its own key and value, without --group-query-attention",
    ),
    (
        "rotary_base rotary_percent rotary_interleaved use_rope_scaling",
        _no_rope,
        "nothing is rotated, without --position-embedding-type rope",
    ),
    (
        "recompute_num_layers recompute_method",
        lambda c: not (c.model.recompute_granularity or c.model.recompute_activations),
        "nothing is computed again, without --recompute-granularity full",
    ),
    (
        "no_bias_gelu_fusion",
        lambda c: c.model.gated or c.model.squared_relu,
        "the MLP has another activation, without GELU",
    ),
    (
        "no_bias_gelu_fusion",
        lambda c: c.model.disable_bias_linear and c.model.per_layer_overrides is None,
        "GELU has its erf form anyway, with --disable-bias-linear",
    ),
    (
        "add_qkv_bias",
        lambda c: not c.model.disable_bias_linear and c.model.per_layer_overrides is None,
        "all projections have a bias, without --disable-bias-linear",
    ),
    (
        "attention_backend",
        lambda c: c.parallel.context_parallel_size > 1 and "a2a" not in c.model.cp_comm_type,
        "context-parallel ranks compute attention in blocks of plain torch, without --cp-comm-type a2a",
    ),
    (
        "init_method_std",
        lambda c: c.model.init_method_xavier_uniform and c.model.embedding_init_method_std is None,
        "the shape of a matrix says it, with --init-method-xavier-uniform",
    ),
    (
        "make_vocab_size_divisible_by",
        lambda c: c.model.padded_vocab_size is not None,
        "the rows are given, with --padded-vocab-size",
    ),
    ("sgd_momentum", lambda c: c.train.optimizer in ("adam", "muon"), "nothing reads it, without --optimizer sgd"),
    (
        " ".join(f"muon_{name}" for name in _MUON.split()),
        lambda c: c.train.optimizer in ("adam", "sgd"),
        "nothing reads it, without --optimizer muon",
    ),
    ("adam_beta1 adam_beta2 adam_eps", lambda c: c.train.optimizer == "sgd", "sgd has none of them"),
    (
        "use_precision_aware_optimizer",
        lambda c: (
            {c.train.main_grads_dtype, c.train.main_params_dtype, c.train.exp_avg_dtype, c.train.exp_avg_sq_dtype}
            == {"fp32"}
        ),
        "all is kept in float32, without --main-grads-dtype or another type",
    ),
    (
        "weight_decay",
        lambda c: c.train.weight_decay_incr_style != "constant",
        "it grows to --end-weight-decay, without --weight-decay-incr-style constant",
    ),
    ("decoupled_min_lr", lambda c: c.train.decoupled_lr is None, "one rate for all, without --decoupled-lr"),
    (
        "min_lr decoupled_min_lr",
        lambda c: c.train.lr_decay_style == "constant",
        "the rate does not fall, with --lr-decay-style constant",
    ),
    (
        "lr_decay_iters lr_decay_samples",
        lambda c: c.train.lr_decay_style == "constant" and c.train.lr_warmup_fraction is None,
        "the rate does not fall, with --lr-decay-style constant",
    ),
    ("lr_warmup_init", _no_warmup, "the rate starts at --lr, without a warm-up"),
    (
        "initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        lambda c: not c.train.dynamic_loss_scale,
        "the scale does not move, without a dynamic loss scale (--fp16 without --loss-scale)",
    ),
    ("exit_signal", lambda c: not c.train.exit_signal_handler, "no signal is caught, without --exit-signal-handler"),
    (
        "error_injection_rate",
        lambda c: c.train.rerun_mode == "disabled",
        "no step is run again, without --rerun-mode validate_results",
    ),
    (
        "error_injection_type",
        lambda c: not c.train.error_injection_rate,
        "nothing is injected, without --error-injection-rate",
    ),
    (
        "vocab_size",
        lambda c: c.data.tokenizer not in (_NULL, _TIK),
        f"the tokenizer knows its size, without {_NULL} or {_TIK}",
    ),
    ("null_tokenizer_eod_id", lambda c: c.data.tokenizer != _NULL, f"it has its own, without {_NULL}"),
    (
        "tokenizer_model",
        lambda c: c.data.tokenizer in (_NULL, _GPT2),
        "it is not read, without a tokenizer that reads it",
    ),
    ("vocab_file merge_file", lambda c: c.data.tokenizer != _GPT2, f"it is not read, without {_GPT2}"),
    (
        "tokenizer_hf_no_include_special_tokens",
        lambda c: c.data.tokenizer != _HUGGING,
        f"a text gets none, without {_HUGGING}",
    ),
    (
        "tiktoken_pattern tiktoken_num_special_tokens",
        lambda c: c.data.tokenizer != _TIK,
        f"there is nothing to cut, without {_TIK}",
    ),
    (
        "no_data_sharding",
        lambda c: c.data.dataloader_type != "cyclic",
        "samples are read in order, without --dataloader-type cyclic",
    ),
    (
        "eval_global_batch_size eval_micro_batch_size start_eval_at_iter eval_iters",
        lambda c: c.data.eval_interval is None and not c.data.skip_train,
        "nothing is evaluated, without --eval-interval",
    ),
    (
        "eval_global_batch_size eval_micro_batch_size start_eval_at_iter eval_interval",
        lambda c: c.data.eval_iters <= 0,
        "nothing is evaluated, without --eval-iters of at least 1",
    ),
    (
        "timing_log_option",
        lambda c: not c.log.timing_log_level,
        "no timers are told, without --timing-log-level 1 or 2",
    ),
    (
        "log_timers_to_tensorboard",
        lambda c: not c.log.timing_log_level,
        "iteration-time alone is in TensorBoard, without --timing-log-level 1 or 2",
    ),
    (
        "log_throughput log_params_norm log_num_zeros_in_grad",
        _not_shown,
        "the line has no place for it, with --log-format short",
    ),
    (
        "tensorboard_log_interval log_validation_ppl_to_tensorboard log_world_size_to_tensorboard "
        "log_memory_to_tensorboard log_timers_to_tensorboard",
        _no_board,
        "nothing is drawn, without --tensorboard-dir or --wandb-project",
    ),
    ("tensorboard_queue_size", lambda c: not c.log.tensorboard_dir, "nothing is held back, without --tensorboard-dir"),
    (
        "wandb_exp_name wandb_entity wandb_save_dir",
        lambda c: not c.log.wandb_project,
        "nothing is sent, without --wandb-project",
    ),
    (
        f"profile {_PROFILE} pytorch_profiler_collect_callstack",
        lambda c: not c.log.use_pytorch_profiler,
        "nothing is recorded, without --use-pytorch-profiler",
    ),
    (
        f"use_pytorch_profiler {_PROFILE} pytorch_profiler_collect_callstack",
        lambda c: not c.log.profile,
        "nothing is recorded, without --profile",
    ),
)
"""The text ends in what there is, or is not. Of several rows of a field the first that fits is told."""
