"""Collect the facts that must be equal on every rank: flags, and contents of named files."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import os
import platform
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megapipe.checkpoint.resume import ORDER, TOKENS
from megapipe.config import Config
from megapipe.data.blend import BlendedDataset
from megapipe.data.gpt_dataset import GPTDataset, TokenDataset
from megapipe.data.sources import blends, in_a_file, is_named
from megapipe.data.tokenizers.tokenizer import tokenizer_files
from megapipe.errors import DataError
from megapipe.flags.parse import flags_of
from megapipe.plan import Plan
from megapipe.schedule import to_json

PACKAGE = Path(__file__).parents[2]

RANGES = 64
"""Number of ranges of a .bin that are read, at random positions drawn by its size.

They show another text, tokenizer or order, but not a few changed tokens of a large file. The file
may have terabytes, and each rank reads it.
"""
RANGE = 1 << 16
"""Bytes of a range. A file of at most RANGES such ranges is read as a whole."""


def facts(
    config: Config, plan: Plan | None, functions: Sequence[Callable[..., Any]]
) -> dict[str, str]:
    """Return {name: text} that must be equal on all ranks: flags, versions, digests of files.

    The user's programs may be in another folder on each machine. Files that flags name need equal
    paths, because all flags are compared.

    Args:
        config: the run's configuration.
        plan: the plan of the run; None where rank 0 hands its plan to the others.
        functions: the user's functions for model, batch and data. The files that define
            them count, but not what these files import.
    Raises: DataError for a file that cannot be read.
    """
    spelled = {flag.field: name for name, flag in flags_of(Config).items() if flag.section}
    flags = {}
    for group in vars(config).values():
        if dataclasses.is_dataclass(group):
            for name, value in vars(group).items():
                flags[spelled.get(name, name)] = str(value)
    table = {}
    if plan is not None:
        # Ranks with different tables would wait for messages that nobody sends.
        text = to_json(plan.schedule) + str(plan.counts)
        table["the schedule (SHA-256 of its table)"] = _short(text.encode())
    return {
        **flags,
        # Another version may add in another order, and replicas must be equal to the bit.
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "megapipe (SHA-256 of its source)": _package(),
        **table,
        **dict(_files(config)),
        **dict(_programs(functions)),
    }


def contents(config: Config, train: TokenDataset | None = None) -> dict[str, str]:
    """Return {name: digest} of data and tokenizer, which a resumed run must find again.

    The names of files do not count. "data_path" is the digest of the .idx files, sizes and weights.
    "tokens" is a digest of ranges of the .bin files, "order" of the order of the first samples.
    Both are missing in the first version of checkpoints.

    Args:
        config: the run's configuration.
        train: the training samples, if they are open; else None.
    """
    data = config.data
    found = {}
    files = tokenizer_files(data)
    if files:
        found["tokenizer_model"] = " ".join(_digest(path) for path in files)
    if is_named(data):
        # The text that is digested is part of the checkpoint format: do not change its form.
        read: list[Any] = []
        tokens = []
        for blend in blends(data):
            if not blend:
                read.append(blend)
                continue
            # An index has the length of every sequence, so other data seldom has the same one.
            sizes = [[_digest(f"{prefix}.idx"), _size(prefix)] for prefix in blend.prefixes]
            read.append((blend.weights, sizes))
            tokens += [_tokens(prefix) for prefix in blend.prefixes]
        found["data_path"] = _short(repr(read).encode())
        found[TOKENS] = _short(repr(tokens).encode())
    order = "".join(_order(train))
    if order:
        # A cyclic loader shuffles all samples, so their number counts too.
        cyclic = config.data.dataloader_type == "cyclic"
        length = len(train) if cyclic and train else ""
        found[ORDER] = _short(f"{order} {length}".encode())
    return found


FIRST = 4096
"""Number of samples whose order is compared. Another number of epochs shuffles all samples anew."""


def _order(train: TokenDataset | None) -> Iterator[str]:
    """Yield digests of the order of the first samples; nothing for a dataset of the user's own.

    Args:
        train: the training samples; None if they are not open.
    """
    match train:
        case GPTDataset(indices=indices):
            first = indices.shuffle[:FIRST].tobytes() + indices.documents[:FIRST].tobytes()
            yield hashlib.sha256(first).hexdigest()
        case BlendedDataset(datasets=datasets, choice=choice, index=index):
            first = choice[:FIRST].tobytes() + index[:FIRST].tobytes()
            yield hashlib.sha256(first).hexdigest()
            for part in datasets:
                yield from _order(part)


def _files(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (name, digest) of each file that the flags name."""
    data = config.data
    costs = config.parallel.pipeline_costs
    if costs:
        yield f"{costs} of --pipeline-costs (SHA-256)", _digest(costs)
    for path in tokenizer_files(data):
        yield f"{path} of the tokenizer (SHA-256)", _digest(path)
    listed = in_a_file(data)
    if listed is not None:
        yield f"{listed} (SHA-256)", _digest(listed)
    read = () if data.mock_data else blends(data)
    for prefix in sorted({prefix for blend in read if blend for prefix in blend.prefixes}):
        yield f"{prefix}.idx (SHA-256)", _digest(f"{prefix}.idx")
        yield f"{prefix}.bin (bytes)", _size(prefix)
        yield f"{prefix}.bin (SHA-256 of {RANGES} ranges)", _tokens(prefix)


def _size(prefix: str) -> str:
    return str(os.path.getsize(f"{prefix}.bin"))


def _tokens(prefix: str) -> str:
    """Return a digest of a .bin file, read in part: RANGE bytes of each of RANGES equal parts.

    A small file has fewer parts. If its size is no multiple of RANGES, a last, short part follows.

    prefix: the path without .bin.
    """
    digest = hashlib.sha256()
    size = os.path.getsize(f"{prefix}.bin")
    part = max(size // RANGES, RANGE)
    # The same positions on every rank, and in a later run, wherever the file lies.
    draw = random.Random(size)
    try:
        # Without a buffer, which would read more than the ranges.
        with open(f"{prefix}.bin", "rb", buffering=0) as file:
            for begin in range(0, size, part):
                positions = min(part, size - begin) - RANGE + 1
                file.seek(begin + draw.randrange(max(1, positions)))
                digest.update(file.read(RANGE))
    except OSError as error:
        raise DataError(f"{prefix}.bin: {error.strerror}") from None
    return digest.hexdigest()[:16]


def _programs(functions: Sequence[Callable[..., Any]]) -> Iterator[tuple[str, str]]:
    """Yield (name, digest) of each file that defines one of the user's functions.

    Args:
        functions: the functions for model, batch and data. Files of this package are left out.
    """
    for function in functions:
        try:
            # Of a decorated function, the file that has its own code.
            path = inspect.getsourcefile(inspect.unwrap(function))
        except TypeError:
            # An object with __call__, or a partial.
            path = inspect.getsourcefile(type(function))
        if path is None or not os.path.isfile(path):
            continue
        if PACKAGE not in Path(path).resolve().parents:
            yield f"{Path(path).name} (SHA-256)", _digest(path)


def _package() -> str:
    """Return a digest of this package's source, as two checkouts of one version may differ."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _digest(path: str) -> str:
    """Return the digest of a file. Raises: DataError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
