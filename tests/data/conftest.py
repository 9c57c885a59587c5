from __future__ import annotations

import argparse
import json.decoder
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import programs
import pytest
from token_files import add_document

from megapipe.data.indexed import IndexedWriter


@pytest.fixture
def documents() -> list[list[int]]:
    """The five documents that the golden values were taken from."""
    return [[5, 6, 7, 8, 0], [9, 10, 0], [11, 12, 13, 14, 15, 16, 0], [1, 2, 0], [3, 4, 5, 6, 7, 8, 9, 10, 0]]


@pytest.fixture
def golden(tmp_path: Path, documents: list[list[int]]) -> str:
    """Prefix of a pair that holds them."""
    prefix = str(tmp_path / "golden")
    with IndexedWriter(prefix, np.uint16) as writer:
        for document in documents:
            add_document(writer, document)
    return prefix


@pytest.fixture(scope="session")
def train_tokenizer() -> Callable[[Path], str]:
    """Trains a model of 500 ids on a few modules with the tool, and returns its path in the given folder."""

    def train(folder: Path) -> str:
        modules = [str(Path(module.__file__)) for module in (argparse, json.decoder, shutil)]
        flags = ["--input", *modules, "--output", str(folder / "t.model"), "--vocab-size", "500"]
        assert programs.run([programs.ROOT / "tools" / "train_tokenizer.py", *flags]).returncode == 0
        return str(folder / "t.model")

    return train


@pytest.fixture(scope="session")
def model(train_tokenizer: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trained SentencePiece model."""
    return train_tokenizer(tmp_path_factory.mktemp("model"))
