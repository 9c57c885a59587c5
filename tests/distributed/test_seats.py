"""The seats of a replica whose last rank is missing: each collective is one of all its seats."""

import torch

from megapipe.distributed.seats import Seats
from megapipe.pipeline_parallel.threads import run_threads


def seats_of(mesh):
    """Two replicas of two ranks, of which rank 3 is missing: rank 1 has the last seat of both."""
    ranks = [(0, 1), (0, 1), (2, 1)][mesh.pp.rank]
    return Seats(ranks.index(mesh.pp.rank), 2, ranks, over=mesh.pp)


def test_a_peer_that_calls_once_counts_in_every_replica():
    def body(mesh):
        axis = seats_of(mesh)
        own = torch.tensor([10.0**mesh.pp.rank, -1.0])
        sums = axis.all_reduce(own.clone()).tolist()
        most = axis.all_reduce(own[0].clone(), "max").item()
        return sums, most, axis.all_gather(own[:1]).tolist(), axis.gather_json(f"of {mesh.pp.rank}")

    first = ([11.0, -2.0], 10.0, [1.0, 10.0], ["of 0", "of 1"])
    assert run_threads(body, pp=3) == [first, first, ([110.0, -2.0], 100.0, [100.0, 10.0], ["of 2", "of 1"])]


def test_each_replica_gets_what_its_own_rank_sends():
    def body(mesh):
        return seats_of(mesh).broadcast(torch.tensor(float(mesh.pp.rank)), source=0).item()

    assert run_threads(body, pp=3) == [0.0, 0.0, 2.0]
