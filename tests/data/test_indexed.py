"""Megatron's .bin/.idx to the bit, and every way in which a pair can be damaged."""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_files import add_document

from megapipe.config import DataConfig
from megapipe.data import indexed
from megapipe.data.indexed import IndexedDataset, IndexedWriter, token_dtype
from megapipe.data.sources import mapped_files, refuse_cut_off
from megapipe.errors import DataError, DataLost

SHA256 = {  # of files that Megatron-LM d98e8a64 wrote from these documents
    ("uint16", "bin"): "819f9811a5ab7a051ea2f17b0ddd49a05ba29667d742608458952cb9754f7d42",
    ("uint16", "idx"): "a7eca32fc06f0ac758eef764150b8cf9619c5dc74a09ea125104815a3a01446f",
    ("int32", "bin"): "c47567d802403731ed6ea35184bd874bc07689f5775f6917fbfabfdc931378db",
    ("int32", "idx"): "015c269e7a3773a99b129d167e2688dc754efbd94a3f2c3952fadd7bc550b549",
}


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_files_equal_megatrons_to_the_bit(tmp_path: Path, dtype: str, documents: list[list[int]]) -> None:
    with IndexedWriter(tmp_path / "x", dtype) as writer:
        for document in documents:
            add_document(writer, document)
    for end in ("bin", "idx"):
        assert hashlib.sha256((tmp_path / f"x.{end}").read_bytes()).hexdigest() == SHA256[dtype, end]
    dataset = IndexedDataset(tmp_path / "x")
    assert [dataset[i].tolist() for i in range(len(dataset))] == documents


@given(st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=5), max_size=8).filter(any))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]) -> None:
    prefix = tmp_path_factory.mktemp("round") / "x"
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_documents(np.array([token for d in documents for token in d]), np.array([len(d) for d in documents]))
    dataset = IndexedDataset(prefix)
    assert [dataset[i].tolist() for i in range(len(dataset))] == [d for d in documents if d]
    counts = np.cumsum([bool(d) for d in documents])  # an empty document repeats the entry before it
    assert dataset.documents.tolist() == [0, *counts.tolist()]


def test_writer_takes_16_bits_below_65500_ids() -> None:
    assert token_dtype(65499) is np.uint16
    assert token_dtype(65500) is np.int32


@pytest.mark.parametrize("token", [65536, -1])
def test_a_token_that_does_not_fit_is_refused_not_wrapped(tmp_path: Path, token: int) -> None:
    with pytest.raises(DataError, match=f"token {token} does not fit uint16"), IndexedWriter(tmp_path / "x", "u2") as w:
        add_document(w, [1, token])
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_fails_leaves_the_former_pair(golden: str) -> None:
    with pytest.raises(DataError, match="does not fit"), IndexedWriter(golden, np.int8) as writer:
        writer.add_documents(np.array([1, 300]), np.array([2]))
    assert len(IndexedDataset(golden)) == 5
    assert len(list(Path(golden).parent.iterdir())) == 2


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file/x cannot be written: "):
        IndexedWriter(tmp_path / "file" / "x", np.int32)


def _idx(at: int, content: bytes) -> Callable[[str], None]:
    def change(prefix: str) -> None:
        with open(f"{prefix}.idx", "r+b") as file:
            file.seek(at)
            file.write(content)

    return change


def _truncate(end: str, size: int) -> Callable[[str], None]:
    return lambda prefix: os.truncate(f"{prefix}.{end}", size)


DAMAGE = {  # 5 sequences: lengths from byte 34, pointers from 54, documents from 94; .bin has 54 bytes
    "no .bin": (lambda prefix: os.unlink(f"{prefix}.bin"), r"no file .*golden\.bin\. Give the prefix"),
    "magic": (_idx(0, b"MMIDXXX"), r"begins with b'MMIDXXX.* instead of b'MMIDIDX"),
    "version": (_idx(9, struct.pack("<Q", 2)), "version 2 at byte 9; only version 1"),
    "dtype": (_idx(17, b"\x09"), "dtype code 9 at byte 17; known are 1, 2, 3, 4, 5, 6, 7, 8"),
    "float": (_idx(17, b"\x07"), r"holds float32 \(dtype code 7\), not integer token ids"),
    "itemsize": (_idx(17, b"\x04"), "puts sequence 1 at byte 10 of .bin instead of 20"),
    "huge counts": (_idx(18, b"\xff" * 16), "has 142 bytes, but its 18446744073709551615 sequences"),
    "one sequence more": (_idx(18, b"\x06"), "has 142 bytes, but its 6 sequences and 6 document entries take 154"),
    "length below 0": (_idx(34 + 8, struct.pack("<i", -7)), "gives sequence 2 the length -7"),
    "length": (_idx(34 + 8, struct.pack("<i", 8)), "puts sequence 3 at byte 30 of .bin instead of 32"),
    "pointer not rising": (_idx(54 + 16, struct.pack("<q", 2)), "puts sequence 2 at byte 2 of .bin instead of 16"),
    "pointer below 0": (_idx(54, struct.pack("<q", -2)), "puts sequence 0 at byte -2 of .bin instead of 0"),
    "pointer past the end": (_idx(54 + 32, struct.pack("<q", 1 << 40)), "sequence 4 at byte 1099511627776 of .bin"),
    "first document": (_idx(94, struct.pack("<q", 1)), "document array that does not rise from 0 to its 5"),
    "falling document": (_idx(94 + 8, struct.pack("<q", 4)), "document array that does not rise"),
    "document below 0": (_idx(94 + 8, struct.pack("<q", -1)), "document array that does not rise"),
    "last document": (_idx(94 + 40, struct.pack("<q", 6)), "document array that does not rise"),
    "short .idx": (_truncate("idx", 100), "has 100 bytes, but its 5 sequences and 6 document entries take 142"),
    "no header": (_truncate("idx", 20), "has 20 bytes, a header alone has 34"),
    "empty .idx": (_truncate("idx", 0), "has 0 bytes, a header alone has 34"),
    "short .bin": (_truncate("bin", 50), r"bin has 50 bytes, but .*idx lists 27 tokens of 2 bytes = 54"),
    "odd .bin": (_truncate("bin", 53), "bin has 53 bytes"),
    "empty .bin": (_truncate("bin", 0), "bin has 0 bytes"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_pair_is_refused_when_opened(golden: str, name: str) -> None:
    damage, message = DAMAGE[name]
    damage(golden)
    with pytest.raises(DataError, match=message):
        IndexedDataset(golden)


def test_modes_of_a_multimodal_set_are_passed_over(golden: str) -> None:
    with open(f"{golden}.idx", "ab") as file:
        file.write(bytes(5))
    assert len(IndexedDataset(golden)) == 5


def test_a_pair_without_tokens_is_refused(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", np.int32) as writer:
        add_document(writer, [])
    with pytest.raises(DataError, match="holds no sequences"):
        IndexedDataset(tmp_path / "x")


def test_the_suffix_of_preprocessing_is_proposed(golden: str, tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "my_text_document", np.int32) as writer:
        add_document(writer, [1])
    with pytest.raises(DataError, match=r"Use --data-path .*my_text_document$"):
        IndexedDataset(tmp_path / "my")
    with pytest.raises(DataError, match=r"Use --data-path .*golden$"):
        IndexedDataset(f"{golden}.bin")


def test_a_file_that_is_cut_off_while_it_is_read_is_named(golden: str) -> None:
    """A slice of the map ended the process by SIGBUS, without a word."""
    dataset = IndexedDataset(golden)
    dataset.read(4, 0, 1)
    os.truncate(f"{golden}.bin", 20)
    assert dataset.read(0, 0, 1).size == 1
    with pytest.raises(
        DataError, match=r"golden\.bin was cut off to 20 bytes while the run read it\. .* copy it again"
    ):
        dataset.read(4, 0, 1)


def test_a_file_system_that_is_gone_is_named_and_worth_a_restart(golden: str, monkeypatch) -> None:
    def gone(*_: object) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    dataset = IndexedDataset(golden)
    monkeypatch.setattr(os, "pread", gone)
    with pytest.raises(DataLost, match=r"golden\.bin could be read until now: Stale file handle") as caught:
        dataset.read(0, 0, 1)
    assert caught.value.exit_code == 1


def test_a_run_looks_whether_its_files_have_been_cut_off(golden: str) -> None:
    files = mapped_files(DataConfig(data_path=(golden,)))
    assert [Path(path).suffix for path in files] == [".bin", ".idx"]
    os.truncate(f"{golden}.idx", 100)
    with pytest.raises(DataError, match=r"golden\.idx had 142 bytes at the start and has 100\. Copy it again"):
        refuse_cut_off(files)
    for path in files:  # a new pair under the name: the run reads the former one to its end
        os.unlink(path)
    refuse_cut_off(files)


def test_a_glance_reads_no_more_than_the_ends_of_an_index_and_finds_a_pair_cut_off(golden: str, monkeypatch) -> None:
    """Every .idx was opened and read through twice by every rank at every start."""
    monkeypatch.setattr(indexed, "_check_index", lambda *_: pytest.fail("read through"))
    indexed.glance(golden)
    path = Path(f"{golden}.bin")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"golden\.bin has 53 bytes, but .*golden\.idx ends at 54"):
        indexed.glance(golden)


def test_what_is_asked_to_be_on_disk_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()
    monkeypatch.setattr("os.fsync", lambda file: sizes.append(os.fstat(file).st_size))
    with IndexedWriter(tmp_path / "x", np.uint16) as writer:
        add_document(writer, [1, 2, 3])
    assert sizes == [(tmp_path / f"x.{end}").stat().st_size for end in ("idx", "bin")]
