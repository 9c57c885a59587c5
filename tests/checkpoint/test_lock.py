"""Two runs never share a folder; what a dead one leaves is taken over."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest
from programs import FORKED

from megapipe.checkpoint.lock import NAME, Lock, refuse_others
from megapipe.errors import CheckpointError


def own(folder, has_it) -> None:
    Lock(folder)
    has_it.set()
    time.sleep(60)


def test_a_folder_of_a_living_run_is_refused_and_that_of_a_killed_one_taken_at_once(tmp_path):
    has_it = FORKED.Event()
    owner = FORKED.Process(target=own, args=(tmp_path, has_it))
    owner.start()
    assert has_it.wait(60)
    try:
        with pytest.raises(CheckpointError, match=rf"belongs to another run: process {owner.pid} on \S+, since 20"):
            Lock(tmp_path)
        os.kill(owner.pid, signal.SIGSTOP)  # Ctrl-Z is not death
        with pytest.raises(CheckpointError):
            Lock(tmp_path)
    finally:
        owner.kill()
        owner.join()
    started = time.monotonic()
    mine = Lock(tmp_path)
    assert time.monotonic() - started < 20  # not the half minute that one on another machine is given
    assert mine.took_over.startswith(f"--save {tmp_path} belonged to a run that is gone: process {owner.pid} on ")
    mine.release()
    assert os.listdir(tmp_path) == []


def elsewhere(folder) -> None:
    """The lock that is there is another machine's."""
    owner = json.loads((folder / NAME).read_text())
    (folder / NAME).write_text(json.dumps(owner | {"system": "another", "host": "node7"}))


def test_a_run_on_another_machine_lives_as_long_as_its_file_is_touched(tmp_path):
    theirs = Lock(tmp_path, beat_s=0.05)
    elsewhere(tmp_path)
    with pytest.raises(CheckpointError, match="on node7"):
        Lock(tmp_path, timeout_s=5)
    theirs._over.set()
    theirs._thread.join()
    with pytest.raises(CheckpointError, match=rf"is not this run's, but process {os.getpid()} on node7, since .*'s, "):
        refuse_others(tmp_path)
    mine = Lock(tmp_path, timeout_s=0.2)
    assert "that is gone" in mine.took_over
    refuse_others(tmp_path)
    theirs.release()
    assert (tmp_path / NAME).exists()
    mine.release()
    assert os.listdir(tmp_path) == []


def test_a_number_that_another_process_has_now_is_no_sign_of_life(tmp_path):
    Lock(tmp_path, beat_s=60)._over.set()
    owner = json.loads((tmp_path / NAME).read_text())
    (tmp_path / NAME).write_text(json.dumps(owner | {"born": "1"}))
    Lock(tmp_path).release()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}'])
def test_a_damaged_file_is_a_dead_owners(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    Lock(tmp_path, timeout_s=0.1).release()


@pytest.fixture(params=["hard links", "none"])
def links(request, monkeypatch):
    def refuse(source, target):
        raise PermissionError(1, "Operation not permitted", str(source), None, str(target))  # vfat's answer

    if request.param == "none":
        monkeypatch.setattr(os, "link", refuse)


def test_a_folder_without_hard_links_has_one_owner_too(tmp_path, links):
    mine = Lock(tmp_path)
    with pytest.raises(CheckpointError, match="belongs to another run"):
        Lock(tmp_path)
    mine.release()
    assert os.listdir(tmp_path) == []


def test_a_folder_that_takes_no_file_at_all_is_the_error_that_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "Operation not permitted")))
    with pytest.raises(PermissionError, match="Permission denied"):
        Lock(tmp_path)


def test_of_many_that_find_a_dead_owner_one_gets_the_folder(tmp_path, links):
    Lock(tmp_path, beat_s=60)._over.set()
    owner = json.loads((tmp_path / NAME).read_text())
    (tmp_path / NAME).write_text(json.dumps(owner | {"born": "1"}))
    got, refused = [], []

    def take() -> None:
        try:
            got.append(Lock(tmp_path))
        except CheckpointError as error:
            refused.append(error)

    threads = [threading.Thread(target=take) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 15)
    got[0].release()
    assert os.listdir(tmp_path) == []
