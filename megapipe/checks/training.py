"""Flags of precision and of sequence parallelism that need or exclude each other."""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.checks.inputs import ask
from megapipe.config import Config
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
    if t.dynamic_loss_scale and t.initial_loss_scale < t.min_loss_scale:
        yield (
            f"--initial-loss-scale {t.initial_loss_scale:g} is below --min-loss-scale {t.min_loss_scale:g}. "
            f"Use --initial-loss-scale {t.min_loss_scale:g}."
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
