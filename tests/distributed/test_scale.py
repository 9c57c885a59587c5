"""What a start asks of a rank does not grow with the number of ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from megapipe.config import ParallelConfig
from megapipe.distributed.axis import CPU
from megapipe.distributed.grid import Grids
from megapipe.distributed.meeting.agreement import agree
from megapipe.distributed.meeting.meeting import call_the_roll
from megapipe.distributed.mesh import build_mesh


class Counting(HashStore):
    """What one rank asks of a store: its own count over the ranks' shared keys."""

    def __init__(self, shared: HashStore) -> None:
        super().__init__()
        self.shared, self.requests = shared, 0

    def _ask(name):
        def call(self, *args):
            self.requests += 1
            return getattr(self.shared, name)(*args)

        return call

    add, get, set, wait, append, compare_set = map(_ask, ("add", "get", "set", "wait", "append", "compare_set"))


def requests_of_each(world: int) -> list[int]:
    shared = HashStore()

    def start(rank: int) -> int:
        store = Counting(shared)
        assert call_the_roll(store, rank, world, 60) == ""
        agree(store, rank, world, {"--lr": "1", "tensor parallel": "8"})
        return store.requests

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(start, range(world)))


@pytest.mark.parametrize("world", [2, 32, 256])
def test_meeting_and_agreeing_take_ten_requests_of_a_rank_at_any_number_of_ranks(world):
    assert max(requests_of_each(world)) <= 10


@pytest.mark.parametrize("tp, pp, dp", [(2, 4, 2), (8, 8, 2), (8, 16, 8)])
def test_groups_over_nccl_are_made_in_as_many_calls_at_any_number_of_ranks(tp, pp, dp):
    """tp, dp, pp, the world's, tied ends, twins, and four one-way groups of a pipeline."""
    calls: list[str] = []
    build_mesh(
        Grids.of(ParallelConfig(tp, pp), tp * pp * dp), 0, CPU, lambda name, sets: calls.append(name), num_links=4
    )
    assert len(calls) == 10
