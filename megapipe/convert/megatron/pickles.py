"""Read pickles as plain data: nothing that a file names is imported or called.

A pickle is a program, and a checkpoint may come from anyone. Any object other than a tensor, a
number, text or a container becomes a `Named`, which keeps the data of the object and does nothing.
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
    """A stand-in for an object in a pickle: the data from which its class would build it.

    For each class or function in the pickle, there is a subclass of Named with its name.

    `fields` returns the state as {attribute: value}.

    Attributes:
        args: the arguments of the class or function.
        state: the argument of __setstate__, None without one.
    """

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def fields(self) -> dict[str, Any]:
        """Return {attribute: value} of the object; {} if the state is no dict."""
        return dict(self.state) if isinstance(self.state, dict) else {}


def read_pickle(path: Path) -> Any:
    """Return the content of a file that `pickle.dump` has written.

    In place of each object other than numbers, text and containers, there is a `Named` with its
    data.

    Raises: CheckpointError if the file is missing or damaged.
    """
    try:
        content = path.read_bytes()
        # The loader allocates as many places for its memo, at 8 bytes each, as a file asks for. A
        # damaged file of a few bytes can ask for 16 GiB.
        for code, index, place in pickletools.genops(content):
            if code.name == "LONG_BINPUT" and (index or 0) > len(content):
                raise pickle.UnpicklingError(f"it asks for {index} places at byte {place}")
        return _Unpickler(io.BytesIO(content)).load()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    # A damaged program may raise any error.
    except Exception as error:
        raise CheckpointError(f"{path} is damaged or no pickle: {error}") from None


def read_torch(source: Path | bytes, name: str = "") -> Any:
    """Return the content that `torch.save` has written.

    In place of each object other than tensors, numbers, text and containers, there is a `Named`
    with its data. The tensors of a file stay on disk until they are used.

    Args:
        source: a file, or the bytes of one.
        name: where the bytes come from, for errors; not needed for a file.
    Raises: CheckpointError if the file is missing or damaged, or if torch's weights-only reader
        refuses an object in it.
    """
    file: Any = str(source)
    if isinstance(source, bytes):
        file = io.BytesIO(source)
    else:
        name = str(source)
    try:
        # torch's weights-only reader refuses names that it does not know. Each is given a class
        # of its own that does nothing.
        names = get_unsafe_globals_in_checkpoint(file)
        if isinstance(source, bytes):
            file.seek(0)
        with safe_globals([(_named(full), full) for full in names]):
            mapped = isinstance(source, Path)
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        raise CheckpointError(f"{name}: {error.strerror or error}") from None
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise CheckpointError(f"{name} cannot be read: {lines[0]}") from None


def _named(name: str) -> Any:
    """Return a new subclass of Named with this name, as a stand-in for a class in a pickle."""
    return type(name, (Named,), {})


class _Unpickler(pickle.Unpickler):
    """An unpickler that replaces every class or function in a pickle by a subclass of Named."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._classes: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a class or function in the pickle.

        Nothing is imported. Equal names give the same stand-in.

        Args:
            module, name: module and name of the class.
        """
        full = f"{module}.{name}"
        return self._classes.setdefault(full, _named(full))
