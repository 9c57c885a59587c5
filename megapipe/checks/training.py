"""Flags of precision and of sequence parallelism that need or exclude each other."""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.checks.inputs import ask
from megapipe.config import Config
from megapipe.optim.rules import find_rule, rounding_problem, split_problem


def training_problems(config: Config) -> Iterator[str]:
    """Settings that would be without effect or contradict each other."""
    s, tp = config.batch.seq_length, config.parallel.tensor_model_parallel_size
    if config.model.sequence_parallel and s and s % tp:
        yield (
            f"--sequence-parallel splits --seq-length {s} over --tensor-model-parallel-size {tp}, which does not "
            f"divide it. Use --seq-length {s + -s % tp}, or leave --sequence-parallel out."
        )
    yield from _optimizer_problems(config)
    first, least = config.precision.initial_loss_scale, config.precision.min_loss_scale
    if config.precision.dynamic_loss_scale and first < least:
        yield (
            f"--initial-loss-scale {first:g} is below --min-loss-scale {least:g}. Use --initial-loss-scale {least:g}."
        )


def _optimizer_problems(config: Config) -> Iterator[str]:
    if unknown := ask(lambda: find_rule(config.optimizer)):
        yield from unknown
        return
    rule = find_rule(config.optimizer)
    if config.parallel.splits_optimizer and (
        problem := split_problem(config.optimizer, rule, config.parallel.splits_by)
    ):
        yield problem
    if config.optimizer.use_precision_aware_optimizer and (problem := rounding_problem(config.optimizer, rule)):
        yield problem
