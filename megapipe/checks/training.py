"""Flags of precision and of sequence parallelism that need or exclude each other."""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.checks.inputs import ask
from megapipe.config import Config, TrainConfig
from megapipe.config.notes import flag
from megapipe.optim.rules import find_rule, rounding_problem, split_problem


def training_problems(config: Config) -> Iterator[str]:
    """Settings that would be without effect or contradict each other."""
    t, s, tp = config.train, config.train.seq_length, config.parallel.tensor_model_parallel_size
    if config.model.sequence_parallel and s and s % tp:
        yield (
            f"--sequence-parallel splits --seq-length {s} over --tensor-model-parallel-size {tp}, which does not "
            f"divide it. Use --seq-length {s + -s % tp}, or leave --sequence-parallel out."
        )
    yield from _optimizer_problems(config)
    par = config.parallel
    if par.overlap_param_gather and not (par.overlap_grad_reduce and par.splits_optimizer):
        yield (
            "--overlap-param-gather gathers what --use-distributed-optimizer splits, beside what --overlap-grad-reduce "
            "reduces. Add both, or leave --overlap-param-gather out."
        )
    if par.ddp_bucket_size is not None and par.ddp_num_buckets is not None:
        yield "--ddp-bucket-size and --ddp-num-buckets say the same. Leave one out."
    yield from _post_validation_problems(config)
    yield from _sharding_problems(config)
    if t.bf16 and t.fp16:
        yield "--bf16 and --fp16 are two types for the same weights. Leave one out."
    if t.grad_reduce_in_bf16 and not t.bf16:
        yield "--grad-reduce-in-bf16 has no effect without --bf16. Add it, or leave --grad-reduce-in-bf16 out."
    yield from _dtype_problems(t)
    if t.dynamic_loss_scale and t.initial_loss_scale < t.min_loss_scale:
        yield (
            f"--initial-loss-scale {t.initial_loss_scale:g} is below --min-loss-scale {t.min_loss_scale:g}. "
            f"Use --initial-loss-scale {t.min_loss_scale:g}."
        )


def _dtype_problems(t: TrainConfig) -> Iterator[str]:
    """Problems with what the optimizer keeps in 16 bits."""
    names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    asked = [f"{flag(name)} bf16" for name in names if getattr(t, name) == "bf16"]
    if asked and not t.use_precision_aware_optimizer:
        yield f"{' and '.join(asked)} changes the numbers; say so with --use-precision-aware-optimizer."
    if not t.bf16 and (beyond := [one for one in asked if one.startswith("--main")]):
        yield f"{' and '.join(beyond)} is for weights of --bf16. Add it, or leave {' and '.join(beyond)} out."


def _post_validation_problems(config: Config) -> Iterator[str]:
    """Settings that must be known before a rank updates, or between two steps."""
    flag, t = "--enable-optimizer-post-validation", config.train
    if not config.parallel.enable_optimizer_post_validation:
        return
    for other, given, why in (
        ("--calculate-per-token-loss", t.calculate_per_token_loss, "divides by the tokens of the whole batch"),
        ("--error-injection-rate", t.error_injection_rate, "runs a step twice"),
        ("--check-for-spiky-loss", t.check_for_spiky_loss, "must know the loss of the whole batch"),
        ("--freeze-all-layers", t.freeze_all_layers, "updates nothing"),
        ("--reschedule-after", config.parallel.reschedule_after is not None, "times steps that end by themselves"),
    ):
        if given:
            yield f"{flag} updates before other ranks are done, and {other} {why}. Leave one of them out."


def _sharding_problems(config: Config) -> Iterator[str]:
    """Settings that need gradients or weights whole behind a run of passes."""
    par = config.parallel
    by, shards = par.splits_by, config.weight_replicas > 1
    if par.use_megatron_fsdp and par.use_torch_fsdp2:
        yield "--use-megatron-fsdp and --use-torch-fsdp2 say the same. Leave one out."
    if par.shards_grads and shards and par.enable_optimizer_post_validation:
        yield (
            f"--enable-optimizer-post-validation repeats forwards after a wrong guess, and {by} lets go of what they "
            "need. Leave one of them out."
        )
    if par.shards_grads and shards and par.reschedule_after is not None:
        yield (
            f"--reschedule-after {par.reschedule_after} times passes, not what {by} gathers and reduces beside them. "
            "Leave one of them out."
        )
    every = config.train.check_weight_hash_across_dp_replicas_interval
    if ((par.shards_weights and shards) or config.gathers_fp8) and every:
        leaves = "--fp8-param-gather" if config.gathers_fp8 else by
        yield (
            f"--check-weight-hash-across-dp-replicas-interval {every} compares weights that {leaves} leaves no rank "
            "whole. "
            "Leave one of them out."
        )


def _optimizer_problems(config: Config) -> Iterator[str]:
    if unknown := ask(lambda: find_rule(config.train)):
        yield from unknown
        return
    rule = find_rule(config.train)
    if config.parallel.splits_optimizer and (problem := split_problem(config.train, rule, config.parallel.splits_by)):
        yield problem
    if config.train.use_precision_aware_optimizer and (problem := rounding_problem(config.train, rule)):
        yield problem
