"""What the watches ask of the ranks' store, which serves all of them at once."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch.distributed import PrefixStore, TCPStore

from megapipe.pipeline_parallel.diagnosis import Report
from megapipe.pipeline_parallel.watch import Watch

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
