"""What the watches ask of the ranks' store, which serves all of them at once."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import DistBackendError, PrefixStore, TCPStore

from megapipe.distributed.meeting.position import Position
from megapipe.pipeline_parallel.watch.diagnosis import Report, first_mismatch
from megapipe.pipeline_parallel.watch.watch import FAULT, POLL_S, SILENCE_S, Watch

RANKS = 300


class Counted:
    """A store that counts what is asked of it."""

    def __init__(self, store):
        self._store, self.requests = store, 0

    def __getattr__(self, name):
        self.requests += 1
        return getattr(self._store, name)


@pytest.fixture
def store():
    return PrefixStore("test", TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False))


def watch_of(rank, store):
    watch = Watch(SimpleNamespace(store=None, world=SimpleNamespace(size=RANKS, rank=rank)))
    watch._store = Counted(store)
    return watch


def report_of(rank):
    return Report(f"rank {rank}", "pass 1F2 of iteration 3", "iteration 3", 1.0, None, None, "timed out", None)


def test_the_first_to_fail_hears_all_ranks_in_a_few_requests(store):
    """Every rank asked twice for every other: 2 million requests at 1,024 ranks, which the store took for its end."""
    watches = [watch_of(rank, store) for rank in range(RANKS)]
    for rank, watch in enumerate(watches):
        watch._post(report_of(rank))
        assert watch._store.requests == 2
    assert watches[7]._collect() == {rank: report_of(rank) for rank in range(RANKS)}
    assert watches[7]._store.requests <= 5


def test_an_error_of_the_watchs_own_ends_neither_the_watch_nor_what_it_says_at_the_end(monkeypatch, store):
    """It ended the thread without a word, and a hang was for ever."""
    said, codes = [], []
    monkeypatch.setattr("megapipe.pipeline_parallel.watch.watch._say", said.append)
    monkeypatch.setattr("megapipe.pipeline_parallel.watch.watch._exit", codes.append)
    watch = watch_of(0, store)
    watch._ear = SimpleNamespace(recv=lambda size: b"\0")
    looks = iter([ValueError("no report"), ValueError("no report"), KeyError("pp"), None])

    def look(heard):
        if (error := next(looks)) is not None:
            raise error
        watch._closed = True

    monkeypatch.setattr(watch, "_look", look)
    watch._run()
    met = "the watch over rank 0 met an error of its own and goes on: "
    assert said == [f"{met}ValueError: no report", f"{met}KeyError: 'pp'"]
    monkeypatch.setattr(watch, "_collect", lambda: {0: Report.from_json("{}")})
    watch._end(report_of(0), 4)
    assert (
        "rank 0 is in pass 1F2 of iteration 3, since 1.0 s: timed out; the other ranks could not be heard" in said[-1]
    )
    assert codes == [4]


NCCLS = "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.27.5\n"
NCCLS += "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
ITS_OWN = NCCLS.partition("Cuda failure")[0] + "Failed to CUDA calloc async 608 bytes"
GLOOS = "[gloo/transport/tcp/pair.cc:534] Cannot allocate memory"


@pytest.mark.parametrize(
    "error",
    [
        DistBackendError(NCCLS),
        DistBackendError(ITS_OWN),
        RuntimeError(GLOOS),
        torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB"),
    ],
)
def test_a_rank_that_lacks_memory_in_a_collective_is_named_with_that_in_one_line(monkeypatch, store, error):
    """In the gather of a save. All were told: no message is missing; rank 0 has been longest in its place."""
    watch, ended = watch_of(1, store), []
    watch.mesh = SimpleNamespace(store=store, world=watch.mesh.world, pp=SimpleNamespace(rank=0), position=Position())
    watch.mesh.position.begin("iteration 2")

    def end(report, code):
        ended.append((report, code))
        watch._closed = True

    monkeypatch.setattr(watch, "_end", end)
    watch.__enter__()
    watch.__exit__(type(error), error, None)
    ((report, code),) = ended
    others = {0: report_of(0), 1: report}
    words = " ".join(str(error).split())
    assert first_mismatch(others, 2) == f"rank 1 ended in the start of iteration 2: {type(error).__name__}: {words}"
    assert code == FAULT


LATE_S = 15.6
"""How late a healthy store was on two cores with 100 programs to run."""


def test_a_store_that_is_late_is_asked_again_and_one_that_stays_silent_is_gone(store):
    watch, answers, each_s = watch_of(0, store), threading.Event(), 0.02
    asked_s = 2.0 * LATE_S / (2.0 + POLL_S)  # of each poll two seconds are a wait for the store
    watch._silent_s = asked_s - each_s
    assert watch._ask(lambda store: answers.wait(), each_s) is None
    assert watch._alone() is None
    assert watch._ask(lambda store: store.add("left", 1)) == 1
    watch._silent_s = SILENCE_S
    assert watch._ask(lambda store: answers.wait(), each_s) is None
    assert "store (by hand: rank 0) is gone" in watch._alone()
    answers.set()
