"""A run that is told to leave saves first, on all ranks, and ends well."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from megapipe.training.signals import ExitSignal

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0 --micro-batch-size 2 "
    "--train-iters 1000000 --lr 1e-3 --log-interval 1 --save-interval 1000000 --exit-signal-handler"
)


def test_sigterm_to_one_of_two_ranks_saves_and_ends_both_with_0(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "pretrain_gpt.py", *FLAGS.split(), "--save", str(tmp_path)]
    first, second = (
        subprocess.Popen(
            command, cwd=ROOT, env=os.environ | address | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    )
    try:
        assert first.stdout is not None
        next(line for line in first.stdout if "iteration        1/" in line)
        second.send_signal(signal.SIGTERM)
        output, _ = first.communicate(timeout=60)
        second.communicate(timeout=60)
    finally:
        first.kill()
        second.kill()
    assert (first.returncode, second.returncode) == (0, 0)
    assert "[exiting program after receiving SIGTERM]" in output
    last = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert f"saving checkpoint at iteration {last:7d}" in output
    assert f"iteration {last + 1:8d}/" not in output


def test_a_second_signal_does_what_it_did_before():
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        listener = ExitSignal("SIGUSR1")
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (listener.received, seen) == (True, [])
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
