"""Checks of the optimizer, the loss scale and sequence parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.checks.inputs import answer
from megapipe.config import Config
from megapipe.optim.traits import rounding_problem, split_problem, traits_of


def training_problems(config: Config) -> Iterator[str]:
    """Yield the problems of flags that have no effect together or contradict each other."""
    length = config.batch.seq_length
    tp = config.parallel.tensor_model_parallel_size
    if config.model.sequence_parallel and length and length % tp:
        yield (
            f"--sequence-parallel splits --seq-length {length} over "
            f"--tensor-model-parallel-size {tp}, which does not divide it. "
            f"Use --seq-length {length + -length % tp}, or leave --sequence-parallel out."
        )
    yield from _optimizer_problems(config)
    first = config.precision.initial_loss_scale
    least = config.precision.min_loss_scale
    if config.precision.dynamic_loss_scale and first < least:
        yield (
            f"--initial-loss-scale {first:g} is below --min-loss-scale {least:g}. "
            f"Use --initial-loss-scale {least:g}."
        )


def _optimizer_problems(config: Config) -> Iterator[str]:
    flags = config.optimizer
    # --optimizer may name a function of the user's, which is imported here.
    traits, unknown = answer(lambda: traits_of(flags))
    if traits is None:
        yield from unknown
        return
    problems = []
    if config.parallel.splits_optimizer:
        problems.append(split_problem(flags, traits.elementwise, config.parallel.splits_by))
    if flags.use_precision_aware_optimizer:
        problems.append(rounding_problem(flags, traits.may_round))
    yield from filter(None, problems)
