"""Checks of the length of a run, its learning rates, the optimizer and the loss scale."""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.checks.inputs import answer, ask
from megapipe.config import Config
from megapipe.config.notes import flag
from megapipe.optim.lr import LRSchedule
from megapipe.optim.traits import rounding_problem, split_problem, traits_of


def length_problems(config: Config) -> Iterator[str]:
    """Yield problems of the length of the run: none is given, or two flags use different units.

    The units are iterations and samples: --train-iters does not go with --lr-decay-samples.
    """
    batch = config.batch
    if batch.train_iters is None and batch.train_samples is None:
        yield "--train-iters (or --train-samples) is missing, for example --train-iters 1000"
    # Both lengths together are refused by a note of their fields.
    if batch.train_iters is not None and batch.train_samples is not None:
        return
    mine = "iters" if batch.train_samples is None else "samples"
    other = "samples" if mine == "iters" else "iters"
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if value := getattr(config.optimizer, f"{name}_{other}"):
            yield (
                f"{flag(f'{name}_{other}')} {value} counts {other}, but --train-{mine} counts "
                f"{mine}. Use {flag(f'{name}_{mine}')}, or --train-{other}."
            )


def learning_rate_problems(config: Config) -> Iterator[str]:
    """Yield problems of learning rates above the peak, and of a curve that does not fit the run."""
    flags = config.optimizer
    batch = config.batch
    peak = flags.lr
    for low, name in ((flags.min_lr, "--min-lr"), (flags.lr_warmup_init, "--lr-warmup-init")):
        if peak is not None and low > peak:
            yield f"{name} {low:g} is above --lr {peak:g}. Use {name} {peak / 10:g}."
    ends = flags.decoupled_lr
    low = flags.min_lr if flags.decoupled_min_lr is None else flags.decoupled_min_lr
    if ends is not None and low > ends:
        yield (
            f"--decoupled-min-lr {low:g} is above --decoupled-lr {ends:g}. "
            f"Use --decoupled-min-lr {ends / 10:g}."
        )
    # The curve needs a batch, and the length in one unit.
    fits = batch.micro_batch_size and config.data_parallel_size
    one_length = (batch.train_iters is None) != (batch.train_samples is None)
    if peak is not None and fits and one_length:
        yield from ask(lambda: LRSchedule.of(config))


def training_problems(config: Config) -> Iterator[str]:
    """Yield problems of sequence parallelism, the loss scale and the optimizer."""
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
