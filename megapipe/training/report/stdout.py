"""Let a run go on if nobody reads its standard output any more."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO, cast

from megapipe.flags.stop import take_any_name


@contextmanager
def stdout_may_break() -> Iterator[None]:
    """Return a context in which a broken standard output costs one warning and no error.

    For example after `| head`, or on a full disk.
    """
    # If a standard stream is closed, the next opened file gets its number, and all warnings would
    # be written into that file. Opening /dev/null occupies the free numbers up to 2.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    take_any_name()
    with redirect_stdout(cast(TextIO, _Forgiving(sys.stdout))):
        yield


class _Forgiving:
    """A stream that passes text on to another one, until that fails; later text is discarded.

    The failure is reported on stderr.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._do(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._do(lambda stream: stream.flush())

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    # For what libraries ask of sys.stdout, such as its encoding.
    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _do(self, call: Callable[[TextIO], object]) -> None:
        stream = self._stream
        if stream is None:
            return
        try:
            call(stream)
        except (OSError, ValueError) as error:
            # stderr may still be read.
            self._stream = None
            with suppress(OSError, ValueError):
                os.write(2, f"WARNING: no output from here on, standard output: {error}\n".encode())
                # Python flushes the stream's buffer when it ends, which must not fail again.
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, stream.fileno())
                os.close(nothing)
