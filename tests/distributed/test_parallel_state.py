"""Megatron's parallel_state by its names, in a world that the caller initialised before: against its rank order."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from rank_pool import WORLD

from megapipe.config import ParallelConfig
from megapipe.distributed import parallel_state as ps
from megapipe.distributed.axis import CPU
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError

from .megatron_order import answers, expert_answers, refusal


@pytest.mark.parametrize(
    ("tp", "pp", "cp", "order"),
    [(2, 2, 1, "tp-cp-ep-dp-pp"), (1, 2, 2, "tp-cp-ep-dp-pp"), (2, 1, 1, "tp-dp-pp"), (1, 2, 1, "tp-cp-pp-ep-dp")],
)
def test_every_group_has_the_ranks_of_megatrons_order(pool, tp, pp, cp, order):
    """A rank's number is written in the sizes of `order`, the first axis fastest (megatron/core/parallel_state.py)."""
    sizes = {"tp": tp, "cp": cp, "dp": WORLD // (tp * pp * cp), "pp": pp}
    axes = [axis for axis in order.split("-") if axis != "ep"]
    places = []
    for rank in range(WORLD):
        place = {"cp": 0}
        for axis in axes:
            rank, place[axis] = divmod(rank, sizes[axis])
        places.append(place)

    for rank, (groups, said) in enumerate(pool.run(answers, [], tp, pp, cp, order)):
        mine = places[rank]
        expected = {}
        for name in groups:
            inside = name.split("-")
            others = [axis for axis in sizes if axis not in inside]
            expected[name] = [r for r in range(WORLD) if all(places[r][axis] == mine[axis] for axis in others)]
        assert {name: ranks for name, (ranks, _) in groups.items()} == expected
        assert all(ranks[at] == rank for ranks, at in groups.values())
        assert said["ranks"] == {name: (expected[name].index(rank), len(expected[name])) for name in said["ranks"]}
        assert said["firsts"] == {name: expected[name][0] for name in said["firsts"]}
        line, at = expected["pp"], mine["pp"]
        assert said["neighbours"] == (line[at - 1], line[(at + 1) % pp])
        assert said["last"] == line[-1]
        assert said["first stage"] == [at == 0, False]
        assert said["last stage"] == [False, at == pp - 1]
        assert said["embeds"] == (at in (0, pp - 1),) * 2
        assert said["positions"] == (at == 0,) * 2
        assert said["chunk"] == (1, 2)


def test_expert_groups_are_those_of_the_second_grid(pool):
    """tp 2 x dp 2 under tp-cp-ep-dp-pp: two experts' ranks are a tensor-parallel pair where etp is 1."""
    assert pool.run(expert_answers, [], 2, 2, 1) == [
        {"ep": [r - r % 2, r - r % 2 + 1], "etp": [r], "edp": [r % 2, r % 2 + 2], "both": [r - r % 2, r - r % 2 + 1]}
        for r in range(WORLD)
    ]
    assert pool.run(expert_answers, [], 2, 2, None) == [
        {"ep": [r % 2, r % 2 + 2], "etp": [r - r % 2, r - r % 2 + 1], "edp": [r], "both": [0, 1, 2, 3]}
        for r in range(WORLD)
    ]


def test_sizes_that_do_not_divide_the_world_are_one_sentence_on_all_ranks(pool):
    (text,) = set(pool.run(refusal, [], 3, 1))
    assert text == (
        "the world has 4 ranks, no multiple of tensor_model_parallel_size 3 x context_parallel_size 1 x "
        "pipeline_model_parallel_size 1 = 3. Start 3 processes, or a multiple (torchrun --nproc-per-node), or take "
        "other sizes."
    )


def test_ranks_that_ask_for_other_sizes_are_told_of_each_other(pool):
    (text,) = set(pool.run(refusal, [], 1, 1, True))
    assert text == "tensor_model_parallel_size differs between ranks: 1 on rank 0; 2 on ranks 1, 3"


@pytest.mark.parametrize(("world", "sizes"), [(4, (3, 1)), (1, (2, 1)), (2, (1, 4)), (6, (2, 2))])
def test_sizes_are_refused_before_ranks_meet(monkeypatch, world, sizes):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    tp, pp = sizes
    with pytest.raises(ConfigError, match=f"the world has {world} rank.* = {tp * pp}. Start {tp * pp} processes"):
        ProcessMesh.create(ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp), CPU)


NAMES = """
get_amax_reduction_group get_hybrid_data_context_parallel_groups get_hierarchical_context_parallel_groups
get_gtp_weight_remat_group get_inter_distributed_optimizer_instance_group get_global_memory_buffer
create_all_gather_groups
"""


@pytest.mark.parametrize("name", NAMES.split())
def test_what_has_no_answer_here_is_named(name):
    with pytest.raises(ConfigError, match=rf"^parallel_state\.{name}: megapipe "):
        getattr(ps, name)()


def test_a_name_that_megatron_has_not_is_no_attribute():
    assert not hasattr(ps, "get_tensor_parallel_group")
    assert not hasattr(ps, "_EXPERT_MODEL_PARALLEL_GROUP")


def test_one_process_is_a_group_of_its_own():
    ps.initialize_model_parallel()
    try:
        for group in (ps.get_tensor_model_parallel_group(), ps.get_model_parallel_group(), ps.get_embedding_group()):
            x = torch.ones(2)
            dist.all_reduce(x, group=group)
            assert (group.size(), group.rank(), x.tolist()) == (1, 0, [1.0, 1.0])
        assert ps.is_pipeline_first_stage()
        assert ps.is_pipeline_last_stage()
    finally:
        ps.destroy_model_parallel()


WITHOUT_MESH = [name for name in vars(ps) if name.startswith("get_") and "virtual" not in name]


@pytest.mark.parametrize("name", WITHOUT_MESH)
def test_before_there_is_a_mesh_each_answer_says_how_to_make_one(name):
    with pytest.raises(ConfigError, match="there is no mesh"):
        getattr(ps, name)()


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"use_sharp": True}, "use_sharp is True, which megapipe does not implement"),
        ({"order": "pp-tp-dp"}, "order is pp-tp-dp; megapipe has tp-cp-ep-dp-pp and tp-cp-ep-pp-dp"),
        ({"order": "tp-ep-dp-pp", "context_parallel_size": 2}, "order is tp-ep-dp-pp"),
    ],
)
def test_what_no_mesh_has_is_refused_by_name(asked, problem):
    with pytest.raises(ConfigError, match=problem):
        ps.initialize_model_parallel(**asked)


def test_a_rank_cannot_be_overwritten():
    for name, value in itertools.product(("tensor_model_parallel_rank", "pipeline_model_parallel_world_size"), (1,)):
        setter = getattr(ps, f"set_{name}")
        setter(None)
        with pytest.raises(ConfigError, match="the mesh says it"):
            setter(value)


def test_all_that_is_offered_by_name_is_there():
    assert all(hasattr(ps, name) for name in ps.__all__)
    assert {"initialize_model_parallel", "destroy_model_parallel"} < set(ps.__all__)
