"""Output files that appear under their name only when complete."""

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


def note_how(output: str | os.PathLike[str], how: Mapping[str, Any]) -> None:
    """Write beside an output how it was made, for `is_current`."""
    with complete_file(_how(output)) as file:
        file.write((json.dumps(how, indent=1) + "\n").encode())


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
