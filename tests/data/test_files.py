"""Output files: complete or not there, and what is no file stays what it is."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megapipe.data.files import complete_file, file_problems, folder_problems


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """As root, `--output /dev/null` made a file of the machine's /dev/null."""
    pipe, read = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    with complete_file(pipe) as file:
        file.write(b"all of it")
    reader.join(10)
    assert read == [b"all of it"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to("target")
    with complete_file(link) as file:
        file.write(b"new")
        assert target.read_bytes() == b"old"
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


@pytest.mark.parametrize("problems", [file_problems, folder_problems])
def test_what_would_lie_below_a_file_is_refused(tmp_path: Path, problems: Callable[..., Iterator[str]]) -> None:
    (tmp_path / "file").touch()
    (text,) = problems({"--save": tmp_path / "file" / "below" / "it"})
    assert f"{tmp_path}/file" in text
    assert not list(problems({"--save": tmp_path / "below" / "it", "--load": None}))
