"""Pickles read as plain data: no module that a file names is imported and nothing that it names is called.

What is no tensor, number, text or container becomes a `Named`, which says what it was and does nothing.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from megapipe.errors import CheckpointError


class Named:
    """An object of a pickle.

    Attributes:
        args: what its class or function was to be called with.
        state: what it was to be filled with.
    """

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def fields(self) -> dict[str, Any]:
        """The state, of an object with plain attributes."""
        return dict(self.state) if isinstance(self.state, dict) else {}


def read_pickle(path: Path) -> Any:
    """A file that `pickle.dump` has written."""
    try:
        content = path.read_bytes()
        # The loader allocates as many places for its memo, at 8 bytes each, as a damaged file says.
        for code, index, place in pickletools.genops(content):
            if code.name == "LONG_BINPUT" and (index or 0) > len(content):
                raise pickle.UnpicklingError(f"it asks for {index} places at byte {place}")
        return _Unpickler(io.BytesIO(content)).load()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except Exception as error:  # a pickle is a program: anything may go wrong in one that is damaged
        raise CheckpointError(f"{path} is damaged or no pickle: {error}") from None


def read_torch(source: Path | bytes, name: str = "") -> Any:
    """A file, or the bytes of one, that `torch.save` has written; the tensors of a file stay on disk until they are
    used.

    Args:
        name: of the source of bytes, for errors.
    """
    file: Any = io.BytesIO(source) if isinstance(source, bytes) else str(source)
    try:
        names = get_unsafe_globals_in_checkpoint(file)
        if isinstance(source, bytes):
            file.seek(0)
        with safe_globals([(_named(full), full) for full in names]):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(source, Path))
    except OSError as error:
        raise CheckpointError(f"{source if isinstance(source, Path) else name}: {error.strerror or error}") from None
    except Exception as error:
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{source if isinstance(source, Path) else name} cannot be read: {what}") from None


def _named(name: str) -> Any:
    return type(name, (Named,), {})


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._classes: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        return self._classes.setdefault(full, _named(full))
