"""Checks of the embedding: enough rows for the ids of the tokenizer, and divisible by ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megapipe.checks.numbers import check_numbers, division
from megapipe.config import Config
from megapipe.config.layers import inline
from megapipe.data.tokenizers.tokenizer import Tokenizer, assumed_vocab_size


def tokenizer_problems(config: Config, tokenizer: Tokenizer | None) -> list[str]:
    """Return the problems of the size of the embedding for this tokenizer.

    Returns [] too if a number among the flags of the data is wrong, which other checks report.

    Args:
        tokenizer: None if it could not be read; then there are no problems.
    """
    sound, _ = check_numbers(config)
    # With wrong numbers at their defaults the tokenizer would be another one.
    if tokenizer is None or sound.data != config.data:
        return []
    return [*vocabulary_problems(sound, tokenizer.vocab_size)]


def vocabulary_problems(config: Config, vocab_size: int) -> Iterator[str]:
    """Yield the problem of an embedding with too few rows, or rows that tp does not divide.

    Args:
        vocab_size: the number of ids of the tokenizer.
    """
    model = config.model
    tp = config.parallel.tensor_model_parallel_size
    rows = model.padded_vocab(vocab_size)
    if rows < vocab_size:
        yield (
            f"--padded-vocab-size {rows} is less than the {vocab_size} ids of the tokenizer. "
            f"Use --padded-vocab-size {_up(vocab_size, 128 * tp)}, or leave it out."
        )
    elif rows % tp:
        if model.padded_vocab_size:
            given = f"--padded-vocab-size {rows}"
            remedy = f"--padded-vocab-size {_up(rows, tp)}"
        else:
            given = f"a vocabulary padded to {rows} rows"
            to = _up(model.make_vocab_size_divisible_by, tp)
            remedy = f"--make-vocab-size-divisible-by {to}"
        yield (
            f"{given} is not divisible by --tensor-model-parallel-size {tp}: "
            f"{division(rows, tp)}. Use {remedy}."
        )


def vocabulary(config: Config, tokenizer: Tokenizer | None) -> tuple[int, list[str]]:
    """Return (the number of token ids, lines to print).

    Args:
        tokenizer: the tokenizer; None if it cannot be read. The number is then assumed, and a line
            says so. With a tokenizer there are no lines.
    """
    if tokenizer is not None:
        return tokenizer.vocab_size, []
    size = assumed_vocab_size(config.data)
    rows = ""
    if not config.model.padded_vocab_size:
        rows = f"; the plan assumes {size} ids, and --padded-vocab-size gives another number"
    name = config.data.tokenizer_type or config.data.tokenizer
    return size, [f"the vocabulary of --tokenizer-type {name} is not known{rows}"]


def with_vocabulary(config: Config, size: int) -> Config:
    """Return the configuration with the number of rows of the embedding filled in.

    If --per-layer-overrides names a file, the file's content replaces the name in the flag.

    Args:
        size: the number of ids of the tokenizer.
    """
    model = inline(config.model)
    return replace(config, model=replace(model, padded_vocab_size=model.padded_vocab(size)))


def _up(value: int, to: int) -> int:
    """Return the value rounded up to a multiple of `to`."""
    return -(-value // to) * to
