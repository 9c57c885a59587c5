"""Which groups a grid of ranks makes."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megapipe.config import ParallelConfig
from megapipe.distributed.axis import CPU
from megapipe.distributed.grid import Grids
from megapipe.distributed.groups import link, num_links
from megapipe.distributed.layout import Layout
from megapipe.distributed.mesh import ProcessMesh, build_mesh
from megapipe.pipeline_parallel.threads import run_threads


@pytest.mark.parametrize("shares", [{"ends": (0, -1), "twins": ()}, {"ends": (0, -1)}, {}])
def test_all_groups_of_a_name_are_made_in_one_call_and_only_for_what_is_shared(shares):
    """tp 8 x dp 8 x pp 16: 64 pipelines; the other groups are those of torch's device mesh and the world."""
    made: list[tuple[str, int]] = []
    mesh = build_mesh(
        Grids.of(ParallelConfig(8, 16), 1024),
        0,
        CPU,
        lambda name, sets: made.append((name, len(sets))),
        shares=shares,
        num_links=4,
    )
    pairs = {"ends": 64, "twins": 512}
    links = [(f"link{number}", 64) for number in range(4)]
    assert sorted(made) == sorted(
        [("tp", 128), ("dp", 128), ("pp", 64), ("world", 1), *links, *((name, pairs[name]) for name in shares)]
    )
    assert (mesh.ends.size, mesh.twins.size) == (1 + ("ends" in shares), 1 + ("twins" in shares))


@pytest.mark.parametrize("size", range(2, 10))
def test_on_a_ring_every_link_of_a_rank_has_one_neighbour_and_one_way(size):
    ways = {(r, (r + step) % size) for r in range(size) for step in (1, -1)}
    used: dict[tuple[int, int | None], set[tuple[int, int]]] = {}
    for src, dst in ways:
        for rank in (src, dst):
            used.setdefault((rank, link(src, dst, size)), set()).add((src, dst))
    assert all(len(pairs) == 1 for pairs in used.values())
    assert {number for _, number in used} == set(range(num_links(size)))
    assert all(
        link(src, dst, size) is None for src, dst in itertools.permutations(range(size), 2) if (src, dst) not in ways
    )


def test_every_axis_of_a_process_alone_is_on_its_device():
    mesh = ProcessMesh.single(torch.device("meta"))
    axes = (mesh.tp, mesh.cp, mesh.dp, mesh.dp_cp, mesh.pp, mesh.world, mesh.ends, mesh.twins)
    assert {axis.device for axis in axes} == {torch.device("meta")}


@pytest.mark.parametrize("dp_last", [False, True])
def test_ranks_are_numbered_as_megatron_numbers_them(dp_last):
    """tp-cp-ep-dp-pp, or tp-cp-ep-pp-dp under --use-tp-pp-dp-mapping (megatron/core/parallel_state.py)."""
    pp, dp, cp, tp = 3, 2, 2, 2
    grids = Grids.of(ParallelConfig(tp, pp, cp, use_tp_pp_dp_mapping=dp_last), pp * dp * cp * tp)
    for rank in range(pp * dp * cp * tp):
        mesh = build_mesh(grids, rank, CPU, lambda name, ranks: None)
        outer = mesh.pp.rank + pp * mesh.dp.rank if dp_last else mesh.dp.rank + dp * mesh.pp.rank
        assert rank == mesh.tp.rank + tp * (mesh.cp.rank + cp * outer)
        assert mesh.dp_cp.rank == mesh.cp.rank + cp * mesh.dp.rank
        assert (mesh.world.rank, mesh.world.ranks) == (rank, tuple(range(pp * dp * cp * tp)))


@pytest.mark.parametrize(
    ("world", "tp", "pp", "ep", "etp", "expected"),
    [
        (16, 2, 2, 2, 1, ([0, 1], [0, 1], [0], [0, 2, 4, 6])),
        (16, 2, 2, 2, None, ([0, 1], [0, 2], [0, 1], [0, 4])),
        (8, 1, 2, 4, None, ([0], [0, 1, 2, 3], [0], [0])),
        (8, 2, 1, 4, 1, ([0, 1], [0, 1, 2, 3], [0], [0, 4])),
    ],
)
def test_experts_lie_over_the_ranks_that_megatron_gives_them(world, tp, pp, ep, etp, expected):
    """By megatron/core/parallel_state.py's generator: tp, ep, etp and edp of rank 0."""
    mesh = build_mesh(Grids.of(ParallelConfig(tp, pp, 1, ep, etp), world), 0, CPU, lambda name, ranks: None)
    assert tuple(list(axis.ranks) for axis in (mesh.tp, mesh.ep, mesh.etp, mesh.edp)) == expected
    assert set(mesh.experts.ranks) >= {*mesh.ep.ranks, *mesh.etp.ranks}


def test_tokens_of_experts_do_not_stand_behind_sums_of_gradients():
    """A communicator of their own, though data-parallel ranks are the same; none where tensor parallelism is."""
    group = {"make_group": lambda name, sets: name}
    shared = build_mesh(Grids.of(ParallelConfig(expert_model_parallel_size=4), 4), 0, CPU, **group)
    assert (shared.experts.ranks, shared.experts.group, shared.dp.group) == ((0, 1, 2, 3), "experts", "dp")
    split = build_mesh(Grids.of(ParallelConfig(tensor_model_parallel_size=4), 4), 0, CPU, **group)
    assert (split.experts.group, split.tp.group) == ("tp", "tp")


def test_timeouts_are_set_by_the_public_function_where_torch_has_it(monkeypatch):
    """From 2.14 on; the private one, which 2.13 has alone, then warns on each start."""
    given = []
    monkeypatch.setattr(dist, "set_timeout", lambda timeout, group: given.append((timeout, group)), raising=False)
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", lambda *_: pytest.fail("it warns"))
    mesh = ProcessMesh.single()
    monkeypatch.setattr(ProcessMesh, "groups", lambda self: ["a", "b"])
    mesh.set_timeout(7.0)
    assert given == [(timedelta(seconds=7), "a"), (timedelta(seconds=7), "b")]


def test_of_ranks_with_the_same_weight_the_first_speaks_for_it_whatever_axes_experts_have():
    """Each of two ranks has half of the experts, all of each: none of them counts in another's place."""
    dense, experts = Layout((4,)), Layout((4, 4), experts=True)
    firsts = run_threads(lambda mesh: (dense.is_first(mesh.tp), experts.is_first(mesh.tp)), tp=2, ep=2, etp=1)
    assert firsts == [(True, True), (False, True)]
