"""Arrays that take a while to compute, kept in a folder so that the next start maps them.

No process waits for another: whoever finds no entry computes it, and renames a finished one into place.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapipe.errors import DataError


def cached(
    folder: str | None, key: Mapping[str, object], build: Callable[[], Sequence[NDArray[Any]]]
) -> list[NDArray[Any]]:
    """What `build` returns, mapped from `folder` if an entry of this key is there, else computed and stored.

    Args:
        folder: cache folder, None for no cache.
        key: everything the arrays depend on; stored beside them in key.json.
    Raises: DataError for a folder that cannot be written or an entry that cannot be read.
    """
    if folder is None:
        return list(build())
    text = json.dumps(key, indent=1, sort_keys=True)
    entry = Path(folder) / hashlib.sha256(text.encode()).hexdigest()[:32]
    if not entry.is_dir():
        _store(entry, text, build())
    try:
        files = sorted(entry.glob("*.npy"))
        return [np.load(file, mmap_mode="r", allow_pickle=False).view(np.ndarray) for file in files]
    except (OSError, ValueError) as error:
        raise DataError(f"--data-cache-path entry {entry} is damaged ({error}). Delete it: rm -r {entry}") from error


def _store(entry: Path, key: str, arrays: Sequence[NDArray[Any]]) -> None:
    size = sum(a.nbytes for a in arrays)
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".building-", dir=entry.parent))
        try:
            (temporary / "key.json").write_text(key)
            for i, array in enumerate(arrays):
                np.save(temporary / f"{i}.npy", array, allow_pickle=False)
            temporary.chmod(0o755)
            os.rename(temporary, entry)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        if not entry.is_dir():  # else another process was faster, with the same arrays
            raise DataError(
                f"--data-cache-path {entry.parent}: cannot store an index of {size} bytes ({error.strerror}). "
                "Free the space, give another folder or leave the flag out."
            ) from error
