"""Convert text to token ids and back: the interface, SentencePiece models, and ids as numbers.

`build_tokenizer` also returns the kinds of the other files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import sentencepiece

from megapipe.config import TokenizerConfig
from megapipe.errors import DataError

# Megatron-LM's default of --vocab-size for TikTokenizer.
_TIKTOKEN_SIZE = 2**17
_EOD_PIECES = ("<eod>", "<|endoftext|>")


class Tokenizer(Protocol):
    """The interface of all tokenizers: `encode` gives the ids of a text, `decode` the text of ids.

    Attributes:
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
    """A SentencePiece model.

    The end-of-document piece is </s>, or else a piece named <eod> or <|endoftext|>.

    `encode` returns the ids of a text, `decode` the text of ids, `proto` the bytes of the model.

    Args:
        path: the .model file.

    Raises: DataError for a file that is missing, empty, damaged, of another kind, or without an
        end-of-document piece.
    """

    def __init__(self, path: str) -> None:
        self._model = _load(path)
        self.vocab_size: int = self._model.get_piece_size()
        named = [self._model.piece_to_id(piece) for piece in _EOD_PIECES]
        # A piece that the model does not have gets the id of the unknown piece; no </s> is -1.
        candidates = [self._model.eos_id(), *(i for i in named if i != self._model.unk_id())]
        self.eod: int = next((i for i in candidates if i >= 0), -1)
        if self.eod < 0:
            raise DataError(
                f"--tokenizer-model {path} has no end-of-document piece: neither </s> nor "
                f"{' nor '.join(_EOD_PIECES)}. Train one with megapipe tokenizer."
            )

    def proto(self) -> bytes:
        """Return the serialised model."""
        content: bytes = self._model.serialized_model_proto()
        return content

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = self._model.encode(text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids."""
        # The library takes Python's own integers alone, and ids may be numpy's.
        text: str = self._model.decode([int(i) for i in ids])
        return text


class NullTokenizer:
    """A tokenizer for text that consists of ids, written as decimal numbers.

    `encode` returns the ids in such a text, `decode` the text of ids.

    Args:
        vocab_size: number of ids.
        eod: end-of-document id. By default the last of the ids, as in Megatron core.
    """

    def __init__(self, vocab_size: int, eod: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1 if eod is None else eod

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text whose words are the ids.

        Raises: ValueError for a word that is not an id.
        """
        ids = []
        for word in text.split():
            # Python refuses to convert numbers of thousands of digits; no id has 20.
            i = int(word) if word.isdecimal() and len(word) < 20 else -1
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"{word[:40]!r} is not an id from 0 to {self.vocab_size - 1}")
            ids.append(i)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the ids as numbers with spaces between them."""
        return " ".join(str(int(i)) for i in ids)


def build_tokenizer(data: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer of --tokenizer-type, with the flags of its kind.

    Args:
        data: the flags.
    Raises: DataError for flags that do not fit the kind, and for files that cannot be read.
    """
    kind = data.tokenizer
    if kind == "NullTokenizer":
        if data.vocab_size is None or data.vocab_size < 2:
            raise DataError(
                "--tokenizer-type NullTokenizer needs --vocab-size of at least 2, got "
                f"{data.vocab_size}"
            )
        eod = data.null_tokenizer_eod_id
        if eod is not None and not 0 <= eod < data.vocab_size:
            raise DataError(
                f"--null-tokenizer-eod-id {eod} is not one of the {data.vocab_size} ids of "
                "--vocab-size"
            )
        return NullTokenizer(data.vocab_size, eod)
    # The libraries of the other kinds take time to import, so only the one in use is imported.
    if kind == "GPT2BPETokenizer":
        from megapipe.data.tokenizers.bpe import gpt2_tokenizer

        return gpt2_tokenizer(data.vocab_file, data.merge_file)
    if kind == "HuggingFaceTokenizer":
        from megapipe.data.tokenizers.bpe import hugging_face_tokenizer

        specials = not data.tokenizer_hf_no_include_special_tokens
        return hugging_face_tokenizer(data.tokenizer_model, specials=specials)
    if kind == "TikTokenizer":
        from megapipe.data.tokenizers.tik import TikTokenizer

        return TikTokenizer(
            data.tokenizer_model,
            data.tiktoken_pattern,
            data.vocab_size or _TIKTOKEN_SIZE,
            data.tiktoken_num_special_tokens,
        )
    if data.tokenizer_model is None:
        raise DataError(
            "--tokenizer-model is missing. Give a SentencePiece model (megapipe tokenizer makes "
            "one), or --tokenizer-type NullTokenizer --vocab-size N"
        )
    return SentencePieceTokenizer(data.tokenizer_model)


def tokenizer_files(data: TokenizerConfig) -> list[str]:
    """Return the paths of the tokenizer's files, which decide the ids of a text.

    Args:
        data: the flags.
    """
    if data.tokenizer == "GPT2BPETokenizer":
        return [path for path in (data.vocab_file, data.merge_file) if path is not None]
    path = data.tokenizer_model
    if path is None or data.tokenizer == "NullTokenizer":
        return []
    if not os.path.isdir(path):
        return [path]
    # A folder may also have a model's weights and other files that change no id.
    inside = [os.path.join(path, name) for name in ("tokenizer.json", "tokenizer_config.json")]
    return [file for file in inside if os.path.isfile(file)]


def assumed_vocab_size(data: TokenizerConfig) -> int:
    """Return a vocabulary size for a plan that is made without the tokenizer's files.

    The size is --vocab-size, or else the size of a usual tokenizer of this kind: 50257 for GPT-2.

    Args:
        data: the flags of the tokenizer.
    """
    # The sizes of GPT-2's files, of Megatron-LM's default, and of Llama's model.
    defaults = {"GPT2BPETokenizer": 50257, "TikTokenizer": _TIKTOKEN_SIZE}
    return data.vocab_size or defaults.get(data.tokenizer, 32000)


def _load(path: str) -> sentencepiece.SentencePieceProcessor:
    """Return the model of a file.

    Raises: DataError if it cannot be read or is not a complete model.
    """
    remedy = "Give a SentencePiece model; megapipe tokenizer makes one."
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"--tokenizer-model {path}: {error.strerror}. {remedy}") from error
    if not content:
        raise DataError(f"--tokenizer-model {path} is empty. {remedy}")
    model = sentencepiece.SentencePieceProcessor()
    # A damaged file may load without an error and then have no pieces.
    try:
        model.load_from_serialized_proto(content)
        is_complete = model.get_piece_size() > 0
    except (RuntimeError, ValueError):
        is_complete = False
    if not is_complete:
        raise DataError(
            f"--tokenizer-model {path} ({len(content)} bytes) is not a complete SentencePiece "
            f"model: damaged, cut off or another kind of file. {remedy}"
        )
    return model
