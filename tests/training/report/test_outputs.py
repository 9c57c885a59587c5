"""A log that cannot be written to costs one warning and never the run."""

from __future__ import annotations

import io
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megapipe.config import LogConfig
from megapipe.errors import DataError
from megapipe.flags.parse import stop
from megapipe.training.report.sinks import MetricsFile, TensorBoard
from megapipe.training.report.stdout import stdout_may_break

PROGRAM = """
import sys
from megapipe.training.report.stdout import stdout_may_break

@stdout_may_break()
def run():
    for n in range(3000):
        print(n, "x" * 100, flush=True)
    assert not sys.stdout.isatty()  # which the iteration line asks
    file = open("done", "w")
    print(file.fileno(), file=file)

run()
"""


def run(folder, **options) -> str:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=folder, env=env, stderr=subprocess.PIPE, text=True, **options
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "done").exists()
    return str(done.stderr)


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path):
    """`| head` and a dead ssh ended it with BrokenPipeError, nothing saved."""
    reader, writer = os.pipe()
    os.close(reader)
    assert run(tmp_path, stdout=writer) == "WARNING: no output from here on, standard output: [Errno 32] Broken pipe\n"
    os.close(writer)


def test_a_full_disk_under_the_log_does_not_end_the_run(tmp_path):
    with open("/dev/full", "w") as full:
        text = run(tmp_path, stdout=full)
    assert text == "WARNING: no output from here on, standard output: [Errno 28] No space left on device\n"


def test_an_output_that_is_closed_from_the_start_does_not_end_the_run(tmp_path):
    assert run(tmp_path, preexec_fn=lambda: os.close(1)) == ""


def test_no_file_of_a_run_gets_the_number_of_a_closed_stream(tmp_path):
    """A checkpoint opened after `2>&-` had number 2, and warnings would have been written into it."""
    run(tmp_path, preexec_fn=lambda: os.closerange(0, 3))
    assert int((tmp_path / "done").read_text()) > 2


def test_an_error_that_nobody_reads_has_its_exit_code(monkeypatch):
    with open("/dev/full", "wb", 0) as full:
        for stream in (None, io.TextIOWrapper(full, write_through=True)):
            monkeypatch.setattr("sys.stderr", stream)
            with pytest.raises(SystemExit) as caught:
                stop(DataError("no such file"))
            assert caught.value.code == 2


def test_a_full_disk_under_the_metrics_costs_one_warning(capsys):
    """Closing the file at the end of the run raised it once more, and the run ended with a traceback."""
    file = MetricsFile("/dev/full")
    for n in range(2):
        file.write({"iteration": n})
    file.close()
    warning = "WARNING: no metrics from here on, --metrics-file /dev/full: [Errno 28] No space left on device\n"
    assert capsys.readouterr().out == warning


@pytest.fixture
def small_files():
    """No file grows beyond 3,000 bytes, as on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_name_that_tensorboard_cannot_take_costs_one_warning(tmp_path, capsys):
    with stdout_may_break():
        TensorBoard(LogConfig(tensorboard_dir=f"{tmp_path}/\udcff")).scalars({"lm loss": 1.0}, 1, 1)
    (line,) = capsys.readouterr().out.splitlines()
    assert "WARNING: no TensorBoard logs from here on, --tensorboard-dir" in line


def test_a_full_disk_under_tensorboard_costs_one_warning(tmp_path, capsys, small_files):
    """The writer's thread meets it, and the next call raised it."""
    board = TensorBoard(LogConfig(tensorboard_dir=str(tmp_path), tensorboard_queue_size=1))
    small_files()
    for n in range(400):
        board.scalars({"lm loss": float(n)}, n, n)
    board.close()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"WARNING: no TensorBoard logs from here on, --tensorboard-dir {tmp_path}: [Errno 27]")
