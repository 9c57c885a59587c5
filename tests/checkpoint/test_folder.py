"""What lies on the disk, byte by byte: another version of the package, or a script, reads these names and this text."""

from __future__ import annotations

import os
import re
import shutil
from types import SimpleNamespace

import pytest

from megapipe.checkpoint import commit, lock
from megapipe.errors import CheckpointError

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1
MANIFEST = f"""{{
 "files": {{
  "x.bin": {{
   "bytes": 3,
   "sha256": "{ABC}"
  }}
 }},
 "format": 1,
 "iteration": 7
}}
"""


def save(root, iteration=7, content=b"abc"):
    folder = commit.begin(root, iteration)
    (folder / "x.bin").write_bytes(content)
    return commit.commit(folder, iteration, commit.digest(folder, ["x.bin"]))


def by_hand(root, iteration, manifest=MANIFEST):
    folder = root / f"iter_{iteration:07}"
    folder.mkdir(parents=True)
    (folder / "x.bin").write_bytes(b"abc")
    (folder / "manifest.json").write_text(manifest)
    return folder


def said(act):
    with pytest.raises(CheckpointError) as caught:
        act()
    return str(caught.value)


def test_a_checkpoint_is_format_1(tmp_path):
    root = tmp_path / "not" / "there" / "yet"
    final = save(root)
    assert final == root / "iter_0000007"
    assert sorted(path.name for path in final.iterdir()) == ["manifest.json", "x.bin"]
    assert (final / "manifest.json").read_text() == MANIFEST
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "7\n"
    assert sorted(os.listdir(root)) == ["iter_0000007", "latest_checkpointed_iteration.txt"]


def test_one_made_by_hand_is_read(tmp_path):
    folder = by_hand(tmp_path, 7)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7 \n")
    assert commit.newest(tmp_path) == commit.iteration_of(folder) == 7
    files = commit.read_manifest(folder)
    assert files == {"x.bin": {"bytes": 3, "sha256": ABC}}
    commit.verify(folder, files, files)
    (folder / "x.bin").write_bytes(b"abcd")
    choose = "Load another iteration with --ckpt-step"
    assert said(lambda: commit.verify(folder, files, files)) == f"{folder}/x.bin has 4 bytes, not 3. {choose}"
    (folder / "x.bin").write_bytes(b"abd")
    assert said(lambda: commit.verify(folder, files, files)) == (
        f"{folder}/x.bin is damaged: its SHA-256 differs from manifest.json. {choose}"
    )
    (folder / "x.bin").unlink()
    assert said(lambda: commit.verify(folder, files, files)) == f"{folder}/x.bin is missing. {choose}"
    commit.verify(folder, files, [])


@pytest.mark.parametrize(
    "old, new",
    [('"iteration": 7', '"iteration": "7"'), ('"bytes": 3,\n', ""), ('"bytes": 3', '"bytes": 3,\n   "more": 1'),
     ('"files"', '"filed"'), ('"format": 1,\n ', ""), ("\n}\n", "\n}"), (" ", "  ")],
)  # fmt: skip
def test_a_manifest_that_we_did_not_write_is_not_believed(tmp_path, old, new):
    folder = by_hand(tmp_path, 7, MANIFEST.replace(old, new))
    assert said(lambda: commit.read_manifest(folder)).startswith(f"{folder}/manifest.json is damaged. Load another")


def test_the_order_on_the_disk_names_nothing_before_it_is_there(tmp_path, monkeypatch):
    """fsync of files, of the folder, one rename, fsync of the root, the pointer's file, its rename, fsync again."""
    events, real = [], {name: getattr(os, name) for name in ("fsync", "rename", "replace")}
    save(tmp_path, 6)

    def name_of(path):
        return re.sub("[.]tmp-[0-9a-f]{8}$", ".tmp", os.path.basename(path))

    def fsync(handle):
        path = os.readlink(f"/proc/self/fd/{handle}")
        events.append(f"fsync {name_of(path)}" + (f" {os.fstat(handle).st_size}" if os.path.isfile(path) else ""))
        real["fsync"](handle)

    def moved(how):
        def move(source, target):
            events.append(f"{how} {name_of(source)} {name_of(target)}")
            real[how](source, target)

        return move

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fsync", fsync)
    for how in ("rename", "replace"):
        monkeypatch.setattr(os, how, moved(how))
    save(tmp_path)
    pointer = "latest_checkpointed_iteration.txt"
    assert events == [
        "fsync x.bin 3",
        f"fsync manifest.json {len(MANIFEST)}",
        "fsync iter_0000007.tmp",
        "rename iter_0000007.tmp iter_0000007",
        f"fsync {tmp_path.name}",
        f"fsync {pointer}.tmp 2",
        f"replace {pointer}.tmp {pointer}",
        f"fsync {tmp_path.name}",
    ]
    assert len(os.listdir("/proc/self/fd")) == before, "no handle stays open"


@pytest.mark.parametrize("first", ["listing", "saving"])
def test_the_newest_is_found_while_a_save_ends_and_removes_the_one_before(first, tmp_path, monkeypatch):
    """A program that read the folder of a run was told: names iteration 7, but there is no iter_0000007."""
    before = save(tmp_path, 6)
    real, saved = os.listdir, []

    def listdir(path):
        found = real(path)
        if not saved:
            saved.append(7)
            save(tmp_path, 7)
            shutil.rmtree(before)
        return found if first == "listing" else real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    assert commit.newest(tmp_path) == 7


def test_a_save_begins_beside_what_is_there(tmp_path):
    """The pointer was moved back by hand, which is Megatron's way to roll back."""
    for iteration in (6, 7):
        by_hand(tmp_path, iteration)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6")
    folder = commit.begin(tmp_path, 7)
    names = sorted(path.name for path in tmp_path.glob("iter_0000007*"))
    assert re.fullmatch("iter_0000007[.]old-[0-9a-f]{8}", names[0])
    assert names[1:] == [folder.name]
    assert re.fullmatch("iter_0000007[.]tmp-[0-9a-f]{8}", folder.name)


def test_a_save_asks_whose_the_folder_is_before_it_touches_it(tmp_path, monkeypatch):
    by_hand(tmp_path, 7)
    before = sorted(os.listdir(tmp_path))

    def taken(root):
        raise CheckpointError(f"{root} is another's")

    monkeypatch.setattr(lock, "refuse_others", taken)
    assert said(lambda: commit.begin(tmp_path, 7)) == f"{tmp_path} is another's"
    assert sorted(os.listdir(tmp_path)) == before


def test_what_interrupted_saves_have_left_is_removed_by_its_name(tmp_path):
    by_hand(tmp_path, 1)
    for name in ("iter_0000002.tmp-0a0a0a0a", "iter_0000003.old-0a0a0a0a", "iter_0000004.tmp-0a0a0a0a.failed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("")
    for name in ("iter_0000002.tmp-0a0a0a0a.failed", "iter_0000002.tmp-file"):
        (tmp_path / name).write_text("")
    assert commit.clear(tmp_path) == [
        "iter_0000002.tmp-0a0a0a0a",
        "iter_0000002.tmp-0a0a0a0a.failed",
        "iter_0000004.tmp-0a0a0a0a.failed",
    ]
    assert sorted(os.listdir(tmp_path)) == ["iter_0000001", "iter_0000002.tmp-file", "iter_0000003.old-0a0a0a0a"]


def test_room_is_needed_for_as_much_as_the_newest_takes(tmp_path, monkeypatch):
    for iteration, size in ((1, 500), (2, 50), (3, 3)):
        save(tmp_path, iteration, b"x" * size)
    newest = sum(path.stat().st_size for path in (tmp_path / "iter_0000003").iterdir())
    free = SimpleNamespace(free=newest)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    commit.refuse_without_room(tmp_path)
    commit.refuse_without_room(tmp_path, newest)
    free.free -= 1
    assert f"a checkpoint takes {newest / 2**30:.4g} GiB, and " in said(lambda: commit.begin(tmp_path, 4))
    assert "keep-last" in said(lambda: commit.begin(tmp_path, 4))
    # Nothing older would make room there.
    assert said(lambda: commit.refuse_without_room(tmp_path / "none" / "yet", 1 << 50, tmp_path)).endswith(
        "Make room, or give a folder on a larger disk."
    )
    free.free = 0
    commit.refuse_without_room(tmp_path.parent / f"{tmp_path.name}-empty")


@pytest.mark.parametrize("name", ["common.pt", "metadata.json", ".metadata", "mp_rank_00"])
def test_a_folder_of_megatron_lm_is_known_by_any_of_its_files(tmp_path, name):
    folder = tmp_path / "iter_0000005"
    folder.mkdir()
    assert "it is no complete checkpoint" in said(lambda: commit.read_manifest(folder))
    (folder / name).touch()
    assert said(lambda: commit.read_manifest(folder)).startswith(f"{folder} is a checkpoint of Megatron-LM, and ")


def test_megatrons_release_is_known_by_its_pointer_and_its_folder(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    nothing = "There is no checkpoint in that folder"
    assert said(lambda: commit.newest(tmp_path)).endswith(f" holds b'release\\n', not an iteration. {nothing}")
    (tmp_path / "release").mkdir()
    assert said(lambda: commit.newest(tmp_path)).startswith(f"{tmp_path}/release is a checkpoint of Megatron-LM, and ")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("x" * 99)
    assert f" holds b'{'x' * 40}', not" in said(lambda: commit.newest(tmp_path)), "of a long file its beginning"


def test_one_checkpoint_is_no_folder_of_checkpoints(tmp_path):
    folder = by_hand(tmp_path, 7)
    assert said(lambda: commit.newest(folder)).endswith(f"choose with --ckpt-step: --load {tmp_path} --ckpt-step 7")
    folder.rename(tmp_path / "best")
    assert said(lambda: commit.newest(tmp_path / "best")) == (
        f"{tmp_path}/best is one checkpoint, and its folder was renamed; it was called iter_ and seven digits"
    )


def test_a_run_meets_no_later_checkpoint_of_another(tmp_path):
    """Those beyond the pointer are of saves that were cut off, or of a run that was rolled back by hand."""
    for iteration in (2, 10, 30):
        by_hand(tmp_path, iteration)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    assert commit.iterations_in(tmp_path) == [2, 10, 30]
    commit.refuse_to_overwrite(tmp_path, 10)
    assert "has checkpoints of iterations 10 already, and this run starts at 9;" in said(
        lambda: commit.refuse_to_overwrite(tmp_path, 9)
    )
    assert "iterations 2, 10 already" in said(lambda: commit.refuse_to_overwrite(tmp_path, 0))
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert commit.newest(tmp_path) == 30
    commit.require(tmp_path, 2)
    assert said(lambda: commit.require(tmp_path, 3)).endswith("Choose one with --ckpt-step: 2, 10, 30")
