"""Output files that appear under their name only when complete, and what keeps a name from being one."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from megapipe.errors import DataError


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what the system says about an output file into a DataError that names it."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{os.fspath(path)} cannot be written: {error.strerror or error}. A former version is as it was. "
            "Free space or choose another folder."
        ) from error


@contextlib.contextmanager
def complete_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A binary file that replaces `path` when the block ends without an error, and vanishes otherwise.

    A link stays one: what it leads to is replaced. What is no file, such as /dev/null or a pipe, is written to.
    """
    real = Path(os.path.realpath(path))
    if real.exists() and not real.is_file() and not real.is_dir():
        with writing(path), real.open("wb") as device:
            yield device
        return
    temporary = Path(f"{real}.{os.getpid()}.tmp")
    with writing(path):
        try:
            temporary.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                yield file
            temporary.rename(real)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def write_complete(path: str | os.PathLike[str], content: str | bytes) -> None:
    """A whole file at once. Half of a surrogate pair, as names in JSON and of files can hold, is escaped."""
    with complete_file(path) as file:
        file.write(content if isinstance(content, bytes) else content.encode(errors="backslashreplace"))


def file_problems(outputs: Mapping[str, str | os.PathLike[str] | None]) -> Iterator[str]:
    """Outputs, by flag, that can be no file: said before the work that would be written there."""
    for flag, path in outputs.items():
        if path is not None and os.path.isdir(path):
            yield f"{flag} {path} is a folder. Name a file in it: {flag} {Path(path) / 'NAME'}"
        elif path is not None:
            yield from _problems_above(flag, Path(path))


def folder_problems(outputs: Mapping[str, str | os.PathLike[str] | None]) -> Iterator[str]:
    """Outputs, by flag, that can be no folder."""
    for flag, path in outputs.items():
        if path is not None and os.path.exists(path) and not os.path.isdir(path):
            yield f"{flag} {path} is a file, not a folder. Give another name."
        elif path is not None:
            yield from _problems_above(flag, Path(path))


def _problems_above(flag: str, path: Path) -> Iterator[str]:
    there = next((folder for folder in path.absolute().parents if os.path.lexists(folder)), None)
    if there is not None and not os.path.isdir(there):
        yield f"{flag} {path}: {there} is a file, not a folder. Give another name."


def note_how(output: str | os.PathLike[str], how: Mapping[str, Any]) -> None:
    """Write beside an output how it was made, for `is_current`."""
    write_complete(_how(output), json.dumps(how, indent=1) + "\n")


def forget_how(output: str | os.PathLike[str]) -> None:
    """Remove what `note_how` wrote of a former output, before the next one takes its place."""
    _how(output).unlink(missing_ok=True)


def is_current(outputs: Sequence[str], inputs: Sequence[str], how: Mapping[str, Any]) -> bool:
    """Do all outputs exist, none older than an input, and was the first one made so?"""
    made, sources = [Path(p) for p in outputs], [Path(p) for p in inputs]
    if not all(p.exists() for p in (*made, *sources, _how(outputs[0]))):
        return False
    try:
        if _how(outputs[0]).read_text() != json.dumps(how, indent=1) + "\n":
            return False
    except (OSError, UnicodeDecodeError):
        return False
    oldest = min(p.stat().st_mtime_ns for p in made)
    return all(p.stat().st_mtime_ns <= oldest for p in sources)


def _how(output: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(output)}.how.json")
