"""Write a corpus without a download: the source of this interpreter's standard library.

    python -m megapipe.commands.start.corpus --output data/stdlib.jsonl

writes one JSON line per module, {"text": ..., "path": ...}. The modules are shuffled, so that the
validation part of --split resembles the training part.
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
    """Write the source of the Python standard library as a corpus."""

    output: str | None = None
    """JSON Lines file to write."""
    reuse: bool = False
    """Keep the file if it exists."""


def main(argv: Sequence[str]) -> None:
    """Write a corpus of Python's own standard library to --output, and print its size.

    Raises: ConfigError for wrong flags, DataError if the interpreter has no source files.
    """
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
            # Characters beyond ASCII stand as they are, as they do in most corpora.
            line = json.dumps({"text": text, "path": path}, ensure_ascii=False)
            file.write(f"{line}\n".encode())
            count += 1
        if not count:
            raise DataError(
                f"{root} holds no .py files: this interpreter has its standard library in another "
                "form. Run the command with another Python."
            )
    size = output.stat().st_size
    print(f"Wrote {output}: {count} modules of {root}, {size / 1e6:.1f} MB")


def sources(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of each UTF-8 module below `root`, but no installed or empty module."""
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    installed = {"site-packages", "dist-packages"}
    names = [path.as_posix() for path in paths if not installed & set(path.parts)]
    # The hash of the name is a shuffle that every machine draws in the same way.
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        try:
            text = (root / name).read_text("utf-8")
        # A few test modules are in other encodings on purpose.
        except UnicodeDecodeError:
            continue
        # An empty module, such as many __init__.py, would be a document without tokens.
        if text:
            yield name, text


if __name__ == "__main__":
    run(main)
