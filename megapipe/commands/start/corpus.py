"""A corpus that needs no download: the source of the Python standard library of the interpreter that runs this.

    python -m megapipe.commands.start.corpus --output data/stdlib.jsonl

writes one JSON line per module, {"text": ..., "path": ...}, in an order shuffled by name, so that the validation part
of a split is like the training part.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megapipe.data.files import complete_file, file_problems
from megapipe.errors import ConfigError, DataError
from megapipe.flags.parse import parse, run


@dataclass(frozen=True)
class Flags:
    """Flags of this tool."""

    output: str | None = None
    """JSON Lines file to write."""
    reuse: bool = False
    """Keep a file that is there already."""


def main(argv: Sequence[str]) -> None:
    flags = parse(Flags, argv)
    if flags.output is None:
        raise ConfigError("--output is missing: --output data/stdlib.jsonl")
    if problems := list(file_problems({"--output": flags.output})):
        raise ConfigError(problems)
    output = Path(flags.output)
    if flags.reuse and output.exists():
        print(f"{output}: up to date")
        return
    root = Path(sysconfig.get_paths()["stdlib"])
    count = 0
    with complete_file(output) as file:
        for path, text in sources(root):
            file.write((json.dumps({"text": text, "path": path}, ensure_ascii=False) + "\n").encode())
            count += 1
        if not count:
            raise DataError(f"{root} holds no .py files; this interpreter ships its standard library in another form")
    size = output.stat().st_size
    print(f"Wrote {output}: {count} modules of {root}, {size / 1e6:.1f} MB")


def sources(root: Path) -> Iterator[tuple[str, str]]:
    """Relative path and text of every UTF-8 module below root that was not installed later, in hashed order."""
    names = [p.relative_to(root) for p in root.rglob("*.py")]
    mine = [n.as_posix() for n in names if not {"site-packages", "dist-packages"} & set(n.parts)]
    for name in sorted(mine, key=lambda n: hashlib.sha256(n.encode()).digest()):
        try:
            text = (root / name).read_text("utf-8")
        except UnicodeDecodeError:  # a few test modules are in other encodings on purpose
            continue
        if text:
            yield name, text


if __name__ == "__main__":
    run(main)
