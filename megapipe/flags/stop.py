"""The end of a command that cannot go on: one message for the user, printed once."""

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
    """Run a command with the flags of the command line, and exit with its status.

    An error that the user can mend is printed as one message, without a traceback.

    Args:
        main: takes the flags, and returns the exit status or None for 0.
    """
    take_any_name()
    try:
        code = main(sys.argv[1:])
    except (UserError, KeyboardInterrupt) as error:
        stop(error)
    except BrokenPipeError:  # `| head` has seen enough
        _discard_output()
        return
    except OSError as error:
        if error.filename is None:  # not about a file of the user
            raise
        stop(UserError(f"{error.filename}: {error.strerror}"))
    if code:
        sys.exit(code)


def take_any_name() -> None:
    """Let standard output print any file name, by escaping bytes that are not text.

    Standard error does so anyway.
    """
    # The stream may be closed, be replaced by a test, or be a file that became a pipe.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        # backslashreplace, as Python sets it for standard error.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def say(text: str) -> None:
    """Print a line at once. If nobody reads the output any more, as after `| head`, do nothing."""
    try:
        print(as_called(text), flush=True)
    except BrokenPipeError:
        _discard_output()


def _discard_output() -> None:
    # Python flushes standard output again when it exits, which would fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def stop(error: UserError | KeyboardInterrupt) -> NoReturn:
    """Print `pretrain_gpt.py: error: ...`, and exit with the error's code.

    The first rank of a machine prints at once. The others wait five seconds, in which a launcher
    usually ends them, and then print too. After Ctrl-C the code is 130, and only the first rank
    prints. The message goes to standard error. Under torchrun it goes into the report of torchrun,
    which comes last.
    """
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if isinstance(error, KeyboardInterrupt):
        text = "; ".join(["interrupted", *map(str, error.args)])
        # 128 + SIGINT, as a shell reports it.
        code = 130
    else:
        text = as_called(f"error: {error}")
        code = error.exit_code
    # The launcher ends all ranks when one exits, so the others wait until local rank 0 has printed.
    if not first and code != 130:
        time.sleep(5)
    if first or code != 130:
        text = f"{program()}: {text}"
        # Where standard error is closed or nobody reads it, the exit code still says what happened.
        with contextlib.suppress(OSError, AttributeError):
            if code == 130 or not _printed_by_torchrun(text):
                sys.stderr.write(f"{text}\n")
                sys.stderr.flush()
    sys.exit(code)


def _printed_by_torchrun(text: str) -> bool:
    """Write the message into the file in which torchrun looks for what ended a process.

    Only the first rank of a machine writes the file.

    Returns: whether torchrun prints the message; False if torchrun did not start this process.
    """
    # torchrun gives each rank such a file, and prints the one of the rank that failed first.
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if not path.name:
        return False
    # torch.distributed.elastic has a folder for each local rank.
    if (path.parents[1] / "0" / path.name).exists():
        return True
    # torchrun compares the times of all ranks' files, in whole seconds.
    extra = {"timestamp": str(int(time.time()))}
    report = {"message": {"message": text, "extraInfo": extra}}
    try:
        # The form that torchrun reads: torch.distributed.elastic writes the same for an exception.
        path.write_text(json.dumps(report), encoding="utf-8")
    except OSError:
        return False
    return True


def program() -> str:
    """Return the name of the running script, for errors and help."""
    return Path(sys.argv[0]).name or "megapipe"
