"""Which groups a grid of ranks makes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megapipe.distributed.axis import CPU
from megapipe.distributed.mesh import ProcessMesh, build_mesh, rank_grid


@pytest.mark.parametrize("shares, calls", [({"ends", "twins"}, 64 + 512), ({"ends"}, 64), ((), 0)])
def test_groups_of_pairs_of_ranks_are_made_only_for_what_they_share(shares, calls):
    """tp 8 x dp 8 x pp 16: 64 pipelines; the other groups are those of torch's device mesh and the world."""
    made: Counter[str] = Counter()
    mesh = build_mesh(rank_grid((16, 8, 8)), 0, CPU, lambda name, ranks: made.update([name]), shares=shares)
    assert made["ends"] + made["twins"] == calls
    assert [made[name] for name in ("tp", "dp", "pp", "world")] == [128, 128, 64, 1]
    assert (mesh.ends.size, mesh.twins.size) == (1 + ("ends" in shares), 1 + ("twins" in shares))


def test_every_axis_of_a_process_alone_is_on_its_device():
    mesh = ProcessMesh.single(torch.device("meta"))
    axes = (mesh.tp, mesh.dp, mesh.pp, mesh.world, mesh.ends, mesh.twins)
    assert {axis.device for axis in axes} == {torch.device("meta")}


@pytest.mark.parametrize("dp_last", [False, True])
def test_ranks_are_numbered_as_megatron_numbers_them(dp_last):
    """tp-cp-ep-dp-pp, or tp-cp-ep-pp-dp under --use-tp-pp-dp-mapping (megatron/core/parallel_state.py)."""
    pp, dp, tp = 3, 2, 4
    for rank in range(pp * dp * tp):
        mesh = build_mesh(rank_grid((pp, dp, tp), dp_last=dp_last), rank, CPU, lambda name, ranks: None)
        outer = mesh.pp.rank + pp * mesh.dp.rank if dp_last else mesh.dp.rank + dp * mesh.pp.rank
        assert rank == mesh.tp.rank + tp * outer
        assert (mesh.world.rank, mesh.world.ranks) == (rank, tuple(range(pp * dp * tp)))
