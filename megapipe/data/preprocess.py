"""Text to .bin/.idx: worker processes tokenise chunks of documents, this process reads and writes them in order."""

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

_CHUNK_BYTES = 1 << 19  # large enough to hide the way to a worker, small enough that the last ones end together
_MAX_PROBLEMS = 10


@dataclass(frozen=True)
class Encoding:
    """The way of a document to token ids.

    Attributes:
        tokenizer: which one.
        keys: fields of each JSON line; one output per key.
        append_eod: end each document that is not empty with the end-of-document id.
    """

    tokenizer: TokenizerConfig
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False


@dataclass(frozen=True)
class Written:
    """One finished .bin/.idx pair."""

    prefix: str
    documents: int
    tokens: int


@dataclass(frozen=True)
class _Encoded:
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
    """Write PREFIX_KEY_document.bin/.idx for every key, documents in the order of the input.

    Args:
        report: called with the documents and bytes of text done so far.
    Raises: DataError for the first chunk with bad lines (up to ten of them); nothing is left behind then.
    """
    if problems := list(_bad_keys(encoding.keys)):
        raise DataError(problems)
    tokenizer = build_tokenizer(encoding.tokenizer)
    dtype = token_dtype(tokenizer.vocab_size)
    prefixes = [f"{output_prefix}_{key}_document" for key in encoding.keys]
    documents = num_bytes = 0
    tokens = [0] * len(prefixes)
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
            raise DataError(f"--input {' '.join(inputs)}: {documents} documents and no token among them")
        # Cut off between the new tokens and what is noted of them, the former notes would vouch for the new tokens.
        forget_how(f"{prefixes[0]}.bin")
        for prefix in prefixes:
            forget_fingerprint(prefix)
    for prefix in prefixes:
        write_fingerprint(prefix, tokenizer, encoding.tokenizer.tokenizer)
    return [Written(prefix, documents, n) for prefix, n in zip(prefixes, tokens, strict=True)]


def _bad_keys(keys: Sequence[str]) -> Iterator[str]:
    """Each key is a part of the name of its own pair of files."""
    for key in dict.fromkeys(keys):
        if keys.count(key) > 1:
            yield f"--json-keys {' '.join(keys)} names {key} {keys.count(key)} times. Give each key once"
        if not key or "/" in key or "\0" in key:
            yield f"--json-keys {key!r} cannot be a part of a file's name, PREFIX_KEY_document.bin"


def _chunks(documents: Iterator[RawDocument]) -> Iterator[list[RawDocument]]:
    chunk, size = [], 0
    for document in documents:
        chunk.append(document)
        size += len(document.content)
        if size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _encoded(chunks: Iterator[list[RawDocument]], encoding: Encoding, workers: int) -> Iterator[_Encoded]:
    """Results in order, with only a few chunks in flight, so that the input may be larger than memory."""
    waiting: deque[Future[_Encoded]] = deque()
    # Ctrl-C reaches the whole process group; this process alone answers it.
    with ProcessPoolExecutor(workers, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)) as pool:
        try:
            for chunk in chunks:
                waiting.append(pool.submit(_encode, chunk, encoding))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                "A worker process was killed from outside, perhaps for want of memory; nothing was written. "
                f"Use fewer --workers than {workers}, or split documents of many megabytes."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


@lru_cache(maxsize=1)
def _tokenizer(config: TokenizerConfig) -> Tokenizer:
    return build_tokenizer(config)


def _encode(chunk: list[RawDocument], encoding: Encoding) -> _Encoded:
    tokenizer = _tokenizer(encoding.tokenizer)
    dtype = token_dtype(tokenizer.vocab_size)
    documents: list[list[NDArray[Any]]] = [[] for _ in encoding.keys]
    problems: list[str] = []
    for raw in chunk:
        try:
            for k, text in enumerate(texts(raw, encoding.keys)):
                documents[k].append(_ids(tokenizer, text, encoding.append_eod, dtype, raw))
        except DataError as error:
            problems.extend(error.problems)
    if problems:
        more = [f"and {len(problems) - _MAX_PROBLEMS} more"] if len(problems) > _MAX_PROBLEMS else []
        raise DataError(problems[:_MAX_PROBLEMS] + more)
    per_key = [(np.concatenate(d), np.array([len(x) for x in d])) for d in documents]
    return _Encoded(len(chunk), sum(len(raw.content) for raw in chunk), per_key)


def _ids(tokenizer: Tokenizer, text: str, append_eod: bool, dtype: Any, raw: RawDocument) -> NDArray[Any]:
    try:
        ids = tokenizer.encode(text)
    except ValueError as error:
        raise DataError(f"{raw.where}: {error}") from error
    if append_eod and ids:
        ids.append(tokenizer.eod)
    return np.array(ids, dtype)
