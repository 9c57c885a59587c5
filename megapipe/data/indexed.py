"""Megatron's PREFIX.bin and PREFIX.idx: token ids back to back, and where each sequence begins.

The reader believes nothing it has not checked against the size of the files, so that a damaged pair is refused when it
is opened and not in the middle of a run. The writer shows a pair under its name only when it is complete.
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
"""Code in the file -> type of the tokens, always little-endian."""
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, number of sequences S, entries of the document array D."""

_BLOCK = 1 << 20  # entries checked at a time: a scan of an index of any size stays within megabytes


def token_dtype(vocab_size: int) -> type[np.number[Any]]:
    """The narrowest type Megatron's preprocessing uses for this vocabulary."""
    return np.uint16 if vocab_size < 65500 else np.int32


class IndexedDataset:
    """A checked, memory-mapped .bin/.idx pair. `dataset[i]` is the tokens of sequence i, without a copy.

    Attributes:
        lengths: [S] int32, tokens of each sequence.
        documents: [D] int64, number of sequences before each document, and S at the end.
        tokens: every token of the file.

    Raises: DataError for a pair that is missing, damaged, empty or does not hold token ids.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        idx, bin = Path(f"{self.prefix}.idx"), Path(f"{self.prefix}.bin")
        _refuse_missing(self.prefix, [p for p in (idx, bin) if not os.path.isfile(p)])
        with _named(self.prefix):
            self.dtype, sequences, entries = _read_header(idx)
            # Mapped, not read: an index of 10^8 sequences has more than a gigabyte, which the ranks of a machine share
            # so.
            raw = np.memmap(idx, np.uint8, "r")
        at = HEADER.size
        self.lengths: NDArray[np.int32] = np.frombuffer(raw, "<i4", sequences, at)
        pointers: NDArray[np.int64] = np.frombuffer(raw, "<i8", sequences, at + 4 * sequences)
        self.documents: NDArray[np.int64] = np.frombuffer(raw, "<i8", entries, at + 12 * sequences)
        _check_index(idx, bin, self.lengths, pointers, self.documents, self.dtype.itemsize)
        self._pointers = pointers
        with _named(self.prefix):
            self.tokens: NDArray[Any] = np.memmap(bin, self.dtype, "r").view(np.ndarray)
            self._file = bin.open("rb", buffering=0)

    def __len__(self) -> int:
        return len(self.lengths)

    def start(self, sequence: int) -> int:
        """Index into `tokens` of the first token of a sequence."""
        return int(self._pointers[sequence]) // self.dtype.itemsize

    def __getitem__(self, sequence: int) -> NDArray[Any]:
        begin = self.start(sequence)
        return self.tokens[begin : begin + int(self.lengths[sequence])]

    def read(self, sequence: int, begin: int, end: int) -> NDArray[Any]:
        """Tokens begin..end-1 of a sequence, as they are in the file now.

        Not by way of the map, where a file that has been cut off, or whose file system is gone, ends the process by
        SIGBUS. Raises: DataError for the first, DataLost for the second.
        """
        size, at = self.dtype.itemsize, self.start(sequence) + begin
        try:
            data = os.pread(self._file.fileno(), (end - begin) * size, at * size)
        except OSError as error:
            text = f"{self.prefix}.bin could be read until now: {error.strerror}. Look at its disk"
            raise DataLost(f"{text}, then start again with --load.") from error
        if len(data) < (end - begin) * size:
            now = os.fstat(self._file.fileno()).st_size
            raise _damaged(Path(f"{self.prefix}.bin"), f"was cut off to {now} bytes while the run read it")
        return np.frombuffer(data, self.dtype)


def glance(prefix: str) -> None:
    """Check what can be seen of a pair without reading its index through: header, sizes, where the last sequence ends.

    Raises: DataError as `IndexedDataset`, which looks at every entry.
    """
    idx, bin = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    _refuse_missing(prefix, [p for p in (idx, bin) if not os.path.isfile(p)])
    with _named(prefix):
        dtype, sequences, _ = _read_header(idx)
    with idx.open("rb") as file:
        file.seek(HEADER.size + 4 * (sequences - 1))
        (length,) = struct.unpack("<i", file.read(4))
        # Behind the lengths, 4 bytes each, stand the pointers, 8 bytes each: this is the last of them.
        file.seek(HEADER.size + 12 * sequences - 8)
        (pointer,) = struct.unpack("<q", file.read(8))
    size, expected = bin.stat().st_size, pointer + length * dtype.itemsize
    if size != expected:
        raise _damaged(bin, f"has {size} bytes, but {idx} ends at {expected}")


@contextlib.contextmanager
def _named(prefix: str) -> Iterator[None]:
    """A file that cannot be opened, for want of permission or of its disk, in the user's words."""
    try:
        yield
    except OSError as error:
        raise DataError(f"--data-path {prefix}: {error.filename}: {error.strerror}") from None


def _refuse_missing(prefix: str, missing: list[Path]) -> None:
    if not missing:
        return
    names = " and ".join(str(p) for p in missing)
    text = f"--data-path {prefix}: no file {names}."
    for suffix in ("_text_document", ".bin", ".idx"):
        near = prefix + suffix if suffix[0] == "_" else prefix.removesuffix(suffix)
        if near != prefix and os.path.isfile(f"{near}.idx"):
            raise DataError(f"{text} Use --data-path {near}")
    raise DataError(
        f"{text} Give the prefix that megapipe preprocess printed at its end, without .bin; or --mock-data."
    )


def _read_header(idx: Path) -> tuple[np.dtype[Any], int, int]:
    """dtype, S and D of an index whose size agrees with them."""
    size = idx.stat().st_size
    with idx.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size:
        raise _damaged(idx, f"has {size} bytes, a header alone has {HEADER.size}")
    magic, version, code, sequences, entries = HEADER.unpack(head)
    if magic != MAGIC:
        raise _damaged(idx, f"begins with {magic!r} instead of {MAGIC!r}: not an index of token ids")
    if version != VERSION:
        raise DataError(f"{idx} has version {version} at byte 9; only version {VERSION} is known. {_REMEDY}")
    if code not in DTYPES:
        raise _damaged(idx, f"has dtype code {code} at byte 17; known are {', '.join(map(str, DTYPES))}")
    if not issubclass(DTYPES[code], np.integer):
        raise DataError(f"{idx} holds {DTYPES[code].__name__} (dtype code {code}), not integer token ids. {_REMEDY}")
    expected = HEADER.size + 12 * sequences + 8 * entries
    if size not in (expected, expected + sequences):  # the latter with the modes of multimodal sets
        raise _damaged(
            idx, f"has {size} bytes, but its {sequences} sequences and {entries} document entries take {expected}"
        )
    if sequences == 0:
        raise DataError(f"{idx} holds no sequences. The text it was made from was empty; preprocess another.")
    return np.dtype(DTYPES[code]).newbyteorder("<"), sequences, entries


def _check_index(
    idx: Path,
    bin: Path,
    lengths: NDArray[np.int32],
    pointers: NDArray[np.int64],
    documents: NDArray[np.int64],
    itemsize: int,
) -> None:
    """Sequences lie back to back from byte 0 to the end of .bin; documents cut them in order."""
    expected = 0
    # Block by block: an index may have more entries than memory has room for several copies of.
    for at in range(0, len(lengths), _BLOCK):
        length = lengths[at : at + _BLOCK].astype(np.int64)
        if (length < 0).any():
            bad = int((length < 0).argmax())
            raise _damaged(idx, f"gives sequence {at + bad} the length {length[bad]}")
        ends = expected + np.cumsum(length) * itemsize
        wrong = pointers[at : at + _BLOCK] != ends - length * itemsize
        if wrong.any():
            bad = int(wrong.argmax())
            should = int(ends[bad] - length[bad] * itemsize)
            raise _damaged(idx, f"puts sequence {at + bad} at byte {pointers[at + bad]} of .bin instead of {should}")
        expected = int(ends[-1])
    size = bin.stat().st_size
    if size != expected:
        tokens = expected // itemsize
        raise _damaged(bin, f"has {size} bytes, but {idx} lists {tokens} tokens of {itemsize} bytes = {expected}")
    if expected == 0:
        raise DataError(f"{bin} holds no tokens. The text it was made from was empty; preprocess another.")
    good = len(documents) > 0 and documents[0] == 0 and documents[-1] == len(lengths)
    if not good or any((np.diff(documents[at : at + _BLOCK + 1]) < 0).any() for at in range(0, len(documents), _BLOCK)):
        raise _damaged(idx, f"has a document array that does not rise from 0 to its {len(lengths)} sequences")


_REMEDY = "Write it again with megapipe preprocess."


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path} {what}. It is damaged or incomplete: copy it again or make it with megapipe preprocess.")


class IndexedWriter:
    """Writes a .bin/.idx pair; used as a context manager, it leaves a complete pair or none.

    Both files grow under temporary names. A former pair of the same name is replaced only on a clean exit.
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
        """Documents of one sequence each. tokens: all of them back to back; lengths: tokens of each.

        Raises: DataError for a token that the file's type cannot hold.
        """
        assert lengths.sum() == tokens.size
        if tokens.size:
            limit = np.iinfo(self.dtype)
            low, high = tokens.min(), tokens.max()
            if low < limit.min or high > limit.max:
                raise DataError(f"{self.prefix}: token {high if high > limit.max else low} does not fit {self.dtype}")
        with writing(self.prefix):
            self._bin.write(tokens.astype(self.dtype, copy=False).tobytes())
        before = len(self._lengths)
        # An empty document is an entry without a sequence, as Megatron-LM's own writer has it.
        self._lengths.extend(lengths[lengths > 0].tolist())
        self._documents.extend((before + np.cumsum(lengths > 0)).tolist())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with writing(self.prefix):
                    self._finish()
                self._publish()
        finally:
            for path in self._temporary:
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # a full disk, said already
                self._bin.close()

    def _finish(self) -> None:
        lengths = np.array(self._lengths, "<i4")
        pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * self.dtype.itemsize
        code = next(code for code, kind in DTYPES.items() if np.dtype(kind) == self.dtype)
        with self._temporary[1].open("wb") as idx:
            idx.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(self._documents)))
            for part in (lengths, pointers.astype("<i8"), np.array(self._documents, "<i8")):
                idx.write(part.tobytes())
            idx.flush()
            os.fsync(idx.fileno())
        self._bin.flush()
        os.fsync(self._bin.fileno())

    def _publish(self) -> None:
        # The old index goes first: a crash between the renames leaves no pair rather than a mixed one.
        try:
            Path(f"{self.prefix}.idx").unlink(missing_ok=True)
            self._temporary[0].rename(f"{self.prefix}.bin")
            self._temporary[1].rename(f"{self.prefix}.idx")
        except OSError as error:
            raise DataError(
                f"{self.prefix}: the finished pair cannot take its name: {error.strerror}. A former one may be gone; "
                "write it again."
            ) from error
