"""A run that is told to leave saves first, on all ranks, and ends well."""

from __future__ import annotations

import os
import signal
import time

from programs import start_ranks

from megapipe.training.signals import ExitSignal

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--mock-data --split 1,0,99 --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0 --micro-batch-size 2 "
    "--train-iters 10000 --lr 1e-3 --log-interval 1 --save-interval 10000 --exit-signal-handler --eval-iters 0"
)


def test_sigterm_to_one_of_two_ranks_saves_and_ends_both_with_75(tmp_path):
    (logs := tmp_path / "logs").mkdir()
    first, second = start_ranks(2, ["pretrain_gpt.py", *FLAGS.split(), "--save", tmp_path / "checkpoints"], logs)
    try:
        until = time.monotonic() + 60
        while "iteration        1/" not in (first.log.read_text() if first.log.exists() else ""):
            assert time.monotonic() < until
            time.sleep(0.05)
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
