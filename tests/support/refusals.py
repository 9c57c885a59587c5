"""What is refused, and in which words."""

import tomllib
from pathlib import Path

import pytest

from megapipe.schedule import Schedule, ScheduleError, verify


def read(file: Path) -> list[tuple[str, int, list[str]]]:
    """Read a table in TOML of flags -> what a user reads.

    Return flags, the number of processes and the lines of each row; a row without lines is a run that starts.
    """
    rows = []
    for table in tomllib.loads(file.read_text()).values():
        for key, lines in table.items():
            ranks, _, flags = key.rpartition(" ranks: ")
            rows.append((flags, int(ranks or 1), [lines] if isinstance(lines, str) else lines))
    return rows


def refusal(schedule: Schedule) -> str:
    """Return the words in which a schedule is refused."""
    with pytest.raises(ScheduleError) as caught:
        verify(schedule)
    return str(caught.value)
