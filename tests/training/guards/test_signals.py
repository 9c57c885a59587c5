"""A run that is told to leave saves first, on all ranks, and ends well."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from programs import Program, start_ranks

from megapipe.checkpoint import commit
from megapipe.config import CheckpointConfig, Config, GuardConfig, LogConfig
from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.watch import watch
from megapipe.pipeline_parallel.watch.watch import RELAY_S
from megapipe.training.guards.process import REPEATED, ExitSignal, Stopping, triggered

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--mock-data --split 1,0,99 --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0 --micro-batch-size 2 "
    "--train-iters 10000 --lr 1e-3 --log-interval 1 --save-interval 10000 --exit-signal-handler --eval-iters 0"
)


def wait_for(text: str, program: Program) -> None:
    until = time.monotonic() + 60
    while text not in (program.log.read_text() if program.log.exists() else ""):
        assert time.monotonic() < until, program.log.read_text()
        time.sleep(0.05)


def test_sigterm_to_one_of_two_ranks_saves_and_ends_both_with_75(tmp_path):
    (logs := tmp_path / "logs").mkdir()
    first, second = start_ranks(2, ["pretrain_gpt.py", *FLAGS.split(), "--save", tmp_path / "checkpoints"], logs)
    try:
        wait_for("iteration        1/", first)
        os.kill(second.pid, signal.SIGTERM)
        assert (first.wait(), second.wait()) == (75, 75)
    finally:
        first.kill()
        second.kill()
    output = first.log.read_text()
    assert "[exiting program after receiving SIGTERM]" in output
    last = int((tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert f"saving checkpoint at iteration {last:7d}" in output
    assert f"iteration {last + 1:8d}/" not in output


SLOW = """
import time
from megapipe.checkpoint import commit
real = commit.commit
commit.commit = lambda *given: (time.sleep(1), real(*given))[1]
import runpy
runpy.run_path("pretrain_gpt.py", run_name="__main__")
"""


# scripts/nightly.sh: Ctrl-C too, whose second one is told apart below.
@pytest.mark.parametrize("first", [signal.SIGTERM, *[signal.SIGINT] * bool(os.environ.get("MEGAPIPE_NIGHTLY"))])
def test_a_save_outlives_the_signal_that_torchrun_passes_on(tmp_path, first):
    """A scheduler, or a terminal, signals every process; torchrun then sends its ranks a second one."""
    (tmp_path / "slow.py").write_text(SLOW)
    flags = [*FLAGS.split(), "--save", tmp_path / "checkpoints"]
    torchrun = Program(
        ["-m", "torch.distributed.run", "--nproc-per-node", "1", tmp_path / "slow.py", *flags], tmp_path / "log"
    )
    try:
        wait_for("iteration        1/", torchrun)
        (rank,) = map(int, Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split())
        os.kill(rank, first)
        wait_for("saving checkpoint at iteration", torchrun)
        os.kill(torchrun.pid, first)
        torchrun.wait()
    finally:
        torchrun.kill()
    output = torchrun.log.read_text()
    assert f"[exiting program after receiving {first.name}]" in output
    assert "successfully saved checkpoint" in output
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir())[1:] == [commit.POINTER]
    assert commit.newest(tmp_path / "checkpoints") is not None


@pytest.fixture
def heard(monkeypatch):
    """What gets through to the handlers that stood before."""
    seen: list[int] = []
    numbers = (*REPEATED, signal.SIGINT)
    before = {number: signal.signal(number, lambda number, frame: seen.append(number)) for number in numbers}
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_no_signal_of_a_launcher_disturbs_a_run_that_was_told_to_stop(heard, name):
    """With --exit-signal NAME."""
    listener = ExitSignal(name)
    signal.raise_signal(signal.Signals[name])
    for number in REPEATED:
        signal.raise_signal(number)
    assert (signal.Signals(listener.number).name, heard) == (name, [])
    listener.close()
    for number in REPEATED:  # still on their way while the process ends
        signal.raise_signal(number)
    assert heard == []


def test_the_first_ctrl_c_saves_and_the_second_ends_also_where_the_rank_hangs(tmp_path):
    (tmp_path / "hangs.py").write_text(SLOW.replace("time.sleep(1)", "[0 for _ in iter(int, 1)]"))
    flags = [*FLAGS.split(), "--save", tmp_path / "checkpoints"]
    program = Program([tmp_path / "hangs.py", *flags], tmp_path / "log")
    try:
        wait_for("iteration        1/", program)
        os.kill(program.pid, signal.SIGINT)
        wait_for("saving checkpoint at iteration", program)
        os.kill(program.pid, signal.SIGINT)
        assert program.wait(20) == 130
    finally:
        program.kill()
    output = program.log.read_text()
    assert "megapipe: Ctrl-C: saves and ends after this iteration. A second one ends it at once\n" in output
    assert "[exiting program after receiving SIGINT]" in output
    assert "megapipe: interrupted " in output


@pytest.mark.parametrize(
    "launcher, after_s, ends", [(None, 0.1, True), (7, RELAY_S - 1, False), (7, RELAY_S + 1, True)]
)
def test_what_torchrun_passes_on_of_a_ctrl_c_is_no_second_one(heard, monkeypatch, launcher, after_s, ends):
    monkeypatch.setattr(watch, "LAUNCHER", launcher)
    listener, watching, now = ExitSignal("SIGTERM"), watch.Watch(ProcessMesh.single()), time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert not watching._interrupted()
    monkeypatch.setattr(time, "monotonic", lambda: now + after_s)
    assert watching._interrupted() == ends
    listener.close()
    assert not watching._interrupted()  # a handler of the program's own is its own


def test_two_ctrl_cs_that_a_busy_watch_hears_at_once_are_two(heard, monkeypatch):
    monkeypatch.setattr(watch, "LAUNCHER", None)
    for presses, ends in ((1, []), (2, ["interrupted"])):
        listener, watching, left = ExitSignal("SIGTERM"), watch.Watch(ProcessMesh.single()), []
        monkeypatch.setattr(watching, "_leave", lambda why, number, left=left: left.append(why))
        watching._look(bytes([signal.SIGINT] * presses))
        listener.close()
        assert left == ends


def test_what_was_not_told_to_stop_dies_of_signals_as_before(heard):
    listener = ExitSignal("SIGTERM")
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.raise_signal(number)
    assert (listener.received, heard) == (False, [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
    listener.close()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert heard[3:] == [signal.SIGTERM, signal.SIGINT]


@pytest.mark.parametrize("given, text", [("exit", "finding exit in --trigger-path"), ("save", None), ("", None)])
def test_a_trigger_is_obeyed_once_and_exit_says_that_the_run_can_go_on(tmp_path, monkeypatch, given, text):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if given:
        (tmp_path / given).touch()
    config = Config(checkpoint=CheckpointConfig(trigger_path=str(tmp_path)), log=LogConfig(log_interval=1))
    mesh = ProcessMesh.single()
    stopping, asked = Stopping(GuardConfig(), mesh, 0.0), triggered(config, mesh, 1)
    assert asked == [given] * bool(given)
    reason = stopping.reason(1, asked)
    assert reason == (text and f"[exiting program after {text}]")
    assert stopping.exit_code == (75 if text else 0)
    assert [*tmp_path.iterdir()] == []


def test_a_trigger_that_cannot_be_removed_is_told(tmp_path, monkeypatch, capsys):
    (tmp_path / "exit").touch()

    def refuse(path, missing_ok):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    config = Config(checkpoint=CheckpointConfig(trigger_path=str(tmp_path)), log=LogConfig(log_interval=1))
    assert triggered(config, ProcessMesh.single(), 1) == ["exit"]
    text = f"WARNING: {tmp_path}/exit of --trigger-path cannot be removed: Permission denied; it will be obeyed again"
    assert text in capsys.readouterr().out
