"""A table of refusals: flags -> what a user reads, in a file of TOML."""

import tomllib
from pathlib import Path


def read(file: Path) -> list[tuple[str, int, list[str]]]:
    """Return flags, the number of processes and the lines of each row; a row without lines is a run that starts."""
    rows = []
    for table in tomllib.loads(file.read_text()).values():
        for key, lines in table.items():
            ranks, _, flags = key.rpartition(" ranks: ")
            rows.append((flags, int(ranks or 1), [lines] if isinstance(lines, str) else lines))
    return rows
