"""Tokenizers, the tool that trains one, and every file that is not one."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megapipe.config import DataConfig
from megapipe.data.tokenizers.tokenizer import (
    NullTokenizer,
    SentencePieceTokenizer,
    assumed_vocab_size,
    build_tokenizer,
)
from megapipe.errors import DataError


def test_every_text_without_sentencepieces_own_space_comes_back(model: str) -> None:
    tokenizer = build_tokenizer(DataConfig(tokenizer_model=model))

    @given(st.text(st.characters(exclude_characters="\u2581", exclude_categories=["Cs"])))
    @example("</s><s><unk><0x41>\r\n\0 \ufffd  ")
    def back(text: str) -> None:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.eod not in ids

    back()
    assert tokenizer.decode(tokenizer.encode("def f():\n\n    return  1\n")) == "def f():\n\n    return  1\n"
    assert tokenizer.vocab_size == 500


def test_training_twice_gives_the_same_file(model: str, train_tokenizer: Callable[[Path], str], tmp_path: Path) -> None:
    assert Path(train_tokenizer(tmp_path)).read_bytes() == Path(model).read_bytes()


@pytest.mark.parametrize("kind, size", [("TikTokenizer", 131_072), ("GPT2BPETokenizer", 50_257)])
def test_a_plan_without_the_tokenizers_files_takes_megatrons_size(kind: str, size: int) -> None:
    assert assumed_vocab_size(DataConfig(tokenizer_type=kind)) == size
    assert assumed_vocab_size(DataConfig(tokenizer_type=kind, vocab_size=99)) == 99


def test_null_tokenizer_counts_eod_among_its_ids() -> None:
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer", vocab_size=1000))
    assert (tokenizer.vocab_size, tokenizer.eod) == (1000, 999)  # Megatron core: eod_id defaults to vocab_size - 1
    assert tokenizer.encode("3 999 0") == [3, 999, 0]
    assert tokenizer.decode([3, 999, 0]) == "3 999 0"


@pytest.mark.parametrize("word", ["1000", "-1", "x", "1.5"])
def test_null_tokenizer_refuses_what_is_no_id(word: str) -> None:
    with pytest.raises(ValueError, match=f"'{word}' is not an id from 0 to 999"):
        NullTokenizer(1000).encode(f"5 {word}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        (b"", "is empty"),
        (b'{"text": "not a model"}\n', r"\(24 bytes\) is not a complete SentencePiece model"),
        (bytes(100), "is not a complete SentencePiece model"),
    ],
)
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "x.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=rf"--tokenizer-model {path}.*{message}"):
        SentencePieceTokenizer(str(path))


def test_a_model_that_was_cut_off_is_refused(model: str, tmp_path: Path) -> None:
    whole = Path(model).read_bytes()
    path = tmp_path / "cut.model"
    for size in random.Random(0).sample(range(1, len(whole)), 20):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match="is not a complete SentencePiece model"):
            SentencePieceTokenizer(str(path))


def test_missing_flags_are_named() -> None:
    with pytest.raises(DataError, match="--tokenizer-model is missing"):
        build_tokenizer(DataConfig())
    with pytest.raises(DataError, match="NullTokenizer needs --vocab-size of at least 2, got None"):
        build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"))
