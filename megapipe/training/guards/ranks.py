"""Facts that must be the same on every rank of a run: its flags, and the contents of all that they name."""

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

RANGES, RANGE = 64, 1 << 16
"""Ranges of a .bin that are read, and bytes of each, drawn by its size; of a smaller file, all. Another text,
tokenizer or order is seen, a few tokens of a large file are not: it may have terabytes, and each rank reads it."""


def facts(config: Config, plan: Plan, functions: Sequence[Callable[..., Any]]) -> dict[str, str]:
    """Facts by name, as an error shows them. Files count by their contents: they may lie elsewhere on each machine.

    Args:
        functions: of the user's program: what builds the model, the batch, the data. A file counts that defines one of
            them, not what it imports.
    Raises: DataError for a file that cannot be read.
    """
    spelled = {flag.field: name for name, flag in flags_of(Config).items() if flag.section}
    groups = (group for group in vars(config).values() if dataclasses.is_dataclass(group))
    fields = {name: value for group in groups for name, value in vars(group).items()}
    flags = {spelled.get(name, name): str(value) for name, value in fields.items()}
    table = to_json(plan.schedule) + str(plan.counts)
    return {
        **flags,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "megapipe (SHA-256 of its source)": _package(),
        "the schedule (SHA-256 of its table)": hashlib.sha256(table.encode()).hexdigest()[:16],
        **dict(_files(config)),
        **dict(_programs(functions)),
    }


def contents(config: Config, train: TokenDataset | None = None) -> dict[str, str]:
    """Return digests of the data and the tokenizer: a run that goes on must find the same again, wherever they lie.

    "data_path" is of the indices, the files' sizes and the weights, as it was in the first version; TOKENS and ORDER
    came later.

    Args:
        train: the training samples, once they are open.
    """
    data, found = config.data, {}
    if files := tokenizer_files(data):
        found["tokenizer_model"] = " ".join(_digest(path) for path in files)
    if is_named(data):
        read = [
            blend and (blend.weights, [[_digest(f"{prefix}.idx"), _size(prefix)] for prefix in blend.prefixes])
            for blend in blends(data)
        ]
        found["data_path"] = hashlib.sha256(repr(read).encode()).hexdigest()[:16]
        tokens = [_tokens(prefix) for blend in blends(data) if blend for prefix in blend.prefixes]
        found[TOKENS] = hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]
    if order := "".join(_order(train)):
        cyclic = config.data.dataloader_type == "cyclic"  # which shuffles all samples, and so asks how many there are
        found[ORDER] = hashlib.sha256(f"{order} {len(train) if cyclic and train else ''}".encode()).hexdigest()[:16]
    return found


FIRST = 4096
"""Samples whose order is compared: another number of epochs shuffles all of them anew."""


def _order(train: TokenDataset | None) -> Iterator[str]:
    """Yield what says which samples come first; nothing for a data set that is not one of ours."""
    match train:
        case GPTDataset(indices=indices):
            yield hashlib.sha256(indices.shuffle[:FIRST].tobytes() + indices.documents[:FIRST].tobytes()).hexdigest()
        case BlendedDataset(datasets=datasets, choice=choice, index=index):
            yield hashlib.sha256(choice[:FIRST].tobytes() + index[:FIRST].tobytes()).hexdigest()
            for part in datasets:
                yield from _order(part)


def _files(config: Config) -> Iterator[tuple[str, str]]:
    data = config.data
    if costs := config.parallel.pipeline_costs:
        yield f"{costs} of --pipeline-costs (SHA-256)", _digest(costs)
    for path in tokenizer_files(data):
        yield f"{path} of the tokenizer (SHA-256)", _digest(path)
    if (listed := in_a_file(data)) is not None:
        yield f"{listed} (SHA-256)", _digest(listed)
    read = () if data.mock_data else blends(data)
    for prefix in sorted({prefix for blend in read if blend for prefix in blend.prefixes}):
        yield f"{prefix}.idx (SHA-256)", _digest(f"{prefix}.idx")
        yield f"{prefix}.bin (bytes)", _size(prefix)
        yield f"{prefix}.bin (SHA-256 of {RANGES} ranges)", _tokens(prefix)


def _size(prefix: str) -> str:
    return str(os.path.getsize(f"{prefix}.bin"))


def _tokens(prefix: str) -> str:
    """The digest of a .bin: of one drawn range in each of RANGES equal parts."""
    whole, size = hashlib.sha256(), os.path.getsize(f"{prefix}.bin")
    part, draw = max(size // RANGES, RANGE), random.Random(size)
    try:
        with open(f"{prefix}.bin", "rb", buffering=0) as file:
            for begin in range(0, size, part):
                file.seek(begin + draw.randrange(max(1, min(part, size - begin) - RANGE + 1)))
                whole.update(file.read(RANGE))
    except OSError as error:
        raise DataError(f"{prefix}.bin: {error.strerror}") from None
    return whole.hexdigest()[:16]


def _programs(functions: Sequence[Callable[..., Any]]) -> Iterator[tuple[str, str]]:
    for function in functions:
        try:
            path = inspect.getsourcefile(inspect.unwrap(function))
        except TypeError:  # an object that is called, a partial
            path = inspect.getsourcefile(type(function))
        if path is not None and os.path.isfile(path) and PACKAGE not in Path(path).resolve().parents:
            yield f"{Path(path).name} (SHA-256)", _digest(path)


def _package() -> str:
    """The digest of the source itself: two checkouts of one version differ."""
    whole = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        whole.update(f"{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes())
    return whole.hexdigest()[:16]


def _digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
