"""Find out which files a run reads: one blend that --split divides, or one each per part.

The parts are train, validation and test. Blends are given by flags or by a file that a flag names.
Messages name the flag that was typed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megapipe.config import DataConfig
from megapipe.config.typed import fits
from megapipe.data.blend import parse_data_path
from megapipe.errors import DataError

_PARTS = ("train", "valid", "test")
_FLAG = "--data-path"


@dataclass(frozen=True)
class Blend:
    """The .bin/.idx files of a blend. `ask` calls a function with one of the paths.

    Attributes:
        said: the name of the blend in messages: its flag, or the file that lists it.
        prefixes: paths without .bin or .idx.
        weights: normalised weights; None without weights. Each sample is then read once, or the
            samples of a single prefix as often as the run needs.
    """

    said: str
    prefixes: list[str]
    weights: list[float] | None

    def ask(self, question: Callable[[str], Any], prefix: str) -> Any:
        """Return question(prefix).

        Args:
            question: a function whose errors name --data-path.
            prefix: one of `prefixes`.
        Raises: the DataError of `question`, with the flag that was typed in place of --data-path.
        """
        try:
            return question(prefix)
        except DataError as error:
            raise DataError(said(self.said, error.problems)) from None


def said(flag: str, problems: Sequence[str]) -> list[str]:
    """Return the texts of problems, with the user's own flag in place of --data-path.

    Args:
        flag: the flag that the user typed.
        problems: texts that name --data-path.
    """
    # Questions about a prefix are asked for all ways to give it, and name the usual flag.
    return [problem.replace(_FLAG, flag) for problem in problems]


def in_a_file(data: DataConfig) -> str | None:
    """Return the file that lists the data; None if flags list it."""
    return data.data_args_path or data.per_split_data_args_path


def is_named(data: DataConfig) -> bool:
    """Return whether the flags name data files. A program with its own dataset may lack them."""
    has_paths = data.data_path or data.train_data_path or in_a_file(data)
    return not data.mock_data and bool(has_paths)


def choice_problems(data: DataConfig) -> Iterator[str]:
    """Yield a problem if flags for the source of tokens exclude each other."""
    # The flags for single parts are one way together: they do not exclude each other.
    parts = [f"--{part}-data-path" for part in _PARTS if _of_part(data, part)]
    ways = {
        "--mock-data": data.mock_data,
        _FLAG: data.data_path,
        "--data-args-path": data.data_args_path,
        "--per-split-data-args-path": data.per_split_data_args_path,
        " ".join(parts): parts,
    }
    given = [way for way, value in ways.items() if value]
    is_per_part = bool(parts or data.per_split_data_args_path)
    if len(given) > 1:
        yield f"{' and '.join(given)} each say where tokens come from. Leave all but one out."
    elif data.split is not None and is_per_part:
        yield (
            f"--split {data.split} cuts one blend in three, {given[0]} names one for each part. "
            "Leave --split out."
        )


def blends(data: DataConfig) -> tuple[Blend | None, ...]:
    """Return one blend, which --split divides, or three: train, validation, test.

    Of three, validation and test are None if no flag gives them.

    Raises: DataError for a malformed list, a file that cannot be read, or without training data.
    """
    if data.per_split_data_args_path is not None:
        path = data.per_split_data_args_path
        lists = _json(path)
        names = [f"{path}: {part}" for part in _PARTS]
        return _three(names, [_items(lists.get(part)) for part in _PARTS])
    if any(_of_part(data, part) for part in _PARTS):
        names = [f"--{part}-data-path" for part in _PARTS]
        return _three(names, [_of_part(data, part) for part in _PARTS])
    if data.data_args_path is not None:
        items = _read("--data-args-path", data.data_args_path).split()
        return (_blend(f"{data.data_args_path}:", items),)
    return (_blend(_FLAG, data.data_path),)


def mapped_files(data: DataConfig) -> dict[str, tuple[int, int]]:
    """Return {path: (inode, bytes)} of every .bin and .idx file that a run reads and that exists.

    Raises: DataError as `blends`.
    """
    if not is_named(data):
        return {}
    # A set, because train, validation and test may read the same pair.
    prefixes: set[str] = set()
    for blend in blends(data):
        if blend is not None:
            prefixes.update(blend.prefixes)
    return _sizes(f"{prefix}.{end}" for prefix in sorted(prefixes) for end in ("bin", "idx"))


def refuse_cut_off(files: Mapping[str, tuple[int, int]]) -> None:
    """Refuse files that have become shorter since `mapped_files` returned `files`.

    A file that was deleted or replaced is fine: the process still reads the old one.

    Raises: DataError with every file that is shorter.
    """
    # Reading the lost end of a mapped file ends the process with SIGBUS, without a message.
    problems = [
        f"{path} had {files[path][1]} bytes at the start and has {size}. Copy it again, then start "
        "again with --load."
        for path, (inode, size) in _sizes(files).items()
        if inode == files[path][0] and size < files[path][1]
    ]
    if problems:
        raise DataError(problems)


def _sizes(paths: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return {path: (inode, bytes)} of the files that exist.

    Args:
        paths: the files to look for.
    """
    # A missing file is no problem here: an open one can still be read.
    found = {path: os.stat(path) for path in paths if os.path.exists(path)}
    return {path: (status.st_ino, status.st_size) for path, status in found.items()}


def _of_part(data: DataConfig, part: str) -> tuple[str, ...]:
    """Return the value of --train-data-path, --valid-data-path or --test-data-path.

    Args:
        part: train, valid or test.
    """
    value: tuple[str, ...] = getattr(data, f"{part}_data_path")
    return value


def _items(given: list[str | float] | str | None) -> Sequence[str]:
    """Return the weights and prefixes of one part of a JSON file as a list of words.

    Args:
        given: a list, one text with spaces between the words, or None for no data.
    """
    # Megatron-LM's file has either a list or one string with spaces.
    if isinstance(given, str):
        return given.split()
    return list(map(str, given or ()))


def _three(names: Sequence[str], lists: Sequence[Sequence[str]]) -> tuple[Blend | None, ...]:
    """Return the blends of train, validation and test; None for each that has no data.

    Args:
        names: the name of each list in messages.
        lists: the weights and prefixes of train, validation and test, as words; empty for no data.
    Raises: DataError without training data, or for a malformed list.
    """
    if not lists[0]:
        raise DataError(
            f"{names[0]} is missing, the data to train on. Give it too, or --data-path and --split."
        )
    found: list[Blend | None] = []
    for name, items in zip(names, lists, strict=True):
        blend = _blend(name, items) if items else None
        # Megatron-LM ignores the weight of a part's only dataset and builds no surplus for it.
        if blend is not None and len(blend.prefixes) == 1:
            blend = Blend(blend.said, blend.prefixes, None)
        found.append(blend)
    return tuple(found)


def _blend(name: str, given: Sequence[str]) -> Blend:
    """Return the blend of a list of weights and prefixes.

    Args:
        name: the flag, or the name in a file, that gave the list; messages name it.
        given: weights and prefixes in turn, or prefixes alone.
    Raises: DataError for a malformed list.
    """
    try:
        prefixes, weights = parse_data_path(given)
    except DataError as error:
        raise DataError(said(name, error.problems)) from None
    return Blend(name, prefixes, weights)


def _json(path: str) -> dict[str, Any]:
    """Read the file of --per-split-data-args-path: {"train": weights and prefixes, ...}."""
    flag = "--per-split-data-args-path"
    try:
        lists = json.loads(_read(flag, path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{flag} {path} is no JSON: {error}") from None
    is_valid = isinstance(lists, dict) and all(
        fits(items, list[str | float] | str | None) for items in lists.values()
    )
    if not is_valid:
        raise DataError(
            f'{flag} {path}: expected {{"train": ["0.3", "a", "0.7", "b"], "valid": ["c"], '
            '"test": ["d"]}'
        )
    found: dict[str, Any] = lists
    return found


def _read(flag: str, path: str) -> str:
    """Return the text of the file that `flag` names."""
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{flag} {path} cannot be read: {reason}") from None
