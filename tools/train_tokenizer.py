"""Train a SentencePiece model on text, such that any text (without U+2581) is decoded as it was encoded.

    python tools/train_tokenizer.py --input data/stdlib.jsonl --output data/tokenizer.model --vocab-size 4096

Newlines are a token, runs of spaces may be, and bytes stand in for rare characters. `</s>` ends documents.
"""

from __future__ import annotations

import io
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import sentencepiece

from megapipe.data.files import complete_file, is_current
from megapipe.data.text import raw_documents, texts
from megapipe.errors import ConfigError, DataError
from megapipe.flags.parse import parse, run

_LONGEST_LINE = 8192  # bytes; SentencePiece leaves longer ones out


@dataclass(frozen=True)
class Flags:
    """Flags of this tool."""

    input: tuple[str, ...] = ()
    """Files, read as tools/preprocess_data.py reads them."""
    output: str | None = None
    """Model file to write."""
    vocab_size: int = 4096
    """Number of ids, 256 bytes and 4 special ones included."""
    model_type: Literal["unigram", "bpe"] = "unigram"
    """unigram encodes about five times as fast, bpe trains faster."""
    json_keys: tuple[str, ...] = ("text",)
    """Fields of each JSON line to read."""
    sample_mb: float = 4.0
    """Megabytes of text to train on, chosen document by document with a fixed seed."""
    reuse: bool = False
    """Keep a model that is there already and newer than the input."""


def main(argv: Sequence[str]) -> None:
    flags = parse(Flags, argv)
    problems = [
        f"{name} is missing" for name, value in (("--input", flags.input), ("--output", flags.output)) if not value
    ]
    if flags.sample_mb <= 0:
        problems.append(f"--sample-mb {flags.sample_mb} must be above 0")
    if problems:
        raise ConfigError(problems)
    output = Path(str(flags.output))
    if flags.reuse and is_current([str(output)], flags.input):
        print(f"{output}: up to date")
        return
    begin = time.monotonic()
    text = list(lines(flags))
    size = sum(len(line.encode()) for line in text)
    print(f"Training a {flags.model_type} model of {flags.vocab_size} ids on {size / 1e6:.1f} MB ...", flush=True)
    model = train(text, flags)
    with complete_file(output) as file:
        file.write(model)
    print(f"Wrote {output} ({time.monotonic() - begin:.1f} s)")


def lines(flags: Flags) -> Iterator[str]:
    """Lines of a sample of the documents; which ones depends on the files alone."""
    total = sum(Path(p).stat().st_size for p in flags.input if Path(p).is_file())
    share = flags.sample_mb * 1e6 / max(total, 1)
    draw = random.Random(0)
    for raw in raw_documents(flags.input):
        if draw.random() < share:
            for text in texts(raw, flags.json_keys):
                yield from (line for line in text.split("\n") if line)


def train(text: Sequence[str], flags: Flags) -> bytes:
    """The serialised model. Deterministic: the number of threads, which rounding depends on, is fixed."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text),
            model_writer=model,
            vocab_size=flags.vocab_size,
            model_type=flags.model_type,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            byte_fallback=True,
            user_defined_symbols=["\n"],
            max_sentence_length=_LONGEST_LINE,
            num_threads=2,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise DataError(
            f"--vocab-size {flags.vocab_size}: SentencePiece cannot train on {len(text)} lines: {_reason(error)}\n"
            "      Give more text (--input, --sample-mb) or another --vocab-size."
        ) from error
    return model.getvalue()


def _reason(error: Exception) -> str:
    """The last sentence of SentencePiece's message, without its source file and condition."""
    return str(error).split("] ")[-1].strip() or str(error)


if __name__ == "__main__":
    run(main)
