"""The batch and the length of a run. A batch is constant, or grows with the samples consumed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from megapipe.config.notes import ANY, FREE, FROM_1, MICROBATCH, NAMED, Range, Required, excludes
from megapipe.errors import ConfigError

RAMP = "--rampup-batch-size"
STEPS = "--step-batch-size-schedule"
MOST_SIZES = 10_000
"""Limit on the sizes of a ramp-up. Each is checked before the run starts."""
# At most 15 digits, which a float64 holds exactly. int() refuses more than 4300 in words of its
# own.
_NUMBER = re.compile(r"(\d{1,15}(?:\.\d{0,15})?|\.\d{1,15})([KMBT]?)")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
# numpy's RandomState, with which Megatron-LM shuffles, accepts no other seeds.
_SEEDS = Range("at least 0 and below 2^32", lambda v: 0 <= v < 2**32)


@dataclass(frozen=True)
class BatchConfig:
    """Batch, sequences and length of the run."""

    micro_batch_size: Annotated[int | None, Required("4"), FROM_1, MICROBATCH] = None
    """Number of sequences per microbatch and data-parallel rank. Required."""
    global_batch_size: Annotated[int | None, FROM_1, NAMED] = None
    """Number of sequences per step. Divided by --micro-batch-size and by the data-parallel ranks it
    is the number of microbatches. Default: one microbatch per rank."""
    rampup_batch_size: Annotated[tuple[int, ...], ANY, NAMED] = ()
    """START INCREMENT SAMPLES: let the batch grow from START by INCREMENT sequences, until it has
    --global-batch-size after SAMPLES sequences. Default: a constant batch."""
    step_batch_size_schedule: Annotated[str | None, NAMED] = None
    """Batch sizes with the number of tokens from which on they hold, such as "0:16 2.4B:320",
    instead of --global-batch-size."""
    seq_length: Annotated[int | None, Required("1024"), FROM_1, NAMED] = None
    """Number of tokens per sequence. Required."""
    # FREE on --load: where it decides the learning rate's curve, the curve is compared.
    train_iters: Annotated[
        int | None,
        FROM_1,
        FREE,
        excludes("train_samples", "{} and {} both give the length of the run"),
    ] = None
    """Number of steps to train. This or --train-samples is required."""
    train_samples: Annotated[int | None, FROM_1, FREE] = None
    """Number of sequences to train on, instead of --train-iters."""
    seed: Annotated[int, _SEEDS, NAMED] = 1234
    """Seed of initial weights, data order and dropout."""
    calculate_per_token_loss: Annotated[bool, NAMED] = False
    """Divide the loss by the number of tokens of the whole batch. Default: average the means of the
    microbatches."""

    # Sizes that are required. They are valid once the flags are given.
    @property
    def sequence(self) -> int:
        """Number of tokens per sequence."""
        assert self.seq_length is not None
        return self.seq_length

    @property
    def micro_batch(self) -> int:
        """Number of sequences per microbatch."""
        assert self.micro_batch_size is not None
        return self.micro_batch_size

    @property
    def tokens(self) -> int:
        """Number of tokens per microbatch."""
        return self.sequence * self.micro_batch


@dataclass(frozen=True)
class BatchSizes:
    """The batch size of each step, in sequences.

    `at` returns the size of a step. `after` and `iterations` convert between numbers of steps and
    of samples.

    `last` is the final batch size, `distinct` lists every batch size once.

    Attributes:
        steps: (samples consumed so far, batch size from there on), ascending, the first at 0.
    """

    steps: tuple[tuple[int, int], ...]

    @staticmethod
    def of(batch: BatchConfig, data_parallel_size: int) -> BatchSizes:
        """Return the batch sizes that the flags give.

        Args:
            data_parallel_size: the number of replicas. If no flag gives a batch size, a batch has
                one microbatch for each replica.
        Raises: ConfigError if flags of the batch size contradict each other or cannot be read.
        """
        final = batch.global_batch_size
        if batch.rampup_batch_size:
            return BatchSizes(tuple(_ramp(batch.rampup_batch_size, final)))
        if batch.step_batch_size_schedule is None:
            return BatchSizes(((0, final or batch.micro_batch * data_parallel_size),))
        sizes = BatchSizes(tuple(_steps(batch.step_batch_size_schedule, batch.seq_length)))
        # --global-batch-size is not needed here. Given, it can only agree.
        if final not in (None, sizes.last):
            raise ConfigError(
                f"{STEPS} ends at a batch of {sizes.last}, but --global-batch-size is {final}. "
                f"Use --global-batch-size {sizes.last}, or leave it out."
            )
        return sizes

    @property
    def last(self) -> int:
        """The final batch size, which a short run may not reach."""
        return self.steps[-1][1]

    @property
    def distinct(self) -> tuple[int, ...]:
        """Every batch size once, in the order in which the sizes are used."""
        return tuple(dict.fromkeys(size for _, size in self.steps))

    def at(self, consumed: int) -> int:
        """Return the size of a step that begins after the run has consumed `consumed` samples."""
        return next(size for start, size in reversed(self.steps) if consumed >= start)

    def after(self, iterations: int, consumed: int = 0) -> int:
        """Return the number of samples that the run has consumed after `iterations` more steps.

        Args:
            consumed: number of samples consumed before these steps.
        """
        for stop, size in self._rest(consumed):
            # Rounded up: a step that begins before `stop` has the old size, though it ends after
            # it.
            steps = iterations if stop is None else min(iterations, -(-(stop - consumed) // size))
            consumed += steps * size
            iterations -= steps
        return consumed

    def iterations(self, consumed: int, until: int) -> int:
        """Return the number of whole steps between two numbers of consumed samples.

        Args:
            consumed: number of samples consumed before the first step.
            until: number of consumed samples that the last step must not exceed.
        """
        count = 0
        for stop, size in self._rest(consumed):
            fit = max(0, until - consumed) // size
            if stop is None:
                return count + fit
            # The last step of a size may begin before `stop` and end after it.
            steps = -(-(stop - consumed) // size)
            if fit < steps:
                return count + fit
            consumed += steps * size
            count += steps
        raise AssertionError("the last size has no end")

    def _rest(self, consumed: int) -> Iterator[tuple[int | None, int]]:
        """Yield (samples consumed at which a size ends, the size) from `consumed` samples on.

        The last size has None for its end. A size may have no step: for `steps` ((0, 64), (100,
        80), (110, 96)), the second step is from sample 64 to 128, and the third has size 96. (110,
        80) is yielded all the same; the caller sees that it ends before it begins.
        """
        for (_, size), (stop, _) in pairwise(self.steps):
            if stop > consumed:
                yield stop, size
        yield None, self.last


def _ramp(given: tuple[int, ...], final: int | None) -> Iterator[tuple[int, int]]:
    """Yield (samples consumed so far, batch size from there on), by --rampup-batch-size.

    This is the rule of Megatron-LM until 2025. The size grows from START by INCREMENT to
    --global-batch-size, at equal distances over SAMPLES samples. For 16 16 300 and
    --global-batch-size 64, the pairs are (0, 16), (100, 32), (200, 48), (300, 64).

    Args:
        given: (START, INCREMENT, SAMPLES).
        final: the value of --global-batch-size; None if it is not given.
    Raises: ConfigError if the sizes do not meet --global-batch-size.
    """
    text = f"{RAMP} {' '.join(map(str, given))}"
    if len(given) != 3 or given[0] < 1 or given[1] < 1 or given[2] < 0:
        raise ConfigError(
            f"{text}: expected START INCREMENT SAMPLES, for example {RAMP} 16 16 100000"
        )
    start, increment, samples = given
    if final is None:
        raise ConfigError(f"{text} grows to --global-batch-size, which is missing.")
    count, rest = divmod(final - start, increment)
    if count < 0 or rest:
        near = max(final - increment * max(count, 0), 1)
        raise ConfigError(
            f"{text} does not reach --global-batch-size {final}: "
            f"{final} is not {start} and a multiple of {increment} more. "
            f"Use {RAMP} {near} {increment} {samples}."
        )
    if count > MOST_SIZES:
        raise ConfigError(
            f"{text} has {count:,} sizes up to --global-batch-size {final}. Use a larger INCREMENT."
        )
    # A step has k increments from the first consumed >= k x samples / count on. Increments that
    # fall on the same sample add up.
    at: dict[int, int] = {}
    for k in range(count + 1):
        begin = -(-k * samples // count) if count else 0
        at[begin] = start + k * increment
    yield from at.items()


def _steps(text: str, seq_length: int | None) -> Iterator[tuple[int, int]]:
    """Yield (samples consumed so far, batch size from there on), by `TOKENS:SIZE ...`.

    A suffix K, M, B or T counts in thousands, millions, billions or trillions. With 1000 tokens per
    sequence, `0:16 2M:320` yields (0, 16), (2000, 320).

    Args:
        text: the value of --step-batch-size-schedule.
        seq_length: tokens per sequence, by which TOKENS are divided; None divides by 1.
    Raises: ConfigError if the text cannot be read.
    """
    pairs = []
    for entry in text.replace(",", " ").split():
        found = [_NUMBER.fullmatch(part.upper()) for part in entry.split(":")]
        if len(found) != 2 or found[0] is None or found[1] is None:
            shown = entry if len(entry) <= 40 else f"{entry[:40]}..."
            raise ConfigError(f'{STEPS}: {shown} is not TOKENS:SIZE, as in {STEPS} "0:16 2.4B:320"')
        tokens, size = (int(float(match[1]) * _UNITS[match[2]]) for match in found if match)
        # Megatron-LM's flag counts tokens, and a run counts its samples.
        pairs.append((tokens // (seq_length or 1), size))
    pairs.sort(key=lambda pair: pair[0])
    begins = [begin for begin, _ in pairs]
    ascends = bool(pairs) and begins[0] == 0 and len(set(begins)) == len(begins)
    if not ascends or any(size < 1 for _, size in pairs):
        raise ConfigError(
            f'{STEPS} "{text}": TOKENS counts tokens that were trained on, not samples or '
            f"iterations, and SIZE sequences of {seq_length or '--seq-length'} tokens. "
            "Sizes are at least 1, the first begins at 0, each of the others begins a whole "
            'sequence or more after the one before, as in "0:16 2.4B:320"'
        )
    yield from pairs
