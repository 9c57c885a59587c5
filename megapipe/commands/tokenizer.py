"""Train a SentencePiece model whose decoded ids give back the text, whatever its characters.

    megapipe tokenizer --input data/stdlib.jsonl --output data/tokenizer.model --vocab-size 4096

Only U+2581, which SentencePiece writes for a space, is lost. Newlines are a token, runs of spaces
may be one, and bytes stand in for rare characters. `</s>` ends documents.
"""

from __future__ import annotations

import io
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import sentencepiece

from megapipe.data.files import complete_file, file_problems, is_current, note_how
from megapipe.data.text import raw_documents, text_bytes, texts
from megapipe.errors import ConfigError, DataError
from megapipe.flags.parse import parse
from megapipe.flags.stop import say

_LONGEST_LINE = 8192
"""Bytes of the longest line that SentencePiece trains on. It leaves longer ones out."""
# 256 bytes, 4 special ids, and one for text.
_LEAST_IDS = 261
# SentencePiece trains toward 1.1 times the vocabulary and counts in 32 bits: with 2^31 - 1 ids its
# unigram trainer never ends.
_MOST_IDS = 2**30


@dataclass(frozen=True)
class Flags:
    """Train a SentencePiece model on text."""

    input: tuple[str, ...] = ()
    """Files, read as megapipe preprocess reads them."""
    output: str | None = None
    """Model file to write."""
    vocab_size: int = 4096
    """Number of ids, 256 bytes and 4 special ones included."""
    model_type: Literal["unigram", "bpe"] = "unigram"
    """unigram encodes about five times as fast, bpe trains faster."""
    json_keys: tuple[str, ...] = ("text",)
    """Fields of each JSON line to read."""
    sample_mb: float = 4.0
    """Megabytes of text to train on, chosen with a fixed seed: whole documents, or single lines of
    large ones."""
    reuse: bool = False
    """Keep an existing model that was made with the same flags and is newer than the input."""


def main(argv: Sequence[str]) -> None:
    """Train the model and write it. Raises: ConfigError for wrong flags."""
    flags = parse(Flags, argv)
    needed = {"--input": flags.input, "--output": flags.output}
    problems = [f"{name} is missing" for name, value in needed.items() if not value]
    if not 0 < flags.sample_mb < math.inf:
        problems.append(f"--sample-mb {flags.sample_mb} must be a number above 0")
    if flags.vocab_size < _LEAST_IDS:
        problems.append(
            f"--vocab-size {flags.vocab_size} must be at least {_LEAST_IDS}: 256 bytes, 4 special "
            "ids and text"
        )
    if flags.vocab_size > _MOST_IDS:
        problems.append(f"--vocab-size {flags.vocab_size} must be at most {_MOST_IDS}")
    problems += file_problems({"--output": flags.output})
    if problems:
        raise ConfigError(problems)
    output = Path(str(flags.output))
    # The model depends on all flags but these two. --reuse compares them with a record.
    how = {name: value for name, value in asdict(flags).items() if name not in ("output", "reuse")}
    if flags.reuse and is_current([str(output)], flags.input, how):
        say(f"{output}: up to date")
        return
    begin = time.monotonic()
    # The file is opened first: a folder that cannot be written shows before the work.
    with complete_file(output) as file:
        text = list(lines(flags))
        size = sum(len(line.encode()) for line in text)
        kind = f"{flags.model_type} model of {flags.vocab_size} ids"
        say(f"Training a {kind} on {size / 1e6:.1f} MB ...")
        file.write(train(text, flags))
    note_how(output, how)
    say(f"Wrote {output} ({time.monotonic() - begin:.1f} s)")


def lines(flags: Flags) -> Iterator[str]:
    """Yield the lines of a random sample of the documents. Equal files give an equal sample.

    A document is drawn as a whole, or not at all. A document larger than a quarter of the sample is
    an exception: its lines are drawn one by one.
    """
    wanted = flags.sample_mb * 1e6
    share = wanted / max(text_bytes(flags.input), 1)
    # A fixed seed: the same files give the same model.
    draw = random.Random(0)
    for raw in raw_documents(flags.input):
        large = len(raw.content) > wanted / 4
        if large or draw.random() < share:
            for text in texts(raw, flags.json_keys):
                for line in text.split("\n"):
                    if line and (not large or draw.random() < share):
                        yield line


def train(text: Sequence[str], flags: Flags) -> bytes:
    """Return the serialised SentencePiece model. Equal lines and flags give equal bytes.

    Args:
        text: the lines to train on.
    Raises: DataError if SentencePiece cannot train on these lines.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text),
            model_writer=model,
            vocab_size=flags.vocab_size,
            model_type=flags.model_type,
            # The next four keep text as it is: no changed characters, no added or removed blanks.
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            byte_fallback=True,
            user_defined_symbols=["\n"],
            max_sentence_length=_LONGEST_LINE,
            # Rounding depends on the number of threads, so it is the same on every machine.
            num_threads=2,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        short = sum(len(line.encode()) <= _LONGEST_LINE for line in text)
        problem = (
            f"--vocab-size {flags.vocab_size}: SentencePiece cannot train on {short} lines: "
            f"{_reason(error)}\n"
            "      Give more text (--input, --sample-mb) or another --vocab-size."
        )
        if left := len(text) - short:
            problem += f" {left} lines of more than {_LONGEST_LINE} bytes are left out: break them."
        raise DataError(problem) from error
    return model.getvalue()


def _reason(error: Exception) -> str:
    """Return the last sentence of SentencePiece's message, without source file and condition.

    Args:
        error: the error that SentencePiece raised.
    """
    return str(error).split("] ")[-1].strip() or str(error)
