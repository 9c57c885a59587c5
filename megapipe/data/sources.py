"""The files that a run reads: one blend that --split cuts in three, or one each for train, validation and test.

They stand in the flags, or in a file that a flag names; messages spell what was typed.
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
    """Prefixes of .bin/.idx pairs. weights: None for each sample once. said: the flag, or the file with a colon."""

    said: str
    prefixes: list[str]
    weights: list[float] | None

    def ask(self, question: Callable[[str], Any], prefix: str) -> Any:
        """question(prefix). Raises: its DataError, with the flag that was given."""
        try:
            return question(prefix)
        except DataError as error:
            raise DataError(said(self.said, error.problems)) from None


def said(flag: str, problems: Sequence[str]) -> list[str]:
    """Problems of --data-path as those of another flag."""
    return [problem.replace(_FLAG, flag) for problem in problems]


def in_a_file(data: DataConfig) -> str | None:
    """The file that names the data, if it is not the flags."""
    return data.data_args_path or data.per_split_data_args_path


def is_named(data: DataConfig) -> bool:
    """Do flags name files? A program of one's own may need none."""
    return not data.mock_data and bool(data.data_path or data.train_data_path or in_a_file(data))


def choice_problems(data: DataConfig) -> Iterator[str]:
    """Flags that exclude each other."""
    parts = [f"--{part}-data-path" for part in _PARTS if _of_part(data, part)]
    ways = {
        "--mock-data": data.mock_data,
        _FLAG: data.data_path,
        "--data-args-path": data.data_args_path,
        "--per-split-data-args-path": data.per_split_data_args_path,
        " ".join(parts): parts,
    }
    given = [way for way, value in ways.items() if value]
    if len(given) > 1:
        yield f"{' and '.join(given)} each say where tokens come from. Leave all but one out."
    elif data.split is not None and (parts or data.per_split_data_args_path):
        yield f"--split {data.split} cuts one blend in three, {given[0]} names one for each part. Leave --split out."


def blends(data: DataConfig) -> tuple[Blend | None, ...]:
    """One blend that is to be split, or three; None for a part that has none.

    Raises: DataError for a list that is none, a file that cannot be read, and where nothing is given to train on.
    """
    if data.per_split_data_args_path is not None:
        path = data.per_split_data_args_path
        lists = _json(path)
        names = [f"{path}: {part}" for part in _PARTS]
        given = [lists.get(part) or () for part in _PARTS]
        return _three(names, [text.split() if isinstance(text, str) else list(map(str, text)) for text in given])
    if any(_of_part(data, part) for part in _PARTS):
        return _three([f"--{part}-data-path" for part in _PARTS], [_of_part(data, part) for part in _PARTS])
    if data.data_args_path is not None:
        return (_blend(f"{data.data_args_path}:", _read("--data-args-path", data.data_args_path).split()),)
    return (_blend(_FLAG, data.data_path),)


def mapped_files(data: DataConfig) -> dict[str, tuple[int, int]]:
    """(inode, bytes) of every .bin and .idx that a run reads."""
    prefixes = {prefix for blend in (blends(data) if is_named(data) else ()) if blend for prefix in blend.prefixes}
    return _sizes(f"{prefix}.{end}" for prefix in sorted(prefixes) for end in ("bin", "idx"))


def refuse_cut_off(files: Mapping[str, tuple[int, int]]) -> None:
    """Refuse files that have become shorter: reading what is gone of a mapped one ends the process by SIGBUS, mute.

    Raises: DataError for files that are shorter than before. One that was removed or replaced is read on as it was.
    """
    problems = [
        f"{path} had {files[path][1]} bytes at the start and has {size}. Copy it again, then start again with --load."
        for path, (inode, size) in _sizes(files).items()
        if inode == files[path][0] and size < files[path][1]
    ]
    if problems:
        raise DataError(problems)


def _sizes(paths: Iterable[str]) -> dict[str, tuple[int, int]]:
    found = {path: os.stat(path) for path in paths if os.path.exists(path)}
    return {path: (status.st_ino, status.st_size) for path, status in found.items()}


def _of_part(data: DataConfig, part: str) -> tuple[str, ...]:
    value: tuple[str, ...] = getattr(data, f"{part}_data_path")
    return value


def _three(names: Sequence[str], lists: Sequence[Sequence[str]]) -> tuple[Blend | None, ...]:
    if not lists[0]:
        raise DataError(f"{names[0]} is missing, the data to train on. Give it too, or --data-path and --split.")
    found = [_blend(name, prefixes) if prefixes else None for name, prefixes in zip(names, lists, strict=True)]
    # As in Megatron-LM, which builds no surplus for a part's only set, whatever its weight.
    return tuple(Blend(b.said, b.prefixes, None) if b and len(b.prefixes) == 1 else b for b in found)


def _blend(name: str, given: Sequence[str]) -> Blend:
    try:
        return Blend(name, *parse_data_path(given))
    except DataError as error:
        raise DataError(said(name, error.problems)) from None


def _json(path: str) -> dict[str, Any]:
    flag = "--per-split-data-args-path"
    try:
        lists = json.loads(_read(flag, path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{flag} {path} is no JSON: {error}") from None
    if not isinstance(lists, dict) or not all(fits(x, list[str | float] | str | None) for x in lists.values()):
        raise DataError(f'{flag} {path}: expected {{"train": ["0.3", "a", "0.7", "b"], "valid": ["c"], "test": ["d"]}}')
    return lists


def _read(flag: str, path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{flag} {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
