"""Read documents of text: one per line of a JSON Lines file, or one per file of any other kind."""

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
    """A document as the input has it: the bytes of a line of JSON, or of a whole text file.

    `where` names the document's file and line in messages.

    Attributes:
        path: the file with the document.
        line: line number in a JSON Lines file, from 1; None for a whole file.
        content: the bytes of the line, or of the file.
    """

    path: str
    line: int | None
    content: bytes

    @property
    def where(self) -> str:
        """The place of the document for messages, FILE:LINE or FILE."""
        return self.path if self.line is None else f"{self.path}:{self.line}"


def raw_documents(paths: Sequence[str]) -> Iterator[RawDocument]:
    """Yield all documents of all files in order.

    Files named .jsonl, .json or .ndjson hold one document per line; blank lines are skipped. A file
    may be compressed, with .gz after its name.

    Args:
        paths: the files.
    Raises: DataError for a file that cannot be read.
    """
    for path in paths:
        try:
            # gzip has three errors: for a wrong header, for an early end, and for damage between
            # both.
            yield from _documents_of(path)
        except (OSError, EOFError, zlib.error) as error:
            raise _unreadable(path, error) from error


def text_bytes(paths: Sequence[str]) -> int:
    """Return the uncompressed size of all files in bytes; pipes and missing files count as 0.

    Args:
        paths: the files.
    Raises: DataError for a compressed file that cannot be read.
    """
    total = 0
    # A pipe can be read only once, and a count would take its documents away.
    for path in filter(os.path.isfile, paths):
        try:
            if not path.endswith(".gz"):
                total += os.path.getsize(path)
                continue
            # gzip stores the size modulo 4 GiB, so the file is decompressed to count.
            with gzip.open(path) as file:
                while part := file.read(1 << 20):
                    total += len(part)
        except (OSError, EOFError, zlib.error) as error:
            raise _unreadable(path, error) from error
    return total


def _unreadable(path: str, error: Exception) -> DataError:
    """Return the error for an input file that cannot be read."""
    return DataError(f"--input {path}: {getattr(error, 'strerror', None) or error}")


def _documents_of(path: str) -> Iterator[RawDocument]:
    """Yield the documents of one file."""
    packed = path.endswith(".gz")
    with gzip.open(path) if packed else open(path, "rb") as file:
        if not path.removesuffix(".gz").endswith(_JSON_LINES):
            yield RawDocument(path, None, file.read())
            return
        for number, line in enumerate(file, 1):
            # Blank lines are counted, so that messages show the line that an editor shows.
            if not line.isspace():
                yield RawDocument(path, number, line)


def texts(raw: RawDocument, keys: Sequence[str]) -> list[str]:
    """Return the texts of a document under `keys`; a plain text file has the one key "text".

    Args:
        raw: the document.
        keys: the names of the texts in a line of JSON.
    Raises: DataError that says the file, the line and the problem.
    """
    if raw.line is None:
        if list(keys) != ["text"]:
            raise DataError(
                f"{raw.where}: --json-keys {' '.join(keys)} needs JSON Lines (.jsonl), not plain "
                "text"
            )
        return [_decoded(raw)]
    try:
        record = json.loads(_decoded(raw))
    except json.JSONDecodeError as error:
        raise DataError(f"{raw.where}: not JSON: {error.msg} at column {error.colno}") from error
    # Python refuses to convert a number of more than 4,300 digits.
    except ValueError as error:
        raise DataError(f"{raw.where}: {error}") from error
    except RecursionError as error:
        raise DataError(f"{raw.where}: JSON nested too deep to be read") from error
    if not isinstance(record, dict):
        raise DataError(
            f"{raw.where}: a JSON {type(record).__name__}; each line must be an object, "
            '{"text": "..."}'
        )
    return [_text(raw, record, key) for key in keys]


def _decoded(raw: RawDocument) -> str:
    """Return the content as text.

    Args:
        raw: the document.
    Raises: DataError if it is not UTF-8.
    """
    try:
        return raw.content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{raw.where}: not UTF-8 at byte {error.start} ({error.reason}). Convert the file"
        ) from error


def _text(raw: RawDocument, record: dict[str, object], key: str) -> str:
    """Return the text under one key of a line.

    Args:
        raw: the document, for the error.
        record: the JSON object of the document's line.
        key: the name of the text.
    Raises: DataError if the key is missing or its value cannot be encoded.
    """
    text = record.get(key)
    if not isinstance(text, str):
        found = f"of type {type(text).__name__}"
        if key not in record:
            found = f"missing; the line has {', '.join(record) or 'no keys'}"
        raise DataError(f"{raw.where}: key {key!r} must be a text, but is {found}. See --json-keys")
    try:
        text.encode("utf-8")
    # JSON can spell half of a surrogate pair, which is no character.
    except UnicodeEncodeError as error:
        raise DataError(
            f"{raw.where}: key {key!r} has a lone surrogate at character {error.start}"
        ) from error
    return text
