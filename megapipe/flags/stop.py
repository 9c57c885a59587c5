"""The end of a program of ours that cannot go on: one text for the user, once."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from megapipe.doors import as_called
from megapipe.errors import UserError


def run(main: Callable[[list[str]], int | None]) -> None:
    """A command, with the command line's flags: what the user can mend ends it in one message.

    main: what it returns is the exit status, none is 0.
    """
    take_any_name()
    try:
        code = main(sys.argv[1:])
    except (UserError, KeyboardInterrupt) as error:
        stop(error)
    except BrokenPipeError:  # `| head` has seen enough
        _nobody_reads()
        return
    except OSError as error:
        if error.filename is None:  # no file of the user's
            raise
        stop(UserError(f"{error.filename}: {error.strerror}"))
    if code:
        sys.exit(code)


def take_any_name() -> None:
    """Let standard output say any name of a file, as standard error does: bytes that are no text are escaped."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, a test's, or a file that became a pipe
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def say(text: str) -> None:
    """Print a line at once. Where nobody reads any more, as behind `| head`, the work goes on without a word."""
    try:
        print(as_called(text), flush=True)
    except BrokenPipeError:
        _nobody_reads()


def _nobody_reads() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes it once more


def stop(error: UserError | KeyboardInterrupt) -> NoReturn:
    """Tell `pretrain_gpt.py: error: ...`, once per machine, and exit with its code; 130 after Ctrl-C.

    On stderr; under torchrun in the report that it ends with, behind its own trace.
    """
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if isinstance(error, KeyboardInterrupt):
        text, code = "; ".join(["interrupted", *map(str, error.args)]), 130
    else:
        text, code = as_called(f"error: {error}"), error.exit_code
    # The launcher ends all ranks when one exits, so the others wait until local rank 0 has told the same.
    if not first and code != 130:
        time.sleep(5)
    if first or code != 130:
        text = f"{program()}: {text}"
        with contextlib.suppress(OSError, AttributeError):  # nobody reads it, or it is closed: the exit code stays
            if code == 130 or not _told_by_torchrun(text):
                sys.stderr.write(f"{text}\n")
                sys.stderr.flush()
    sys.exit(code)


def _told_by_torchrun(text: str) -> bool:
    """Leave it where torchrun looks for what ended a process, unless the machine's first rank has done so."""
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if not path.name:
        return False
    if (path.parents[1] / "0" / path.name).exists():  # torch.distributed.elastic: a folder for each local rank
        return True
    report = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
    try:
        path.write_text(json.dumps(report), encoding="utf-8")
    except OSError:
        return False
    return True


def program() -> str:
    """Name of the script, as errors and help print it."""
    return Path(sys.argv[0]).name or "megapipe"
