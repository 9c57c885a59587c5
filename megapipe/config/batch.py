"""The batch, and how many of them: their sizes, constant or growing with the samples consumed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from megapipe.config.notes import ANY, FREE, MICROBATCH, NAMED, Range, Required, at_least, excludes
from megapipe.errors import ConfigError

RAMP, STEPS = "--rampup-batch-size", "--step-batch-size-schedule"
MOST_SIZES = 10_000
"""The most sizes of a ramp-up; each is looked at before anything starts."""
_NUMBER = re.compile(r"(\d{1,15}(?:\.\d{0,15})?|\.\d{1,15})([KMBT]?)")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class BatchConfig:
    """Batch, sequences and length of the run."""

    micro_batch_size: Annotated[int | None, Required("4"), at_least(1), MICROBATCH] = None
    """Sequences per microbatch and data-parallel rank. Required."""
    global_batch_size: Annotated[int | None, at_least(1), NAMED] = None
    """Sequences per step. Default: micro batch x data-parallel size. The quotient is the number of microbatches."""
    rampup_batch_size: Annotated[tuple[int, ...], ANY, NAMED] = ()
    """START INCREMENT SAMPLES: the batch grows from START by INCREMENT, within SAMPLES, to --global-batch-size."""
    step_batch_size_schedule: Annotated[str | None, NAMED] = None
    """Batch sizes from numbers of tokens on, such as "0:16 2.4B:320"; instead of --global-batch-size."""
    seq_length: Annotated[int | None, Required("1024"), at_least(1), NAMED] = None
    """Tokens per sequence. Required."""
    # The length is the learning rate's where its curve has none of its own.
    train_iters: Annotated[
        int | None, at_least(1), FREE, excludes("train_samples", "{} and {} both give the length of the run")
    ] = None
    """Steps to train. This or --train-samples is required."""
    train_samples: Annotated[int | None, at_least(1), FREE] = None
    """Sequences to train on, instead of --train-iters."""
    # numpy's RandomState, which Megatron shuffles with, takes no more
    seed: Annotated[int, Range("at least 0 and below 2^32", lambda v: 0 <= v < 2**32), NAMED] = 1234
    """Seed of initial weights, data order and dropout."""
    calculate_per_token_loss: Annotated[bool, NAMED] = False
    """Divide by the tokens of the whole global batch instead of averaging the microbatches' means."""

    # Sizes that are required, valid once they are given.
    @property
    def sequence(self) -> int:
        """Tokens of a sequence."""
        assert self.seq_length is not None
        return self.seq_length

    @property
    def micro_batch(self) -> int:
        """Sequences of a microbatch."""
        assert self.micro_batch_size is not None
        return self.micro_batch_size


@dataclass(frozen=True)
class BatchSizes:
    """steps: (samples consumed from which a size holds, the size), ascending, the first from 0 on."""

    steps: tuple[tuple[int, int], ...]

    @staticmethod
    def of(batch: BatchConfig, data_parallel_size: int) -> BatchSizes:
        """The sizes that flags say. Raises: ConfigError if that is no batch size."""
        final = batch.global_batch_size
        if batch.rampup_batch_size:
            return BatchSizes(tuple(_ramp(batch.rampup_batch_size, final)))
        if batch.step_batch_size_schedule is None:
            return BatchSizes(((0, final or batch.micro_batch * data_parallel_size),))
        sizes = BatchSizes(tuple(_steps(batch.step_batch_size_schedule, batch.seq_length)))
        if final not in (None, sizes.last):
            raise ConfigError(
                f"{STEPS} ends at a batch of {sizes.last}, but --global-batch-size is {final}. "
                f"Use --global-batch-size {sizes.last}, or leave it out."
            )
        return sizes

    @property
    def last(self) -> int:
        """The size that holds from some point on."""
        return self.steps[-1][1]

    @property
    def distinct(self) -> tuple[int, ...]:
        """Every size once."""
        return tuple(dict.fromkeys(size for _, size in self.steps))

    def at(self, consumed: int) -> int:
        """Return the size of a step that begins after `consumed` samples."""
        return next(size for start, size in reversed(self.steps) if consumed >= start)

    def after(self, iterations: int, consumed: int = 0) -> int:
        """Return the samples consumed after `iterations` more steps."""
        for stop, size in self._rest(consumed):
            steps = iterations if stop is None else min(iterations, -(-(stop - consumed) // size))
            consumed, iterations = consumed + steps * size, iterations - steps
        return consumed

    def iterations(self, consumed: int, until: int) -> int:
        """Whole iterations between two numbers of samples."""
        count = 0
        for stop, size in self._rest(consumed):
            fit = max(0, until - consumed) // size
            if stop is None or fit < -(-(stop - consumed) // size):
                return count + fit
            steps = -(-(stop - consumed) // size)
            consumed, count = consumed + steps * size, count + steps
        raise AssertionError("the last size has no end")

    def _rest(self, consumed: int) -> Iterator[tuple[int | None, int]]:
        """(where it ends, size) of what is still ahead. A size that a step of the last one has passed over has an end
        before its beginning, and no step."""
        for (_, size), (stop, _) in pairwise(self.steps):
            if stop > consumed:
                yield stop, size
        yield None, self.last


def _ramp(given: tuple[int, ...], final: int | None) -> Iterator[tuple[int, int]]:
    """Megatron-LM's until 2025: START, larger by INCREMENT in equal parts of SAMPLES until --global-batch-size."""
    text = f"{RAMP} {' '.join(map(str, given))}"
    if len(given) != 3 or given[0] < 1 or given[1] < 1 or given[2] < 0:
        raise ConfigError(f"{text}: expected START INCREMENT SAMPLES, for example {RAMP} 16 16 100000")
    start, increment, samples = given
    if final is None:
        raise ConfigError(f"{text} grows to --global-batch-size, which is missing.")
    count, rest = divmod(final - start, increment)
    if count < 0 or rest:
        near = max(final - increment * max(count, 0), 1)
        raise ConfigError(
            f"{text} does not reach --global-batch-size {final}: {final} is not {start} and a multiple of {increment} "
            f"more. Use {RAMP} {near} {increment} {samples}."
        )
    if count > MOST_SIZES:
        raise ConfigError(f"{text} has {count:,} sizes up to --global-batch-size {final}. Use a larger INCREMENT.")
    # the first consumed >= k x samples / count has k increments
    at = {-(-k * samples // count) if count else 0: start + k * increment for k in range(count + 1)}
    yield from at.items()


def _steps(text: str, seq_length: int | None) -> Iterator[tuple[int, int]]:
    """`TOKENS:SIZE ...`; a suffix K, M, B or T counts in thousands, millions, ..."""
    pairs = []
    for entry in text.replace(",", " ").split():
        found = [_NUMBER.fullmatch(part.upper()) for part in entry.split(":")]
        if len(found) != 2 or found[0] is None or found[1] is None:
            shown = entry if len(entry) <= 40 else f"{entry[:40]}..."
            raise ConfigError(f'{STEPS}: {shown} is not TOKENS:SIZE, as in {STEPS} "0:16 2.4B:320"')
        tokens, size = (int(float(match[1]) * _UNITS[match[2]]) for match in found if match)
        pairs.append((tokens // (seq_length or 1), size))
    pairs.sort(key=lambda pair: pair[0])
    if not pairs or pairs[0][0] or any(a[0] == b[0] for a, b in pairwise(pairs)) or any(n < 1 for _, n in pairs):
        raise ConfigError(
            f'{STEPS} "{text}": TOKENS counts tokens that were trained on, not samples or iterations, and SIZE '
            f"sequences of {seq_length or '--seq-length'} tokens. Sizes are at least 1, the first begins at 0, each of "
            'the others begins a whole sequence or more after the one before, as in "0:16 2.4B:320"'
        )
    yield from pairs
