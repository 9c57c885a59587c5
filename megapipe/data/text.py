"""Documents of text from files: a line of JSON Lines each, or a file of any other kind each."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megapipe.errors import DataError

_JSON_LINES = (".jsonl", ".json", ".ndjson")


class RawDocument(NamedTuple):
    """Bytes of a document, not yet looked at; line is its number in a JSON Lines file, None for a whole file."""

    path: str
    line: int | None
    content: bytes

    @property
    def where(self) -> str:
        return self.path if self.line is None else f"{self.path}:{self.line}"


def raw_documents(paths: Sequence[str]) -> Iterator[RawDocument]:
    """Every document in order. .jsonl, .json and .ndjson (also .gz) have one per line, blank lines skipped.

    Raises: DataError for a file that cannot be read.
    """
    for path in paths:
        try:
            yield from _documents_of(path)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"--input {path}: {getattr(error, 'strerror', None) or error}") from error


def text_bytes(paths: Sequence[str]) -> int:
    """The size of all files, unpacked; those that are no files, such as a pipe, count for nothing.

    Raises: DataError for one that cannot be read.
    """
    total = 0
    for path in filter(os.path.isfile, paths):
        try:
            if not path.endswith(".gz"):
                total += os.path.getsize(path)
                continue
            with gzip.open(path) as file:
                while part := file.read(1 << 20):
                    total += len(part)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"--input {path}: {getattr(error, 'strerror', None) or error}") from error
    return total


def _documents_of(path: str) -> Iterator[RawDocument]:
    packed = path.endswith(".gz")
    with gzip.open(path) if packed else open(path, "rb") as file:
        if not path.removesuffix(".gz").endswith(_JSON_LINES):
            yield RawDocument(path, None, file.read())
            return
        for number, line in enumerate(file, 1):
            if not line.isspace():
                yield RawDocument(path, number, line)


def texts(raw: RawDocument, keys: Sequence[str]) -> list[str]:
    """The texts under `keys`; a plain text file has the one key "text".

    Raises: DataError naming file, line and what is wrong with it.
    """
    if raw.line is None:
        if list(keys) != ["text"]:
            raise DataError(f"{raw.where}: --json-keys {' '.join(keys)} needs JSON Lines (.jsonl), not plain text")
        return [_decoded(raw)]
    try:
        record = json.loads(_decoded(raw))
    except json.JSONDecodeError as error:
        raise DataError(f"{raw.where}: not JSON: {error.msg} at column {error.colno}") from error
    except ValueError as error:  # a number of more digits than Python converts
        raise DataError(f"{raw.where}: {error}") from error
    except RecursionError as error:
        raise DataError(f"{raw.where}: JSON nested too deep to be read") from error
    if not isinstance(record, dict):
        raise DataError(f'{raw.where}: a JSON {type(record).__name__}; each line must be an object, {{"text": "..."}}')
    return [_text(raw, record, key) for key in keys]


def _decoded(raw: RawDocument) -> str:
    try:
        return raw.content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{raw.where}: not UTF-8 at byte {error.start} ({error.reason}). Convert the file") from error


def _text(raw: RawDocument, record: dict[str, object], key: str) -> str:
    text = record.get(key)
    if not isinstance(text, str):
        has = (
            f"of type {type(text).__name__}"
            if key in record
            else f"missing; the line has {', '.join(record) or 'no keys'}"
        )
        raise DataError(f"{raw.where}: key {key!r} must be a text, but is {has}. See --json-keys")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise DataError(f"{raw.where}: key {key!r} has a lone surrogate at character {error.start}") from error
    return text
