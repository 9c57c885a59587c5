"""Read and write Megatron's PREFIX.bin and PREFIX.idx: token ids, and where each sequence begins.

The reader checks everything against the sizes of the files. A damaged pair is therefore refused
when it is opened, not in the middle of a run. The writer gives a pair its name only when it is
complete.
"""

from __future__ import annotations

import contextlib
import os
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megapipe.data.files import writing
from megapipe.errors import DataError, DataLost

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES: dict[int, type[np.number[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
"""The type of the tokens, by its code in the file; always little-endian."""
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, number of sequences S, entries D of the document array.

After the header follow S lengths (int32), S byte offsets (int64) and D document entries (int64).
"""

# Entries that are checked at a time, so that checking any index takes a few megabytes.
_BLOCK = 1 << 20

_REMEDY = "Write it again with megapipe preprocess."


def token_dtype(vocab_size: int) -> type[np.number[Any]]:
    """Return the type in which Megatron's preprocessing writes the ids of this vocabulary.

    Args:
        vocab_size: the number of ids.
    """
    return np.uint16 if vocab_size < 65500 else np.int32


class IndexedDataset:
    """A checked, memory-mapped .bin/.idx pair, which holds S sequences of tokens.

    `dataset[i]` is a view of the tokens of sequence i, without a copy.

    Attributes:
        prefix: the path without .bin or .idx.
        dtype: type of the tokens.
        lengths: [S] int32, tokens of each sequence.
        documents: [D] int64, the first sequence of each of D - 1 documents, then S: [0, 2, 3] for
            documents of two sequences and one.
        tokens: every token of the file.

    Raises: DataError for a pair that is missing, damaged, empty or does not hold token ids.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        idx = Path(f"{self.prefix}.idx")
        bin = Path(f"{self.prefix}.bin")
        _refuse_missing(self.prefix, [p for p in (idx, bin) if not os.path.isfile(p)])
        with _named(self.prefix):
            self.dtype, sequences, entries = _read_header(idx)
            # Mapped, not read: an index of 10^8 sequences takes more than a gigabyte, and a map is
            # shared by all ranks of a machine.
            raw = np.memmap(idx, np.uint8, "r")
        # See HEADER for the layout.
        lengths_at = HEADER.size
        pointers_at = lengths_at + 4 * sequences
        documents_at = pointers_at + 8 * sequences
        self.lengths: NDArray[np.int32] = np.frombuffer(raw, "<i4", sequences, lengths_at)
        self._pointers: NDArray[np.int64] = np.frombuffer(raw, "<i8", sequences, pointers_at)
        self.documents: NDArray[np.int64] = np.frombuffer(raw, "<i8", entries, documents_at)
        itemsize = self.dtype.itemsize
        _check_index(idx, bin, self.lengths, self._pointers, self.documents, itemsize)
        with _named(self.prefix):
            self.tokens: NDArray[Any] = np.memmap(bin, self.dtype, "r").view(np.ndarray)
            # For `read`; see there why not every access goes through the map.
            self._file = bin.open("rb", buffering=0)

    def __len__(self) -> int:
        return len(self.lengths)

    def start(self, sequence: int) -> int:
        """Return the index in `tokens` at which a sequence begins."""
        return int(self._pointers[sequence]) // self.dtype.itemsize

    def __getitem__(self, sequence: int) -> NDArray[Any]:
        begin = self.start(sequence)
        return self.tokens[begin : begin + int(self.lengths[sequence])]

    def read(self, sequence: int, begin: int, end: int) -> NDArray[Any]:
        """Return the tokens begin..end-1 of a sequence, read from the file now.

        Raises: DataError if the file has become shorter, DataLost if its file system fails.
        """
        size = self.dtype.itemsize
        at = self.start(sequence) + begin
        # Not through the memory map: where the file has lost its end or its file system, access to
        # a map ends the process with SIGBUS, without a message.
        try:
            data = os.pread(self._file.fileno(), (end - begin) * size, at * size)
        except OSError as error:
            raise DataLost(
                f"{self.prefix}.bin could be read until now: {error.strerror}. Look at its disk, "
                "then start again with --load."
            ) from error
        if len(data) < (end - begin) * size:
            now = os.fstat(self._file.fileno()).st_size
            raise _damaged(
                Path(f"{self.prefix}.bin"), f"was cut off to {now} bytes while the run read it"
            )
        return np.frombuffer(data, self.dtype)


def glance(prefix: str) -> None:
    """Check a .bin/.idx pair quickly: the header, the sizes and the last sequence of the index.

    Args:
        prefix: the path without .bin or .idx.
    Raises: DataError for a pair that is missing or damaged. `IndexedDataset` checks every entry.
    """
    idx = Path(f"{prefix}.idx")
    bin = Path(f"{prefix}.bin")
    _refuse_missing(prefix, [p for p in (idx, bin) if not os.path.isfile(p)])
    with _named(prefix):
        dtype, sequences, _ = _read_header(idx)
    with idx.open("rb") as file:
        file.seek(HEADER.size + 4 * (sequences - 1))
        (length,) = struct.unpack("<i", file.read(4))
        # The last byte offset: the lengths take 4 bytes each, the offsets after them 8 bytes each.
        file.seek(HEADER.size + 12 * sequences - 8)
        (pointer,) = struct.unpack("<q", file.read(8))
    # Sequences fill .bin without gaps, so the end of the last one is the size of the file.
    size = bin.stat().st_size
    expected = pointer + length * dtype.itemsize
    if size != expected:
        raise _damaged(bin, f"has {size} bytes, but {idx} ends at {expected}")


@contextlib.contextmanager
def _named(prefix: str) -> Iterator[None]:
    """Turn an OSError within the block, such as a missing permission, into a DataError.

    Args:
        prefix: the path without .bin or .idx, which the error names.
    """
    try:
        yield
    except OSError as error:
        raise DataError(f"--data-path {prefix}: {error.filename}: {error.strerror}") from None


def _refuse_missing(prefix: str, missing: list[Path]) -> None:
    """Raise DataError if files are missing; the message suggests a prefix that exists."""
    if not missing:
        return
    names = " and ".join(str(p) for p in missing)
    text = f"--data-path {prefix}: no file {names}."
    # Common slips: the prefix that preprocess was given, or a file of the pair.
    for near in (
        f"{prefix}_text_document",
        prefix.removesuffix(".bin"),
        prefix.removesuffix(".idx"),
    ):
        if near != prefix and os.path.isfile(f"{near}.idx"):
            raise DataError(f"{text} Use --data-path {near}")
    raise DataError(
        f"{text} Give the prefix that megapipe preprocess printed at its end, without .bin; or "
        "--mock-data."
    )


def _read_header(idx: Path) -> tuple[np.dtype[Any], int, int]:
    """Return (dtype, number S of sequences, length D of the array of documents) of an index.

    Args:
        idx: the .idx file.
    Raises: DataError for a header that is wrong or does not agree with the size of the file.
    """
    size = idx.stat().st_size
    with idx.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size:
        raise _damaged(idx, f"has {size} bytes, a header alone has {HEADER.size}")
    magic, version, code, sequences, entries = HEADER.unpack(head)
    if magic != MAGIC:
        raise _damaged(
            idx, f"begins with {magic!r} instead of {MAGIC!r}: not an index of token ids"
        )
    if version != VERSION:
        raise DataError(
            f"{idx} has version {version} at byte 9; only version {VERSION} is known. {_REMEDY}"
        )
    if code not in DTYPES:
        raise _damaged(
            idx, f"has dtype code {code} at byte 17; known are {', '.join(map(str, DTYPES))}"
        )
    if not issubclass(DTYPES[code], np.integer):
        raise DataError(
            f"{idx} holds {DTYPES[code].__name__} (dtype code {code}), not integer token ids. "
            f"{_REMEDY}"
        )
    expected = HEADER.size + 12 * sequences + 8 * entries
    # Indices of multimodal datasets end with one more byte per sequence, its mode.
    if size not in (expected, expected + sequences):
        raise _damaged(
            idx,
            f"has {size} bytes, but its {sequences} sequences and {entries} document entries "
            f"take {expected}",
        )
    if sequences == 0:
        raise DataError(
            f"{idx} holds no sequences. The text it was made from was empty; preprocess another."
        )
    return np.dtype(DTYPES[code]).newbyteorder("<"), sequences, entries


def _check_index(
    idx: Path,
    bin: Path,
    lengths: NDArray[np.int32],
    pointers: NDArray[np.int64],
    documents: NDArray[np.int64],
    itemsize: int,
) -> None:
    """Check that sequences fill .bin without gaps, and that documents begin at rising sequences.

    Args:
        idx, bin: the paths of the two files.
        lengths: [S] tokens of each sequence.
        pointers: [S] byte offset of each sequence in .bin.
        documents: [D] first sequence of each of D - 1 documents, then S, such as [0, 2, 3].
        itemsize: bytes per token.
    Raises: DataError with the first entry that is wrong.
    """
    expected = 0
    # In blocks, because a large index has no room for several copies of it in memory.
    for at in range(0, len(lengths), _BLOCK):
        length = lengths[at : at + _BLOCK].astype(np.int64)
        if (length < 0).any():
            bad = int((length < 0).argmax())
            raise _damaged(idx, f"gives sequence {at + bad} the length {length[bad]}")
        ends = expected + np.cumsum(length) * itemsize
        begins = ends - length * itemsize
        wrong = pointers[at : at + _BLOCK] != begins
        if wrong.any():
            bad = int(wrong.argmax())
            raise _damaged(
                idx,
                f"puts sequence {at + bad} at byte {pointers[at + bad]} of .bin instead of "
                f"{int(begins[bad])}",
            )
        expected = int(ends[-1])
    size = bin.stat().st_size
    if size != expected:
        tokens = expected // itemsize
        raise _damaged(
            bin,
            f"has {size} bytes, but {idx} lists {tokens} tokens of {itemsize} bytes = {expected}",
        )
    if expected == 0:
        raise DataError(
            f"{bin} holds no tokens. The text it was made from was empty; preprocess another."
        )
    rises = len(documents) > 0 and documents[0] == 0 and documents[-1] == len(lengths)
    for at in range(0, len(documents), _BLOCK):
        # One entry more than a block, so that each pair of neighbours is compared.
        rises = rises and not (np.diff(documents[at : at + _BLOCK + 1]) < 0).any()
    if not rises:
        raise _damaged(
            idx, f"has a document array that does not rise from 0 to its {len(lengths)} sequences"
        )


def _damaged(path: Path, problem: str) -> DataError:
    """Return the error for a file that is damaged.

    Args:
        path: the file.
        problem: the damage, in words.
    """
    return DataError(
        f"{path} {problem}. It is damaged or incomplete: copy it again or make it with megapipe "
        "preprocess."
    )


class IndexedWriter:
    """Writes a .bin/.idx pair. Used as a context manager, it leaves a complete pair or none.

    Both files are written under temporary names. A former pair of the same name is replaced only
    when the block ends without an error.

    Args:
        prefix: path of the pair without .bin or .idx.
        dtype: integer type of the tokens.
    Raises: DataError if a file cannot be written.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: DTypeLike) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._temporary = [Path(f"{self.prefix}.{end}.{os.getpid()}.tmp") for end in ("bin", "idx")]
        with writing(self.prefix):
            Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
            self._bin = self._temporary[0].open("wb")

    def add_documents(self, tokens: NDArray[Any], lengths: NDArray[Any]) -> None:
        """Append documents that each consist of one sequence; an empty one has no sequence.

        Args:
            tokens: the tokens of all these documents back to back.
            lengths: the number of tokens of each document.
        Raises: DataError for a token that the file's type cannot hold.
        """
        assert lengths.sum() == tokens.size
        if tokens.size:
            limit = np.iinfo(self.dtype)
            low = tokens.min()
            high = tokens.max()
            if low < limit.min or high > limit.max:
                wrong = high if high > limit.max else low
                raise DataError(f"{self.prefix}: token {wrong} does not fit {self.dtype}")
        with writing(self.prefix):
            self._bin.write(tokens.astype(self.dtype, copy=False).tobytes())
        before = len(self._lengths)
        # Megatron-LM's writer, too, gives an empty document an entry without a sequence.
        self._lengths.extend(lengths[lengths > 0].tolist())
        self._documents.extend((before + np.cumsum(lengths > 0)).tolist())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                with writing(self.prefix):
                    self._finish()
                self._publish()
        finally:
            for path in self._temporary:
                path.unlink(missing_ok=True)
            # On a full disk closing fails again; the error of the block has said so.
            with contextlib.suppress(OSError):
                self._bin.close()

    def _finish(self) -> None:
        """Write the index, and wait until both files are on disk."""
        lengths = np.array(self._lengths, "<i4")
        pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * self.dtype.itemsize
        documents = np.array(self._documents, "<i8")
        code = next(code for code, kind in DTYPES.items() if np.dtype(kind) == self.dtype)
        with self._temporary[1].open("wb") as idx:
            idx.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(documents)))
            for part in (lengths, pointers.astype("<i8"), documents):
                idx.write(part.tobytes())
            idx.flush()
            os.fsync(idx.fileno())
        self._bin.flush()
        os.fsync(self._bin.fileno())

    def _publish(self) -> None:
        """Rename both files to their final names."""
        # The old index is deleted first: a crash between the renames leaves no pair, never a new
        # .bin with an old .idx.
        try:
            Path(f"{self.prefix}.idx").unlink(missing_ok=True)
            self._temporary[0].rename(f"{self.prefix}.bin")
            self._temporary[1].rename(f"{self.prefix}.idx")
        except OSError as error:
            raise DataError(
                f"{self.prefix}: the finished pair cannot take its name: {error.strerror}. "
                "A former one may be gone; write it again."
            ) from error
