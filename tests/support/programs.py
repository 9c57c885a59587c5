"""Our programs as real processes that start at once: forked from one that has imported torch and megapipe already.

Files, environment, process groups and signals are each process's own; only the seconds of its imports are shared. Tests
of torchrun itself and of imports start interpreters of their own.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist

ROOT = Path(__file__).parents[2]
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "megapipe.training.pretrain",
        "megapipe.checkpoint.shards",
        "megapipe.testing",
        "torch.utils.tensorboard",
        "torch._dynamo",  # which a profile, --deterministic-mode and a first save import
        "torch._inductor",
    ]
)


class Program:
    """`python SCRIPT ARGUMENTS...`, or -m MODULE, running. It prints to `log`, or standard output apart to `stdout`."""

    def __init__(
        self,
        command: Sequence[object],
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        stdout: Path | None = None,
        keeps: object = None,
    ) -> None:
        arguments = [*map(str, command)]
        self.log, self.keeps = log, keeps
        self.process = FORKED.Process(target=_run, args=(arguments, log, stdout or log, dict(env or {}), cwd))
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self.process.exitcode

    def wait(self, timeout: float = 120) -> int:
        """Its exit status. It is killed, and the test fails, when that takes longer than `timeout` seconds."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise AssertionError(f"does not end:\n{self.log.read_text()}")
        return self.process.exitcode

    def kill(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.join()


def _run(command: list[str], log: Path, stdout: Path, env: dict[str, str], cwd: Path) -> None:
    gc.freeze()  # what was imported before the fork stays shared: a search for garbage would write to all of it
    os.setsid()
    for path, number in ((log, 2), (stdout, 1)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, number)
        os.close(file)
    os.environ.update({"OMP_NUM_THREADS": "1"} | env)
    os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = command
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(command[0]).resolve().parent)
        runpy.run_path(command[0], run_name="__main__")


def run(command: Sequence[object], cwd: Path = ROOT, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run it to its end, as subprocess.run does."""
    with TemporaryDirectory() as folder:
        log, stdout = Path(folder, "err"), Path(folder, "out")
        code = Program(command, log, cwd=cwd, stdout=stdout).wait(timeout)
        return subprocess.CompletedProcess(list(map(str, command)), code, stdout.read_text(), log.read_text())


def start_ranks(
    world_size: int, command: Sequence[object], folder: Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> list[Program]:
    """The ranks of a run as a launcher starts them; rank r writes to folder/rank-r."""
    env, ranks, store = dict(env or {}), [], None
    if world_size > 1:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # in us, as in torchrun
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        env |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    for r in range(world_size):
        mine = {"RANK": str(r), "LOCAL_RANK": str(r)} if store is not None else {}
        ranks.append(Program(command, folder / f"rank-{r}", env | mine, cwd, keeps=store))
    return ranks


def run_ranks(world_size: int, command: Sequence[object], cwd: Path = ROOT) -> str:
    """All that the ranks of a run printed; each must end well."""
    with TemporaryDirectory() as folder:
        ranks = start_ranks(world_size, command, Path(folder), cwd)
        codes = [rank.wait() for rank in ranks]
        output = "".join(rank.log.read_text() for rank in ranks)
    assert codes == [0] * world_size, output
    return output


_ASKS = """#!/bin/sh
case "$1" in *.py | --nproc-per-node) ;; *) exec REAL "$@" ;; esac
ask=$(mktemp -d "${0%/*}/XXXXXX")
mkfifo "$ask/code"
env -0 > "$ask/env"
printf '%s\\0' "$@" > "$ask/words"
mv "$ask/words" "$ask/asked"
read -r code < "$ask/code"
cat "$ask/out"
exit "$code"
"""


@contextmanager
def forked_python(folder: Path) -> Iterator[Path]:
    """A folder for PATH with a `python FILE.py` and a `torchrun --nproc-per-node N FILE.py` that this process forks."""
    for name in ("python", "torchrun"):
        (folder / name).write_text(_ASKS.replace("REAL", sys.executable))
        (folder / name).chmod(0o755)
    over = threading.Event()

    def answer(ask: Path) -> None:
        words, env = ((ask / name).read_text().split("\0")[:-1] for name in ("asked", "env"))
        given = dict(pair.split("=", 1) for pair in env)
        ranks, command = (int(words[1]), words[2:]) if words[0] == "--nproc-per-node" else (1, words)
        code, started = 1, start_ranks(ranks, command, ask, Path(given["PWD"]), given)
        try:
            code = max(abs(rank.wait(240)) for rank in started)
        finally:
            (ask / "out").write_text("".join(rank.log.read_text() for rank in started))
            (ask / "code").write_text(f"{code}\n")

    def serve() -> None:
        answered = set[Path]()
        while not over.wait(0.01):
            for ask in {path.parent for path in folder.glob("*/asked")} - answered:
                answered.add(ask)
                threading.Thread(target=answer, args=(ask,)).start()

    threading.Thread(target=serve).start()
    try:
        yield folder
    finally:
        over.set()
