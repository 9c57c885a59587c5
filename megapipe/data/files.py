"""Write output files that get their final name only when they are complete.

Output paths that cannot be written are found before the work starts. A small record next to an
output says how it was made, so that the work can be skipped the next time.
"""

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
    """Turn an OSError within the block into a DataError that names the output file `path`."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{os.fspath(path)} cannot be written: {error.strerror or error}. "
            "A former version is unchanged. Free space or choose another folder."
        ) from error


@contextlib.contextmanager
def complete_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a binary file that replaces `path` if the block ends without an error.

    Missing folders above it are made. After an error the new content is deleted and `path` is
    unchanged. A symbolic link stays a link: its target is replaced. A device or a pipe, such as
    /dev/null, is written directly.

    Raises: DataError if the system refuses to create, write or rename the file.
    """
    real = Path(os.path.realpath(path))
    is_device = real.exists() and not real.is_file() and not real.is_dir()
    if is_device:
        with writing(path), real.open("wb") as device:
            yield device
        return
    # In the same folder, because a rename across file systems is a copy; and with the process id,
    # because two runs may write the same output.
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
    """Write a file atomically: a reader finds the old content or the new. Text is UTF-8.

    Lone surrogates, which JSON and file names can hold, are escaped with a backslash.
    """
    if isinstance(content, str):
        content = content.encode(errors="backslashreplace")
    with complete_file(path) as file:
        file.write(content)


def file_problems(outputs: Mapping[str, str | os.PathLike[str] | None]) -> Iterator[str]:
    """Yield a problem for each output path that cannot be a file.

    Call this before the work whose result goes to the paths.

    Args:
        outputs: {flag: path of the output}; None for a flag that is not given.
    """
    for flag, path in outputs.items():
        if path is None:
            continue
        if os.path.isdir(path):
            yield f"{flag} {path} is a folder. Name a file in it: {flag} {Path(path) / 'NAME'}"
        else:
            yield from _problems_above(flag, Path(path))


def folder_problems(outputs: Mapping[str, str | os.PathLike[str] | None]) -> Iterator[str]:
    """Yield a problem for each output path that cannot be a folder.

    Args:
        outputs: {flag: path of the output}; None for a flag that is not given.
    """
    for flag, path in outputs.items():
        if path is None:
            continue
        if os.path.exists(path) and not os.path.isdir(path):
            yield f"{flag} {path} is a file, not a folder. Give another name."
        else:
            yield from _problems_above(flag, Path(path))


def nearest_folder(path: str | os.PathLike[str]) -> Path:
    """Return the path itself if it exists, else the nearest path above it that exists.

    The result may be a file: `folder_problems` finds such paths.
    """
    there = Path(path)
    while not there.exists():
        there = there.absolute().parent
    return there


def _problems_above(flag: str, path: Path) -> Iterator[str]:
    """Yield a problem if the nearest existing parent of `path` is not a folder.

    Args:
        flag: the flag that gave the path, which the problem names.
    """
    for parent in path.absolute().parents:
        # lexists: a broken symbolic link takes the name, too
        if os.path.lexists(parent):
            if not os.path.isdir(parent):
                yield f"{flag} {path}: {parent} is a file, not a folder. Give another name."
            return


def note_how(output: str | os.PathLike[str], how: Mapping[str, Any]) -> None:
    """Record how an output was made, in OUTPUT.how.json, for `is_current`.

    Args:
        how: everything that decides the content except the input files; stored as JSON.
    """
    write_complete(_how(output), _record(how))


def forget_how(output: str | os.PathLike[str]) -> None:
    """Delete the record of how the file `output` was made, before a new file replaces it."""
    _how(output).unlink(missing_ok=True)


def is_current(outputs: Sequence[str], inputs: Sequence[str], how: Mapping[str, Any]) -> bool:
    """Return whether the outputs can be used as they are, without making them again.

    This is so if all outputs and inputs exist, no output is older than an input, and the record of
    the first output equals `how`.

    Args:
        outputs: paths of the outputs.
        inputs: paths of the files that they are made from.
        how: everything else that decides the content of the outputs, as given to `note_how`.
    """
    made = [Path(p) for p in outputs]
    sources = [Path(p) for p in inputs]
    record = _how(outputs[0])
    if not all(p.exists() for p in (*made, *sources, record)):
        return False
    try:
        if record.read_text() != _record(how):
            return False
    except (OSError, UnicodeDecodeError):
        return False
    # Equal times count as current: coarse file systems store whole seconds.
    oldest = min(p.stat().st_mtime_ns for p in made)
    return all(p.stat().st_mtime_ns <= oldest for p in sources)


def _how(output: str | os.PathLike[str]) -> Path:
    """Return the path of the record for an output, OUTPUT.how.json."""
    return Path(f"{os.fspath(output)}.how.json")


def _record(how: Mapping[str, Any]) -> str:
    """Return the JSON text of a record, which says how an output was made."""
    return json.dumps(how, indent=1) + "\n"
