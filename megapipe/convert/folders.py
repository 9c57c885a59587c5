"""Read and write the files of a model's folder other than its tensors."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megapipe.checkpoint import commit
from megapipe.errors import CheckpointError


def copy_others(source: Path, target: Path) -> None:
    """Copy the files of the tokenizer and of the generation settings to `target`.

    These are all .json, .txt, .model and .jinja files in `source` but config.json and the index of
    the weights.
    """
    target.mkdir(parents=True, exist_ok=True)
    # A conversion writes weights and config.json itself.
    for path in sorted(source.iterdir()):
        if path.suffix not in (".json", ".txt", ".model", ".jinja") or not path.is_file():
            continue
        if path.name != "config.json" and not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file of JSON, and wait until it is on disk.

    Args:
        path: the file.
        content: the object to write.
    """
    commit.write_durably(path, json.dumps(content, indent=2) + "\n")


@contextmanager
def fresh_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to write to, which replaces `target` if the block ends without an error.

    `target` must be an empty folder or missing.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the same parent, so that it is renamed and not copied.
    fresh = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    fresh.mkdir()
    with scratch(fresh):
        yield fresh
        fresh.replace(target)


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Yield `folder` back, and remove it with its content if an error ends the block."""
    try:
        yield folder
    # An interrupt of the user leaves nothing, either.
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file of JSON.

    Raises: CheckpointError if the file is missing or holds anything but an object.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    # Deep nesting ends the parser with a RecursionError.
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is not JSON") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content
