"""Tokenise text into .bin/.idx pairs.

Worker processes tokenise chunks of documents; this process reads and writes them in order.
"""

from __future__ import annotations

import contextlib
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapipe.config import TokenizerConfig
from megapipe.data.files import forget_how
from megapipe.data.fingerprint import forget_fingerprint, write_fingerprint
from megapipe.data.indexed import IndexedWriter, token_dtype
from megapipe.data.text import RawDocument, raw_documents, texts
from megapipe.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megapipe.errors import DataError

# Large enough that sending a chunk to a worker costs little, small enough that the workers end at
# about the same time.
_CHUNK_BYTES = 1 << 19
# Most problems of a chunk that an error shows.
_MAX_PROBLEMS = 10


@dataclass(frozen=True)
class Encoding:
    """The settings by which documents become token ids.

    Attributes:
        tokenizer: the flags of the tokenizer.
        keys: fields of each JSON line to tokenise; each key has its own output.
        append_eod: append the end-of-document id to each document that is not empty.
    """

    tokenizer: TokenizerConfig
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False


@dataclass(frozen=True)
class Written:
    """A finished .bin/.idx pair.

    Attributes:
        prefix: path without .bin or .idx.
        documents: number of documents, empty ones included.
        tokens: number of tokens.
    """

    prefix: str
    documents: int
    tokens: int


@dataclass(frozen=True)
class _Encoded:
    """The tokenised documents of a chunk, the part of the input that one process handles at once.

    Attributes:
        documents: number of documents in the chunk.
        num_bytes: bytes that the documents have in the input, as lines of JSON or as whole files.
        per_key: for each key, the ids of all documents back to back, and the length of each.
    """

    documents: int
    num_bytes: int
    per_key: list[tuple[NDArray[Any], NDArray[np.int64]]]


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    encoding: Encoding,
    workers: int,
    report: Callable[[int, int], None] = lambda documents, num_bytes: None,
) -> list[Written]:
    """Write PREFIX_KEY_document.bin and .idx for every key, documents in the order of the input.

    Args:
        inputs: paths of the text files.
        output_prefix: PREFIX.
        encoding: the tokenizer and the keys.
        workers: number of worker processes.
        report: called as (documents done so far, their bytes in the input).
    Returns: one pair per key.
    Raises: DataError with up to ten bad lines of the first chunk that has any. Also for keys that
        no file can be named by, for a key without any token, or if a worker dies. Former pairs stay
        as they were.
    """
    problems = list(_bad_keys(encoding.keys))
    if problems:
        raise DataError(problems)
    tokenizer = build_tokenizer(encoding.tokenizer)
    dtype = token_dtype(tokenizer.vocab_size)
    prefixes = [f"{output_prefix}_{key}_document" for key in encoding.keys]
    documents = 0
    num_bytes = 0
    tokens = [0] * len(prefixes)
    # Pairs get their names only when the block ends without an error.
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(IndexedWriter(prefix, dtype)) for prefix in prefixes]
        for done in _encoded(_chunks(raw_documents(inputs)), encoding, workers):
            documents += done.documents
            num_bytes += done.num_bytes
            for k, (ids, lengths) in enumerate(done.per_key):
                writers[k].add_documents(ids, lengths)
                tokens[k] += ids.size
            report(documents, num_bytes)
        if not all(tokens):
            raise DataError(
                f"--input {' '.join(inputs)}: {documents} documents and no token among them"
            )
        # The notes on former files go before the new files appear. If the process dies in between,
        # old notes would vouch for new tokens.
        forget_how(f"{prefixes[0]}.bin")
        for prefix in prefixes:
            forget_fingerprint(prefix)
    for prefix in prefixes:
        write_fingerprint(prefix, tokenizer, encoding.tokenizer.tokenizer)
    return [Written(prefix, documents, n) for prefix, n in zip(prefixes, tokens, strict=True)]


def _bad_keys(keys: Sequence[str]) -> Iterator[str]:
    """Yield a text for each JSON key that cannot be part of a file's name.

    Args:
        keys: the values of --json-keys.
    """
    for key in dict.fromkeys(keys):
        if keys.count(key) > 1:
            yield (
                f"--json-keys {' '.join(keys)} names {key} {keys.count(key)} times. "
                "Give each key once"
            )
        if not key or "/" in key or "\0" in key:
            yield f"--json-keys {key!r} cannot be a part of a file's name, PREFIX_KEY_document.bin"


def _chunks(documents: Iterator[RawDocument]) -> Iterator[list[RawDocument]]:
    """Yield lists of documents, with about _CHUNK_BYTES each, or one longer document."""
    chunk: list[RawDocument] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document.content)
        if size >= _CHUNK_BYTES:
            yield chunk
            chunk = []
            size = 0
    if chunk:
        yield chunk


def _encoded(
    chunks: Iterator[list[RawDocument]], encoding: Encoding, workers: int
) -> Iterator[_Encoded]:
    """Yield the tokenised chunks of documents, in the order of `chunks`.

    At most 2 x workers + 1 chunks are in flight, so that the input may be larger than memory.

    Args:
        chunks: lists of documents.
        encoding: the tokenizer's flags, and the keys of the texts.
        workers: number of worker processes.
    Raises: DataError if a worker process dies.
    """
    waiting: deque[Future[_Encoded]] = deque()
    # Ctrl-C reaches every process of the group; workers ignore it, and this process stops them.
    with ProcessPoolExecutor(
        workers, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)
    ) as pool:
        try:
            for chunk in chunks:
                waiting.append(pool.submit(_encode, chunk, encoding))
                # Two chunks per worker: one is tokenised while the other waits for its turn.
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                "A worker process was killed from outside, perhaps for want of memory; nothing was "
                f"written. Use fewer --workers than {workers}, or split documents of many "
                "megabytes."
            ) from error


@lru_cache(maxsize=1)
def _tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer, built once per worker process."""
    return build_tokenizer(config)


def _encode(chunk: list[RawDocument], encoding: Encoding) -> _Encoded:
    """Tokenise a chunk in a worker process.

    Args:
        chunk: the documents.
        encoding: the tokenizer's flags, and the keys of the texts in each document.
    Raises: DataError with up to ten bad documents of the chunk.
    """
    tokenizer = _tokenizer(encoding.tokenizer)
    dtype = token_dtype(tokenizer.vocab_size)
    # The ids of each document, by key.
    documents: list[list[NDArray[Any]]] = [[] for _ in encoding.keys]
    problems: list[str] = []
    for raw in chunk:
        try:
            for k, text in enumerate(texts(raw, encoding.keys)):
                documents[k].append(_ids(tokenizer, text, encoding.append_eod, dtype, raw))
        except DataError as error:
            problems.extend(error.problems)
    if problems:
        shown = problems[:_MAX_PROBLEMS]
        if len(problems) > _MAX_PROBLEMS:
            shown.append(f"and {len(problems) - _MAX_PROBLEMS} more")
        raise DataError(shown)
    per_key = [(np.concatenate(d), np.array(list(map(len, d)))) for d in documents]
    return _Encoded(len(chunk), sum(len(raw.content) for raw in chunk), per_key)


def _ids(
    tokenizer: Tokenizer, text: str, append_eod: bool, dtype: Any, raw: RawDocument
) -> NDArray[Any]:
    """Return the ids of one document as an array of `dtype`.

    Args:
        append_eod: append the end-of-document id, unless the document is empty.
        dtype: the type of the ids in the file.
        raw: the document, for the error.
    Raises: DataError with the place of `raw` if the tokenizer refuses the text.
    """
    try:
        ids = tokenizer.encode(text)
    except ValueError as error:
        raise DataError(f"{raw.where}: {error}") from error
    if append_eod and ids:
        ids.append(tokenizer.eod)
    return np.array(ids, dtype)
