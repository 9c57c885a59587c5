"""Work on many items, each in a fork of this process, with answers that outlive a run cut off."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def in_forks(items: Sequence[T], work: Callable[[T], object], jobs: int) -> Iterator[tuple[T, Any]]:
    """Call `work` for each item in a process of its own, `jobs` at a time.

    Yields each item with its answer, which JSON can write, as its process ends. Raises: SystemExit
    if `work` raises an error, which is printed.
    """
    waiting = list(reversed(items))
    children: dict[int, tuple[T, Path]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or children:
            while waiting and len(children) < jobs:
                answer = Path(folder, str(len(waiting)))
                item = waiting.pop()
                child = os.fork()
                if not child:
                    _answer(work, item, answer)
                children[child] = item, answer
            child, status = os.wait()
            if child not in children:
                continue
            item, answer = children.pop(child)
            if status:
                raise SystemExit(f"{item}: the work itself ends with {status}")
            yield item, json.loads(answer.read_text())


def _answer(work: Callable[[T], object], item: T, file: Path) -> None:
    """Do the work of a fork and end it."""
    status = 1
    try:
        file.write_text(json.dumps(work(item)))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def kept(file: str | Path | None) -> list[dict[str, Any]]:
    """Return the answers of a file, a line each; none where there is no file yet."""
    if file is None or not Path(file).exists():
        return []
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def keep(file: str | Path | None, answer: dict[str, Any]) -> None:
    """Append an answer to the file, at once."""
    if file is not None:
        with open(file, "a") as lines:
            print(json.dumps(answer), file=lines)
