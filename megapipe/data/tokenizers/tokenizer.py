"""Text to token ids and back: SentencePiece models, ids that are already numbers, and the door to the other kinds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import sentencepiece

from megapipe.config import TokenizerConfig
from megapipe.errors import DataError

_TIKTOKEN_SIZE = 2**17  # Megatron-LM's default
_EOD_PIECES = ("<eod>", "<|endoftext|>")


class Tokenizer(Protocol):
    """Attributes:
    vocab_size: number of ids, eod included.
    eod: id that ends every document.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class SentencePieceTokenizer:
    """A SentencePiece model; its end-of-document id is the model's </s> or, without one, a piece named <eod>.

    Raises: DataError for a file that is missing, empty, not a model, damaged or without an end-of-document piece.
    """

    def __init__(self, path: str) -> None:
        self._model = _load(path)
        self.vocab_size: int = self._model.get_piece_size()
        named = [self._model.piece_to_id(piece) for piece in _EOD_PIECES]
        candidates = [self._model.eos_id(), *(i for i in named if i != self._model.unk_id())]
        self.eod: int = next((i for i in candidates if i >= 0), -1)
        if self.eod < 0:
            raise DataError(
                f"--tokenizer-model {path} has no end-of-document piece: neither </s> nor {' nor '.join(_EOD_PIECES)}. "
                "Train one with megapipe tokenizer."
            )

    def proto(self) -> bytes:
        """The model, serialised."""
        content: bytes = self._model.serialized_model_proto()
        return content

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._model.decode([int(i) for i in ids])
        return text


class NullTokenizer:
    """Ids written as decimal numbers. Without another eod it is the last of the vocab_size ids, as in Megatron core."""

    def __init__(self, vocab_size: int, eod: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1 if eod is None else eod

    def encode(self, text: str) -> list[int]:
        """Raises: ValueError for a word that is not an id."""
        ids = [int(word) if word.isdecimal() and len(word) < 20 else -1 for word in text.split()]
        for word, i in zip(text.split(), ids, strict=True):
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"{word[:40]!r} is not an id from 0 to {self.vocab_size - 1}")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)


def build_tokenizer(data: TokenizerConfig) -> Tokenizer:
    """The tokenizer that --tokenizer-type and the flags of its kind describe.

    Raises: DataError.
    """
    kind = data.tokenizer
    if kind == "NullTokenizer":
        if data.vocab_size is None or data.vocab_size < 2:
            raise DataError(f"--tokenizer-type NullTokenizer needs --vocab-size of at least 2, got {data.vocab_size}")
        eod = data.null_tokenizer_eod_id
        if eod is not None and not 0 <= eod < data.vocab_size:
            raise DataError(f"--null-tokenizer-eod-id {eod} is not one of the {data.vocab_size} ids of --vocab-size")
        return NullTokenizer(data.vocab_size, eod)
    # The libraries of the other kinds are imported only where they are used.
    if kind == "GPT2BPETokenizer":
        from megapipe.data.tokenizers.bpe import gpt2_tokenizer

        return gpt2_tokenizer(data.vocab_file, data.merge_file)
    if kind == "HuggingFaceTokenizer":
        from megapipe.data.tokenizers.bpe import hugging_face_tokenizer

        return hugging_face_tokenizer(data.tokenizer_model, specials=not data.tokenizer_hf_no_include_special_tokens)
    if kind == "TikTokenizer":
        from megapipe.data.tokenizers.tik import TikTokenizer

        size = data.vocab_size or _TIKTOKEN_SIZE
        return TikTokenizer(data.tokenizer_model, data.tiktoken_pattern, size, data.tiktoken_num_special_tokens)
    if data.tokenizer_model is None:
        raise DataError(
            "--tokenizer-model is missing. Give a SentencePiece model (megapipe tokenizer makes one), or "
            "--tokenizer-type NullTokenizer --vocab-size N"
        )
    return SentencePieceTokenizer(data.tokenizer_model)


def tokenizer_files(data: TokenizerConfig) -> list[str]:
    """The files that decide the ids."""
    if data.tokenizer == "GPT2BPETokenizer":
        return [path for path in (data.vocab_file, data.merge_file) if path is not None]
    path = data.tokenizer_model
    if path is None or data.tokenizer == "NullTokenizer":
        return []
    inside = [os.path.join(path, name) for name in ("tokenizer.json", "tokenizer_config.json")]
    return [file for file in inside if os.path.isfile(file)] if os.path.isdir(path) else [path]


def assumed_vocab_size(data: TokenizerConfig) -> int:
    """A size that a plan may count with while the tokenizer's files are not at hand."""
    return data.vocab_size or {"GPT2BPETokenizer": 50257, "TikTokenizer": _TIKTOKEN_SIZE}.get(data.tokenizer, 32000)


def _load(path: str) -> sentencepiece.SentencePieceProcessor:
    remedy = "Give a SentencePiece model; megapipe tokenizer makes one."
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"--tokenizer-model {path}: {error.strerror}. {remedy}") from error
    if not content:
        raise DataError(f"--tokenizer-model {path} is empty. {remedy}")
    model = sentencepiece.SentencePieceProcessor()
    try:
        model.load_from_serialized_proto(content)
        sound = model.get_piece_size() > 0
    except (RuntimeError, ValueError):
        sound = False
    if not sound:
        raise DataError(
            f"--tokenizer-model {path} ({len(content)} bytes) is not a complete SentencePiece model: damaged, cut off "
            f"or another kind of file. {remedy}"
        )
    return model
