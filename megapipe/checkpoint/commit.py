"""A checkpoint folder that is either complete or not there.

    iter_0000020.tmp-1f3a/   files are written and fsynced, then manifest.json with their sizes
                             and SHA-256
    iter_0000020/            one rename
    latest_checkpointed_iteration.txt    replaced last; names the newest

Wherever a save is killed, the pointer names the previous checkpoint or the new one. A file that the
manifest does not list is never read. Damage, a mixture of two checkpoints and a file from elsewhere
are thus found before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

from megapipe.errors import CheckpointError

POINTER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
FORMAT = 1
_NAME = re.compile(r"iter_(\d{7,})")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Digest(TypedDict):
    """A file's entry in the manifest: its size in bytes, and its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


class Damaged(CheckpointError):
    """The error of a checkpoint whose files do not agree with its manifest."""


def folder_of(root: Path, iteration: int) -> Path:
    """Return the path of an iteration's checkpoint in `root`, named as in Megatron-LM."""
    return root / f"iter_{iteration:07d}"


def iteration_of(folder: Path) -> int:
    """Return the iteration in the name of a checkpoint's folder."""
    return int(folder.name.removeprefix("iter_"))


def iterations_in(root: Path) -> list[int]:
    """Return the iterations that have a folder, ascending; none if `root` is no folder."""
    if not root.is_dir():
        return []
    matches = map(_NAME.fullmatch, os.listdir(root))
    return sorted(int(match[1]) for match in matches if match)


def newest(root: Path) -> int | None:
    """Return the iteration to resume from, None if there is no checkpoint.

    Args:
        root: the folder that holds the checkpoints' folders and the pointer to the newest one.
    Raises: CheckpointError if the pointer names no checkpoint, or if `root` is one itself.
    """
    if (root / MANIFEST).exists():
        if _NAME.fullmatch(root.name):
            raise CheckpointError(
                f"{root} is one checkpoint; give the folder above it and choose with --ckpt-step: "
                f"--load {root.parent} --ckpt-step {iteration_of(root)}"
            )
        raise CheckpointError(
            f"{root} is one checkpoint, and its folder was renamed; "
            "it was called iter_ and seven digits"
        )
    text: bytes | None = None
    before: bytes | None = b""
    # A save that ends meanwhile moves the pointer, and may remove the checkpoint before.
    while text != before:
        before, there = text, iterations_in(root)
        text = (root / POINTER).read_bytes() if (root / POINTER).exists() else None
    if text is None:
        # A folder has its name once it is complete: a first save was cut off before its pointer.
        return there[-1] if there else None
    # Megatron-LM's converters write this word in place of a number.
    if text.strip() == b"release" and (root / "release").is_dir():
        raise CheckpointError(_megatrons(root / "release"))
    if not re.fullmatch(rb"[0-9]{1,18}\s*", text):
        raise CheckpointError(
            f"{root / POINTER} holds {text[:40]!r}, not an iteration. {_choices(there)}"
        )
    if int(text) not in there:
        folder = folder_of(root, int(text))
        raise CheckpointError(
            f"{root / POINTER} names iteration {int(text)}, but there is no {folder.name}. "
            f"{_choices(there)}"
        )
    return int(text)


def require(root: Path, iteration: int) -> None:
    """Check that the checkpoint named by --ckpt-step exists. Raises: CheckpointError if not.

    Args:
        root: the folder that holds the checkpoints' folders.
        iteration: the value of --ckpt-step.
    """
    there = iterations_in(root)
    if iteration not in there:
        raise CheckpointError(
            f"--ckpt-step {iteration}: {root} has no such checkpoint. {_choices(there)}"
        )


def refuse_to_overwrite(root: Path, after: int) -> None:
    """Check that no checkpoint in `root` is of a later iteration than the one a run starts from.

    The run would reach that iteration itself, and overwrite the checkpoint. Checkpoints later than
    the one that the pointer names do not count.

    Args:
        root: the folder of --save.
        after: the iteration from which the run starts.
    Raises: CheckpointError that names the later iterations.
    """
    # Later iterations than the pointer's were never announced: a save was cut off before it, or a
    # user moved the pointer back to go on from there.
    announced = newest(root) or 0
    others = [n for n in iterations_in(root) if after < n <= announced]
    if others:
        listed = ", ".join(map(str, others))
        raise CheckpointError(
            f"--save {root} has checkpoints of iterations {listed} already, and this run starts at "
            f"{after}; a checkpoint is never overwritten. Continue with --load {root} without "
            f"--ckpt-step, or use another folder: --save {root}-from-{after}"
        )


def begin(root: Path, iteration: int) -> Path:
    """Make a fresh temporary folder to write a checkpoint into, and return its path.

    Args:
        root: the folder of --save, which is made if it does not exist.
        iteration: the checkpoint's iteration.
    Raises: CheckpointError if another run saves there, if there is no room, or if a checkpoint of
        this or a later iteration is there.
    """
    # It loads torch, which a writer's process does not need.
    from megapipe.checkpoint import lock

    root.mkdir(parents=True, exist_ok=True)
    lock.refuse_others(root)
    refuse_to_overwrite(root, iteration - 1)
    refuse_without_room(root)
    final = folder_of(root, iteration)
    if final.exists():
        # A save that was cut off before its pointer left it, or the pointer was moved back by hand.
        # It is renamed: until the new one is complete it has the only weights of that iteration.
        os.rename(final, aside(final, "old"))
    folder = aside(final, "tmp")
    folder.mkdir()
    return folder


def refuse_without_room(root: Path, needed: int = 0, disk: Path | None = None) -> None:
    """Check that the disk has room for one more checkpoint. Raises: CheckpointError if not.

    Args:
        root: the folder that holds the checkpoints' folders.
        needed: bytes that the checkpoint takes at least. The size of the newest existing checkpoint
            counts if it is larger.
        disk: an existing folder above `root`, if `root` may not exist yet; None if it does.
    """
    there = iterations_in(root)
    if there:
        folder = folder_of(root, there[-1])
        needed = max(needed, sum(path.stat().st_size for path in folder.iterdir()))
    free = shutil.disk_usage(disk or root).free
    if needed > free:
        remedy = "Make room, or give a folder on a larger disk."
        # Old ones are removed after a save, so a limit on them makes no room for the first.
        if len(there) > 1:
            listed = ", ".join(map(str, there[:-1]))
            remedy += f" Older checkpoints of iterations {listed} are there; "
            remedy += "--save-keep-last 2 removes such ones after each save."
        raise CheckpointError(
            f"--save {root}: a checkpoint takes {needed / 2**30:.4g} GiB, and "
            f"{free / 2**30:.4g} are free. {remedy}"
        )


def clear(root: Path) -> list[str]:
    """Remove files and folders that interrupted saves have left, as far as that is possible.

    No other run may be saving there.

    Args:
        root: the folder of --save.
    Returns: the names of the removed files and folders.
    """
    found = sorted(root.glob("iter_*.tmp-*"))
    for left in found:
        shutil.rmtree(left, ignore_errors=True)
        # The marker of a failed save in the background is a file.
        if left.suffix == ".failed":
            left.unlink(missing_ok=True)
    return [left.name for left in found if not left.exists()]


def aside(final: Path, why: str) -> Path:
    """Return an unused path next to `final`: iter_0000020.tmp-1f3a5b7c for `why` = tmp."""
    return final.with_name(f"{final.name}.{why}-{secrets.token_hex(4)}")


def digest(folder: Path, names: Iterable[str]) -> dict[str, Digest]:
    """Sync files to the disk, and return {name: digest} of them.

    Args:
        folder: the folder of the files.
        names: the names of the files.
    """
    found = {}
    for name in names:
        # torch's writer syncs before it has flushed: the end of a file, less than a block of the
        # file system, was never synced.
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
        found[name] = _digest(folder / name)
    return found


def commit(folder: Path, iteration: int, files: dict[str, Digest]) -> Path:
    """Write the manifest, give the folder its final name, and point to it. Return the final path.

    Args:
        folder: the temporary folder from `begin`, with all files of the checkpoint.
        iteration: the checkpoint's iteration.
        files: {name: digest} of each file in the folder, as the manifest will list them.
    """
    root = folder.parent
    final = folder_of(root, iteration)
    write_durably(folder / MANIFEST, _manifest_text(iteration, files))
    # Files, their names, the folder's own name, the pointer: in this order, whatever has its name
    # is complete on the disk.
    _sync_folder(folder)
    os.rename(folder, final)
    _sync_folder(root)
    point_to(root, iteration)
    return final


def point_to(root: Path, iteration: int) -> None:
    """Write the pointer: the file in `root` with the iteration to resume from."""
    write_durably(root / f"{POINTER}.tmp", f"{iteration}\n")
    os.replace(root / f"{POINTER}.tmp", root / POINTER)
    _sync_folder(root)


def read_manifest(folder: Path) -> dict[str, Digest]:
    """Return {name: digest} of a checkpoint's files, which `verify` compares.

    Raises: Damaged if the manifest is missing or wrong, or lacks safetensors files of the folder.
        CheckpointError for a checkpoint of Megatron-LM or of a newer version.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        if is_megatrons(folder):
            raise CheckpointError(_megatrons(folder)) from None
        raise Damaged(
            f"{folder} has no {MANIFEST}: it is no complete checkpoint. {_OTHER}"
        ) from None
    except UnicodeDecodeError:
        raise Damaged(f"{path} is damaged. {_OTHER}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    try:
        content = json.loads(text)
        if content["format"] > FORMAT:
            raise CheckpointError(
                f"{folder} has format {content['format']}, newer than {FORMAT}; update megapipe"
            )
        iteration = content["iteration"]
        files = content["files"]
        # Written again it must be the same text, so no bit of it can change unseen.
        if not isinstance(iteration, int) or text != _manifest_text(iteration, files):
            raise ValueError
        if any(entry.keys() != Digest.__annotations__.keys() for entry in files.values()):
            raise ValueError
        # A name with a slash could point anywhere on the machine.
        problems = [
            f"{path}: {name!r} is not the name of a file in it"
            for name in files
            if not _FILE.fullmatch(name)
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged(f"{path} is damaged. {_OTHER}") from None
    if folder.name != folder_of(folder, iteration).name:
        problems.append(
            f"{path} belongs to iteration {iteration}; "
            "the folder was renamed or its files were mixed"
        )
    # torch's reader takes every such file of the folder, listed or not.
    problems += [
        f"{folder / name} is not in {MANIFEST}; it does not belong to the checkpoint"
        for name in sorted(os.listdir(folder))
        if name.endswith(".safetensors") and name not in files
    ]
    if problems:
        raise Damaged(problems)
    return files  # type: ignore[no-any-return]


def is_megatrons(folder: Path) -> bool:
    """Return whether Megatron-LM has written this checkpoint, in any of its formats."""
    names = ("common.pt", "metadata.json", ".metadata")
    return any((folder / name).exists() for name in names) or any(folder.glob("mp_rank_*"))


def _megatrons(folder: Path) -> str:
    """Return the error for loading a checkpoint of Megatron-LM, with the command to convert it."""
    return (
        f"{folder} is a checkpoint of Megatron-LM, and megapipe loads its own only. Convert it: "
        f"megapipe convert --from-megatron {folder.parent} --save {folder.parent}-megapipe"
    )


def verify(folder: Path, files: dict[str, Digest], names: Iterable[str]) -> None:
    """Compare files of a checkpoint with its manifest. Raises: Damaged, with all that differ.

    Args:
        files: {name: digest} of every file, from the manifest.
        names: the files to compare; each rank may compare some of the files.
    """
    problems = []
    for name in names:
        path = folder / name
        try:
            # Not followed: a link in a checkpoint from elsewhere may name any file of the machine.
            if not stat.S_ISREG(path.lstat().st_mode):
                problems.append(f"{path} is not a plain file; links are not followed")
                continue
            found = _digest(path)
        except FileNotFoundError:
            problems.append(f"{path} is missing. {_OTHER}")
            continue
        if found["bytes"] != files[name]["bytes"]:
            problems.append(
                f"{path} has {found['bytes']} bytes, not {files[name]['bytes']}. {_OTHER}"
            )
        elif found != files[name]:
            problems.append(f"{path} is damaged: its SHA-256 differs from {MANIFEST}. {_OTHER}")
    if problems:
        raise Damaged(problems)


def write_durably(path: Path, text: str) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


_OTHER = "Load another iteration with --ckpt-step"


def _choices(there: list[int]) -> str:
    """Return the end of an error: "Choose one with --ckpt-step: 20, 40", or that there is none."""
    if not there:
        return "There is no checkpoint in that folder"
    return f"Choose one with --ckpt-step: {', '.join(map(str, there))}"


def _manifest_text(iteration: int, files: dict[str, Digest]) -> str:
    content = {"format": FORMAT, "iteration": iteration, "files": files}
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def _digest(path: Path) -> Digest:
    with path.open("rb") as file:
        return {
            "bytes": os.fstat(file.fileno()).st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def _sync_folder(folder: Path) -> None:
    # A file's name is part of its folder, and reaches the disk with it.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
