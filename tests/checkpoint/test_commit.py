"""A checkpoint is complete or not there, wherever a save is killed; any damage is found before anything is read."""

import json
import os
import re
import shutil
import tempfile
from types import SimpleNamespace

import pytest
from killed_saves import Toy, kill_everywhere, load_newest
from programs import FORKED

from megapipe.checkpoint import commit
from megapipe.checkpoint.save_load import check_save
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import CheckpointError


def refused(folder):
    with pytest.raises(CheckpointError) as caught:
        Toy(0).load(folder)
    return str(caught.value)


@pytest.mark.parametrize("start", [1, None])
def test_a_save_killed_at_any_point_leaves_the_previous_checkpoint_or_the_new_one(tmp_path, start):
    outcomes = FORKED.Queue()
    process = FORKED.Process(  # without threads, so that it may fork
        target=kill_everywhere, args=(tmp_path, start, outcomes)
    )
    process.start()
    seen = list(iter(lambda: outcomes.get(timeout=60), None))
    process.join(60)
    assert process.exitcode == 0
    names, found = zip(*seen, strict=True)
    assert {"mkdir", "fsync", "rename", "replace", "file_digest"} <= set(names)
    assert set(found) == {start, 2}
    assert found[: found.index(2)] == (start,) * found.index(2)
    assert set(found[found.index(2) :]) == {2}


@pytest.fixture
def root(tmp_path):
    Toy(1).save(tmp_path)
    Toy(2).save(tmp_path)
    return tmp_path


DAMAGE = {
    "one bit flipped": lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:],
    "last byte flipped": lambda data: data[:-1] + bytes([data[-1] ^ 128]),
    "one byte short": lambda data: data[:-1],
    "half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "longer": lambda data: data + b"\n",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_any_file_is_found_and_the_file_named(root, damage):
    for path in sorted((root / "iter_0000002").iterdir()):
        data = path.read_bytes()
        path.write_bytes(DAMAGE[damage](data))
        assert path.name in refused(path.parent)
        path.write_bytes(data)
    assert load_newest(root) == 2


def test_a_missing_file_is_named(root):
    for path in sorted((root / "iter_0000002").iterdir()):
        path.rename(root / "away")
        assert path.name in refused(path.parent)
        (root / "away").rename(path)


def test_no_bit_of_the_manifest_can_change_unseen(root):
    path = root / "iter_0000002" / commit.MANIFEST
    data = path.read_bytes()
    for n in range(0, 8 * len(data), 1 if os.environ.get("MEGAPIPE_NIGHTLY") else 3):  # of each byte two or three
        path.write_bytes(data[: n // 8] + bytes([data[n // 8] ^ 1 << n % 8]) + data[n // 8 + 1 :])
        with pytest.raises(CheckpointError):
            commit.verify(path.parent, files := commit.read_manifest(path.parent), files)


def test_files_of_two_checkpoints_cannot_be_mixed(root):
    old, new = root / "iter_0000001", root / "iter_0000002"
    for path in sorted(new.iterdir()):
        data = path.read_bytes()
        shutil.copy(old / path.name, path)
        assert str(path) in refused(new)
        path.write_bytes(data)
    shutil.rmtree(new)
    old.rename(new)
    assert refused(new) == (
        f"{new / 'manifest.json'} belongs to iteration 1; the folder was renamed or its files were mixed"
    )


def test_a_shard_from_elsewhere_is_not_read(root):
    folder = root / "iter_0000002"
    shutil.copy(next(folder.glob("*.safetensors")), folder / "shard-00002-model-00001-of-00001.safetensors")
    assert "shard-00002-model-00001-of-00001.safetensors is not in manifest.json" in refused(folder)


def test_a_link_is_not_followed(root):
    folder = root / "iter_0000002"
    (folder / "state.json").rename(root / "state.json")
    (folder / "state.json").symlink_to(root / "state.json")
    assert refused(folder) == f"{folder / 'state.json'} is not a plain file; links are not followed"


def test_a_manifest_that_cannot_be_read_is_told_with_the_systems_reason(root):
    path = root / "iter_0000002" / commit.MANIFEST
    path.unlink()
    path.mkdir()
    assert refused(path.parent) == f"{path}: Is a directory"


@pytest.mark.parametrize("name", ["../iter_0000001/state.json", "/etc/hostname", "a/b", "..", ""])
def test_the_manifest_names_files_of_its_own_folder_only(root, name):
    path = root / "iter_0000002" / commit.MANIFEST
    content = json.loads(path.read_text())
    content["files"][name] = content["files"].pop("state.json")
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    assert refused(path.parent) == f"{path}: {name!r} is not the name of a file in it"


def test_a_newer_format_is_named(root):
    path = root / "iter_0000002" / commit.MANIFEST
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    assert refused(path.parent) == f"{path.parent} has format 2, newer than 1; update megapipe"


@pytest.mark.parametrize("text", ["", "x", "release", "-1", "2 1", "1.5", "9" * 30, "\x00\x00"])
def test_a_garbled_pointer_never_starts_from_scratch(root, text):
    (root / commit.POINTER).write_text(text)
    with pytest.raises(CheckpointError) as caught:
        commit.newest(root)
    assert str(caught.value).startswith(f"{root / commit.POINTER} holds ")
    assert str(caught.value).endswith("not an iteration. Choose one with --ckpt-step: 1, 2")


def test_a_pointer_to_nowhere_is_an_error(root):
    (root / commit.POINTER).write_text("7\n")
    with pytest.raises(CheckpointError, match="names iteration 7, but there is no iter_0000007"):
        commit.newest(root)


def test_a_checkpoint_is_never_overwritten(root):
    before = (root / "iter_0000002" / "manifest.json").stat()
    with pytest.raises(CheckpointError) as caught:
        Toy(2).save(root)
    assert str(caught.value) == (
        f"--save {root} has checkpoints of iterations 2 already, and this run starts at 1; a checkpoint is never "
        f"overwritten. Continue with --load {root} without --ckpt-step, or use another folder: --save {root}-from-1"
    )
    assert (root / "iter_0000002" / "manifest.json").stat() == before


def test_no_room_on_the_disk_leaves_the_previous_checkpoint(root, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        Toy(3).save(root)
    assert sorted(os.listdir(root)) == ["iter_0000001", "iter_0000002", commit.POINTER]
    monkeypatch.undo()
    assert load_newest(root) == 2


def test_a_rank_reads_back_what_it_wrote_whatever_a_listing_of_the_folder_shows(tmp_path, monkeypatch):
    """One client's listing of a shared folder lacked a shard: nobody hashed it, and the load refused the checkpoint."""
    monkeypatch.setattr(commit.Path, "iterdir", lambda self: iter(()))
    Toy(1).save(tmp_path)
    monkeypatch.undo()
    assert load_newest(tmp_path) == 1


def test_a_shard_that_no_rank_has_read_back_is_not_committed(tmp_path, monkeypatch):
    whole = commit.digest
    monkeypatch.setattr(commit, "digest", lambda folder, names: whole(folder, [n for n in names if n == "state.json"]))
    with pytest.raises(CheckpointError, match=r"has shards that no rank has read back: shard-00001-.*\. Not saved"):
        Toy(1).save(tmp_path)
    assert os.listdir(tmp_path) == []


def test_every_file_is_synced_after_it_is_written(tmp_path, monkeypatch):
    """torch syncs a shard before its bytes have left the buffer."""
    synced, real = {}, os.fsync

    def fsync(handle):
        real(handle)
        synced[os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))] = os.fstat(handle).st_size

    monkeypatch.setattr(os, "fsync", fsync)
    Toy(1).save(tmp_path)
    for path in (tmp_path / "iter_0000001").iterdir():
        assert synced[path.name] == path.stat().st_size > 0


def test_a_complete_checkpoint_stays_whatever_the_pointer_says(root):
    """The pointer moved back by hand is Megatron's way to roll back; the later checkpoints were deleted one by one."""
    (root / commit.POINTER).write_text("1\n")
    state = (root / "iter_0000002" / "state.json").read_text()
    Toy(2).save(root)
    assert load_newest(root) == 2
    (kept,) = root.glob("iter_0000002.old-*")
    commit.clear(root)
    assert (kept / "state.json").read_text() == state
    assert commit.iterations_in(root) == [1, 2]


def test_a_save_removes_no_folder_of_another(root):
    other = commit.begin(root, 3)
    commit.begin(root, 4)
    assert other.is_dir()


def test_a_leftover_that_cannot_be_removed_stays_and_stops_nothing(root, monkeypatch):
    left = commit.begin(root, 3)

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied", str(left))

    monkeypatch.setattr(os, "rmdir", refuse)
    commit.clear(root)
    assert left.is_dir()
    monkeypatch.undo()
    Toy(3).save(root)
    assert load_newest(root) == 3


def test_a_folder_that_cannot_be_written_to_is_refused_before_training(root, monkeypatch):
    def refuse(prefix, dir):
        raise PermissionError(13, "Permission denied", f"{dir}/{prefix}")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(CheckpointError, match=f"{root}/iter_0.tmp-: Permission denied"):
        check_save(root, 2, ProcessMesh.single())


def test_a_full_disk_is_told_with_folder_and_bytes(root, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megapipe.checkpoint.shards.save", full)
    with pytest.raises(CheckpointError) as caught:
        Toy(3).save(root)
    assert re.fullmatch(
        rf"{root}/iter_0000003\.tmp-\w+: No space left on device \(0 bytes are written in iter_0000003\.tmp-\w+, "
        r"[\d,]+ bytes are free\)",
        str(caught.value),
    )


def test_a_checkpoint_that_will_not_fit_is_refused_before_a_byte_is_written(root, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    need = sum(path.stat().st_size for path in (root / "iter_0000002").iterdir())
    with pytest.raises(CheckpointError) as caught:
        Toy(3).save(root)
    assert str(caught.value) == (
        f"--save {root}: a checkpoint takes {need / 2**30:.4g} GiB, and 9.313e-07 are free. Make room, or give "
        "a folder on a larger disk. Older checkpoints of iterations 1 are there; --save-keep-last 2 removes such "
        "ones after each save."
    )
    with pytest.raises(CheckpointError, match="a checkpoint takes"):
        check_save(root, 2, ProcessMesh.single())
    assert sorted(os.listdir(root)) == ["iter_0000001", "iter_0000002", commit.POINTER]
    with pytest.raises(CheckpointError, match=r"a checkpoint takes 4\.657e-06 GiB, and 9\.313e-07 are free"):
        check_save(root.parent / "new", 0, ProcessMesh.single(), 5000)
