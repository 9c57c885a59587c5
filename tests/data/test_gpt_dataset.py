"""Document, sample and shuffle index against Megatron's own values and a walk written from the format's text."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.data import index_cache
from megapipe.data.gpt_dataset import GPTDataset, MockTokens, build_indices
from megapipe.data.index_cache import cached
from megapipe.data.indexed import IndexedDataset
from megapipe.errors import DataError

LENGTHS = np.array([5, 3, 7, 3, 9], np.int32)
SAMPLES_6 = [(0, 0), (0, 4), (0, 8), (1, 3), (2, 2), (3, 3), (4, 0)]
SAMPLES_9 = [*SAMPLES_6, (5, 1), (6, 2), (6, 6), (8, 0), (8, 4), (9, 3), (9, 7)]
SAMPLES_12 = [(0, 0), (0, 4), (1, 1), (1, 5), (2, 2), (2, 6), (3, 1), (4, 2), (5, 1), (6, 2), (6, 6), (7, 1), (8, 0)]
ONE_EPOCH = ("4 0 1 2 3", SAMPLES_6, "5 2 3 1 0 4")
TWO_APART = ("4 0 1 2 3 3 2 1 0 4", SAMPLES_9, "0 4 3 2 5 1 7 6 9 8 11 10 12")
GOLDEN = {  # Megatron-LM d98e8a64 on CPU, s = 4, seed 1234
    None: ONE_EPOCH,
    6: ONE_EPOCH,
    7: TWO_APART,
    9: TWO_APART,
    12: ("2 2 4 1 0 3 4 0 1 3", [*SAMPLES_12, (9, 1)], "3 12 2 1 7 5 4 0 8 6 11 10 9"),
    20: ("3 1 0 2 4 2 0 2 1 4 3 4 0 1 3", None, "7 10 4 1 12 8 3 17 14 13 18 11 0 2 6 15 9 19 5 16"),
}


@pytest.mark.parametrize("num_samples", GOLDEN)
def test_indices_equal_megatrons(num_samples: int | None) -> None:
    documents, samples, shuffle = GOLDEN[num_samples]
    built = build_indices(LENGTHS, np.arange(5), 4, num_samples, 1234)
    assert " ".join(map(str, built.documents)) == documents
    assert " ".join(map(str, built.shuffle)) == shuffle
    if samples is not None:
        assert [tuple(row) for row in built.samples[:].tolist()] == samples
    assert [array.dtype for array in built.arrays()] == [np.int32, np.int32, np.uint32]
    assert built.samples[1:3].dtype == np.int32


def test_items_equal_megatrons(golden: str) -> None:
    dataset = GPTDataset(IndexedDataset(golden), build_indices(LENGTHS, np.arange(5), 4, 6, 1234), 4, 17, np.arange(5))
    assert [dataset[i].tolist() for i in range(3)] == [[14, 15, 16, 0, 1], [0, 5, 6, 7, 8], [8, 0, 9, 10, 0]]
    assert dataset[0].dtype == np.int64
    assert len(dataset) == 6


def walk(lengths: list[int], samples: int, s: int) -> list[tuple[int, int]]:
    """The sample index step by step, as formats describe it."""
    rows, p, o = [(0, 0)], 0, 0
    for _ in range(samples):
        need = s + 1
        while lengths[p] - o < need:
            need -= lengths[p] - o
            p, o = p + 1, 0
        o += need - 1
        rows.append((p, o))
    return rows


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=9).filter(any),
    st.integers(2, 9),
    st.none() | st.integers(1, 40),
    st.integers(0, 2**32 - 1),
)
def test_indices_equal_a_walk_over_the_documents(lengths: list[int], s: int, wanted: int | None, seed: int) -> None:
    built = build_indices(np.array(lengths, np.int32), np.arange(len(lengths)), s, wanted, seed)
    epochs = len(built.documents) // len(lengths)
    samples = (epochs * sum(lengths) - 1) // s
    assert epochs == 1 or (epochs - 1) * sum(lengths) < (wanted or 0) * s + 1 <= epochs * sum(lengths)
    assert sorted(built.documents.tolist()) == sorted(list(range(len(lengths))) * epochs)
    assert sorted(built.shuffle.tolist()) == list(range(samples))
    assert samples >= (wanted or 0)
    rows = walk([lengths[d] for d in built.documents], samples, s)
    assert [tuple(row) for row in built.arrays()[1].tolist()] == rows
    # Each row by itself, too, as an item of a run without a cache reads it.
    assert [tuple(built.samples[j : j + 1][0].tolist()) for j in range(samples + 1)] == rows


@pytest.mark.parametrize(("tokens", "s"), [(1, 64), (64, 1), (8, 8)])
def test_where_samples_begin_takes_no_more_memory_than_a_row_for_each(tokens: int, s: int) -> None:
    """Of 365 million short documents what makes the rows would take 4.4 GB on each rank, and the rows 0.3."""
    lengths = np.full(10_000, tokens, np.int32)
    built = build_indices(lengths, np.arange(len(lengths)), s, None, 1)
    held = built.samples if isinstance(built.samples, np.ndarray) else built.samples.begins
    assert held.nbytes <= built.arrays()[1].nbytes + 16


@given(st.lists(st.lists(st.integers(1, 99), max_size=6), min_size=1, max_size=6).filter(any), st.integers(2, 5))
def test_items_are_windows_of_the_stream(documents: list[list[int]], s: int) -> None:
    class Source:
        prefix = "list"
        lengths = np.array([len(d) for d in documents], np.int32)

        def read(self, sequence: int, begin: int, end: int) -> np.ndarray:
            return np.array(documents[sequence][begin:end], np.uint8)

    built = build_indices(Source.lengths, np.arange(len(documents)), s, 10, 7)
    dataset = GPTDataset(Source(), built, s, 100, np.arange(len(documents)))
    damaged = replace(dataset, indices=built._replace(shuffle=built.shuffle + len(built.shuffle)))
    with pytest.raises(DataError, match="--data-cache-path: the index of list is damaged at sample 0"):
        damaged[0]
    stream = [token for d in built.documents for token in documents[d]]
    for item, j in enumerate(built.shuffle.tolist()):
        assert dataset[item].tolist() == stream[j * s : j * s + s + 1]


def test_a_token_outside_the_vocabulary_names_the_file(golden: str) -> None:
    dataset = GPTDataset(IndexedDataset(golden), build_indices(LENGTHS, np.arange(5), 4, 6, 1234), 4, 16, np.arange(5))
    with pytest.raises(DataError, match="golden holds token 16, but the tokenizer has ids 0 to 15"):
        dataset[0]


def test_mock_documents_count_up_and_end_with_eod() -> None:
    mock = MockTokens(vocab_size=50, eod=49)
    lengths = np.random.default_rng(0).integers(low=1, high=4096, size=100000, dtype=np.int32)
    assert (mock.lengths == lengths).all()
    expected = np.concatenate([(np.arange(lengths[3] - 1) + 1) % 50, [49]])
    assert mock[3].tolist() == expected.tolist()


def test_cached_indices_are_mapped_and_not_built_again(tmp_path: Path) -> None:
    built = build_indices(LENGTHS, np.arange(5), 4, 6, 1234).arrays()
    first = cached(str(tmp_path / "cache"), {"a": 1}, lambda: built)
    again = cached(str(tmp_path / "cache"), {"a": 1}, lambda: pytest.fail("built twice"))
    for arrays in (first, again):
        assert all((x == y).all() and x.dtype == y.dtype for x, y in zip(arrays, built, strict=True))
    other = cached(str(tmp_path / "cache"), {"a": 2}, lambda: [np.arange(3)])
    assert other[0].tolist() == [0, 1, 2]
    assert len(list((tmp_path / "cache").iterdir())) == 2  # no temporary folder left


def builders(folder: Path, starters: int, seconds: float = 0.2) -> int:
    """How many of so many starters of one cold entry have built it; all get the same arrays."""
    built: list[int] = []

    def build() -> list[np.ndarray]:
        built.append(len(list(folder.glob(".building-*"))))
        time.sleep(seconds)
        return [np.arange(1000)]

    with ThreadPoolExecutor(starters) as pool:
        found = list(pool.map(lambda _: cached(str(folder), {"a": 1}, build)[0].tolist(), range(starters)))
    assert found == [list(range(1000))] * starters
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []
    return len(built)


def test_one_of_many_starters_builds_a_cold_entry_and_the_others_wait(tmp_path: Path) -> None:
    """8 starters of a 40 MB entry had 265 MB on disk at once."""
    assert builders(tmp_path, 16) == 1


@pytest.mark.parametrize("gone", ["this machine", "another machine"])
def test_a_builder_that_was_killed_holds_nobody_up_and_leaves_nothing(
    tmp_path: Path, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached(str(tmp_path), {"a": 1}, lambda: [np.arange(1000)])
    (entry,) = tmp_path.iterdir()
    shutil.rmtree(entry)
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    host = socket.gethostname() if gone == "this machine" else "elsewhere"
    (tmp_path / f".lock-{entry.name}").write_text(f"{host} {killed.pid}")
    (tmp_path / f".building-{entry.name}-x").mkdir()
    monkeypatch.setattr(index_cache, "_STALE_S", 1.5)
    monkeypatch.setattr(index_cache, "_BEAT_S", 0.05)
    assert builders(tmp_path, 16) == 1


def test_a_builder_that_says_it_lives_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_cache, "_STALE_S", 0.5)
    monkeypatch.setattr(index_cache, "_BEAT_S", 0.05)
    monkeypatch.setattr(index_cache, "_dead", lambda holder: False)
    assert builders(tmp_path, 4, seconds=1.2) == 1


def test_a_damaged_or_unwritable_cache_is_named(tmp_path: Path) -> None:
    cached(str(tmp_path), {}, lambda: [np.arange(1000)])
    (file,) = tmp_path.glob("*/0.npy")
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(DataError, match=r"--data-cache-path entry .* is damaged .* Delete it: rm -r"):
        cached(str(tmp_path), {}, lambda: [np.arange(1000)])
    with pytest.raises(DataError, match="cannot store an index of 8000 bytes"):
        cached(str(file), {}, lambda: [np.arange(1000)])


@pytest.mark.parametrize("damage", ["lacks one", "another shape", "another type", "empty", "no facts", "other facts"])
def test_a_cache_entry_whose_arrays_are_not_those_that_were_stored_is_named(tmp_path: Path, damage: str) -> None:
    built = [np.arange(i) for i in range(12)]  # 10.npy comes before 2.npy by name
    assert [len(x) for x in cached(str(tmp_path), {}, lambda: built)] == list(range(12))
    (entry,) = tmp_path.iterdir()
    file, facts = entry / "2.npy", entry / "arrays.json"
    {
        "lacks one": file.unlink,
        "another shape": lambda: np.save(file, np.arange(3)),
        "another type": lambda: np.save(file, np.arange(2.0)),
        "empty": lambda: file.write_bytes(b""),
        "no facts": facts.unlink,
        "other facts": lambda: facts.write_text("[" * 100_000),
    }[damage]()
    with pytest.raises(DataError, match=f"entry {entry} is damaged .* Delete it: rm -r"):
        cached(str(tmp_path), {}, lambda: pytest.fail("built again"))


@pytest.mark.parametrize("refused", ["removed", "read"])
def test_a_dead_lock_of_another_user_holds_nobody_up(tmp_path, monkeypatch, refused: str) -> None:
    """Every rank waited without end for a lock that its user might not remove or read."""
    cached(str(tmp_path), {"a": 1}, lambda: [np.arange(10)])
    (entry,) = tmp_path.iterdir()
    shutil.rmtree(entry)
    lock = tmp_path / f".lock-{entry.name}"
    if refused == "read":
        lock.mkdir()  # cannot be read as a file by root either
    else:
        lock.write_text("elsewhere 1")
    unlink = Path.unlink

    def may_not(path: Path, missing_ok: bool = False) -> None:
        if path == lock:
            raise PermissionError
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", may_not)
    monkeypatch.setattr(index_cache, "_STALE_S", 0.2)
    found: list[np.ndarray] = []
    waiting = threading.Thread(
        target=lambda: found.extend(cached(str(tmp_path), {"a": 1}, lambda: [np.arange(10)])), daemon=True
    )
    waiting.start()
    waiting.join(20)
    assert [array.tolist() for array in found] == [list(range(10))]
