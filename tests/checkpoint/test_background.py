"""--async-save: the same bits as a save that waits, never a mixture, and no failure in silence."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Timer

import pytest
import short_run
import torch
from killed_saves import Toy, load_newest
from programs import FORKED, ROOT
from safetensors.torch import load_file
from tiny import STYLES

from megapipe.checkpoint import commit
from megapipe.checkpoint.background import Background
from megapipe.checkpoint.writer import SIGNALS
from megapipe.config import CheckpointConfig, LogConfig
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import CheckpointError
from megapipe.training.hooks import NONE, Callback, Hooks


def begun(folder: Path, iterations: int = 6, hooks: Hooks = NONE, **flags):
    """A run that is ready for its first step."""
    base = short_run.config(STYLES["gpt2"])
    batch = replace(base.batch, train_iters=iterations)
    checkpoint = CheckpointConfig(save=str(folder), save_interval=2, **flags)
    asked = replace(base, batch=batch, checkpoint=checkpoint, log=LogConfig(log_interval=1))
    return short_run.run_of(ProcessMesh.single(), asked, hooks)


def run(folder: Path, iterations: int = 6, **flags):
    done = begun(folder, iterations, **flags)
    done.train()
    return done


def tensors(folder: Path) -> dict[str, list[float]]:
    """Of all files; a file's order of tensors is not the same in every save."""
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: x.flatten().tolist() for file in files for name, x in file.items()}


def test_checkpoints_have_the_bits_of_those_that_wait_and_resume_is_exact(tmp_path, capsys):
    run(tmp_path / "waits")
    run(tmp_path / "async", async_save=True)
    out = capsys.readouterr().out
    for n in (2, 4, 6):
        name = f"iter_{n:07d}"
        assert tensors(tmp_path / "async" / name) == tensors(tmp_path / "waits" / name)
        assert out.count(f"  successfully saved checkpoint from iteration {n:7d} to") == 2
        commit.verify(tmp_path / "async" / name, files := commit.read_manifest(tmp_path / "async" / name), files)
    assert not [name for name in os.listdir(tmp_path / "async") if "tmp" in name]
    run(tmp_path / "again", load=str(tmp_path / "async"), ckpt_step=4)
    assert tensors(tmp_path / "again" / "iter_0000006") == tensors(tmp_path / "waits" / "iter_0000006")


class Marks(Callback):
    """Prints where each step begins, and lets none end before the save under way has."""

    def before_step(self, run) -> None:
        print(f"step {run.progress.iteration + 1} begins")

    def after_step(self, run, result) -> None:
        self.background.poll(wait=True)


def test_a_save_that_ends_during_a_step_is_said_after_that_step(tmp_path, capsys):
    """Not at the next save, which may be hours later."""
    marks = Marks()
    training = begun(tmp_path, 8, Hooks(callbacks=(marks,)), async_save=True)
    marks.background = training.saving._background
    training.train()
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for save in (4, 6):
        done = said.index(f"successfully saved checkpoint from iteration {save} to {tmp_path}")
        assert said.index(f"step {save + 1} begins") < done < said.index(f"step {save + 2} begins")


KILLS = 20 if os.environ.get("MEGAPIPE_NIGHTLY") else 8


def save_for_ever(root: Path) -> None:
    """Save iteration after iteration in the background, each as soon as the one before is complete."""
    torch.set_num_threads(1)
    toy, background = Toy(1), Background(ProcessMesh.single())
    while True:
        toy.save(root, background)
        background.finish()
        toy = Toy(toy.optimizer.steps + 1)


def kill_at_random(root: Path, outcomes) -> None:
    """A process without threads forks the ones that die: while a writer starts, or while it saves."""
    draw = random.Random(15)
    # PR_SET_CHILD_SUBREAPER: the writer of a killed process becomes a child of this one, which waits for its end.
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    for point in range(KILLS):
        folder = root / str(point)
        folder.mkdir()
        if (pid := os.fork()) == 0:
            save_for_ever(folder)
        while (commit.newest(folder) or 0) <= point % 3:  # the first is of no writer
            time.sleep(0.001)
        time.sleep(draw.random() * 0.5)
        os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while True:
                os.wait()
        newest = load_newest(folder)
        commit.clear(folder)
        left = [name for name in os.listdir(folder) if ".tmp-" in name]
        outcomes.put((newest, commit.iterations_in(folder)[-1], left))


def test_a_run_killed_at_random_points_leaves_its_newest_complete_checkpoint(tmp_path):
    outcomes = FORKED.Queue()
    process = FORKED.Process(target=kill_at_random, args=(tmp_path, outcomes))
    process.start()
    seen = [outcomes.get(timeout=120) for _ in range(KILLS)]
    process.join(60)
    assert process.exitcode == 0
    for newest, there, left in seen:
        assert there - newest in (0, 1)  # renamed, and killed before the pointer
        assert left == []
    assert all(newest > point % 3 for point, (newest, _, _) in enumerate(seen))


@pytest.fixture
def saved(tmp_path):
    background = Background(ProcessMesh.single())
    Toy(1).save(tmp_path, background)
    yield background
    background.close()


@pytest.mark.parametrize(
    ("number", "became"), [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "has not moved for 1 s: it is stopped")]
)
def test_a_writer_that_dies_or_stops_is_an_error_and_the_next_save_has_a_new_one(tmp_path, saved, number, became):
    saved._mesh.position.limit_s = 1.0
    os.kill(saved._writer.pid, signal.SIGSTOP)
    Toy(2).save(tmp_path, saved)
    os.kill(saved._writer.pid, number)
    with pytest.raises(CheckpointError, match=f"iteration 2: the process that writes rank 0's part {became}"):
        saved.finish()
    assert sorted(os.listdir(tmp_path)) == ["iter_0000001", commit.POINTER]
    saved._mesh.position.limit_s = 60.0
    Toy(3).save(tmp_path, saved)
    assert saved.finish() == 3
    saved._writer.kill()
    saved._writer.wait()  # while it has nothing to write
    Toy(4).save(tmp_path, saved)
    assert saved.finish() == load_newest(tmp_path) == 4


def test_a_save_may_take_longer_than_a_writer_may_be_silent(tmp_path, saved):
    saved._mesh.position.limit_s = 4.0  # a writer beside busy programs may be silent for a second
    saved._job = {"folder": str(commit.begin(tmp_path, 2)), "iteration": 2, "rank": 0, "ranks": 2}
    saved._job |= {"files": {}, "texts": {}, "keep": (None, None, ())}
    saved._writer.stdin.write(json.dumps(saved._job).encode() + b"\n")
    saved._writer.stdin.flush()
    late = Timer(5, (Path(saved._job["folder"]) / "rank-1.digests").write_text, ["{}"])  # the other rank takes its time
    late.start()
    assert saved.finish() == 2


def test_a_file_that_cannot_be_written_is_an_error_and_the_next_save_works(tmp_path, saved):
    assert Toy(2).save(tmp_path, saved) is None
    saved.finish()
    places = dict(saved._files)
    saved._files = {f"no/such/folder/{name}": place for name, place in places.items()}  # what cannot be written
    Toy(3).save(tmp_path, saved)
    with pytest.raises(CheckpointError, match=r"iteration 3: .*No such file"):
        saved.finish()
    saved._files = places
    Toy(4).save(tmp_path, saved)
    assert saved.finish() == 4
    assert load_newest(tmp_path) == 4


def test_the_tensors_may_change_while_they_are_written(tmp_path, saved):
    toy = Toy(2)
    toy.save(tmp_path, saved)
    with torch.no_grad():
        for parameter in toy.stage.parameters():
            parameter.fill_(99)
    saved.finish()
    assert load_newest(tmp_path) == 2


def test_a_writer_goes_on_writing_whatever_signal_its_step_gets(tmp_path, saved):
    for iteration, number in enumerate(SIGNALS, 2):
        Toy(iteration).save(tmp_path, saved)
        os.kill(saved._writer.pid, number)
        assert saved.finish() == iteration


def test_a_folder_that_is_gone_is_the_answer_of_poll_and_not_its_error(tmp_path, saved, monkeypatch):
    def refuse(path):
        raise OSError(122, "Disk quota exceeded", str(path))

    os.kill(saved._writer.pid, signal.SIGSTOP)
    Toy(2).save(tmp_path, saved)
    os.kill(saved._writer.pid, signal.SIGKILL)
    monkeypatch.setattr(Path, "touch", refuse)
    assert saved.poll(wait=True) == "the process that writes rank 0's part has ended"


def test_the_last_save_is_tried_after_one_that_failed_and_the_failure_is_told_once(tmp_path, monkeypatch, capsys):
    start = Background.start

    def killed(self, folder, iteration, *args):
        if iteration == 4:
            os.kill(self._writer.pid, signal.SIGSTOP)
        start(self, folder, iteration, *args)
        if iteration == 4:
            self._writer.kill()

    monkeypatch.setattr(Background, "start", killed)
    run(tmp_path, 5, async_save=True, save_failure="continue")
    assert commit.iterations_in(tmp_path) == [2, 5]
    assert capsys.readouterr().out.count("ALARM: CHECKPOINT NOT SAVED") == 1


def test_the_writer_runs_in_a_clone_that_is_not_installed_from_another_folder(tmp_path):
    """An environment of its own has torch by its path, and megapipe by the program's own alone."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    packages = Path(torch.__file__).parents[1]
    program = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests/support')!r}]\n"
        "from pathlib import Path\n"
        "from killed_saves import Toy\n"
        "from megapipe.checkpoint.background import Background\n"
        "from megapipe.distributed.mesh import ProcessMesh\n"
        "background = Background(ProcessMesh.single())\n"
        "for n in (1, 2):\n"
        "    Toy(n).save(Path('ck'), background)\n"
        "print(background.finish())\n"
        "background.close()\n"
    )
    # What .pth files name, such as an editable install, is not found by PYTHONPATH.
    env = os.environ | {"PYTHONPATH": str(packages)}
    done = subprocess.run(
        [tmp_path / "bare/bin/python", "-c", program],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("2\n"), done.stderr
