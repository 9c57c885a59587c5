"""A rank's state in a world with more or fewer replicas is found piece by piece in the states of another one."""

import random

import pytest
import torch

from megapipe.checkpoint.memory.cliques import lost_with_a_host, sets_of
from megapipe.checkpoint.memory.relayout import Kept, pieces, size_of
from megapipe.config import Config

ALIGN = 64


def config_of(world, *, tp=1, pp=1, ep=1, sharded=True, **more):
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep}
    experts = {"num_experts": 4} if ep > 1 else {}
    flags = {"use_distributed_optimizer": sharded, "replication": True}
    return Config(world_size=world).with_fields(**sizes, **experts, **flags, **more)


def coordinates(rank, world, tp, pp, ep):
    """(tp, pp, place among dense replicas, ep, place among the experts' replicas), in Megatron's order."""
    replica = rank // tp % (world // tp // pp)
    return rank % tp, rank // (world // pp), replica, replica % ep, replica // ep


def state_of(rank, world, tp, pp, ep, *, sharded, seed):
    """Drawn flat tensors in float32: whole ones, dense and experts', cut into padded parts by plain torch."""
    at_tp, at_pp, replica, at_ep, at_edp = coordinates(rank, world, tp, pp, ep)
    dense = world // tp // pp
    draw = random.Random(f"{seed} {at_pp}")
    state = []
    for n in range(draw.randrange(1, 6)):
        filled = ALIGN * draw.randrange(0, 9)
        kind = draw.choice(["whole", "dense", "experts"] if ep > 1 else ["whole", "dense"])
        made = torch.Generator().manual_seed(hash((seed, at_pp, at_tp, n, at_ep if kind != "dense" else 0)))
        whole = torch.randn(filled, generator=made)
        parts, own = (dense, replica) if kind == "dense" else (dense // ep, at_edp)
        if kind == "whole":
            state.append(Kept(whole))
            continue
        parts, own = (parts, own) if sharded else (1, 0)
        length = -(-filled // (ALIGN * parts)) * ALIGN
        padded = torch.cat([whole, torch.zeros(length * parts - filled)])
        state.append(Kept(padded[own * length :][:length].clone(), filled, kind == "experts"))
    return [state]


def bytes_of(state):
    """The state as a slot has it: each tensor at a multiple of 64 bytes."""
    found = torch.zeros(size_of(state), dtype=torch.uint8)
    at = 0
    for x in state[0]:
        found[at : at + x.size] = x.tensor.view(torch.uint8)
        at += -(-x.size // 64) * 64
    return found


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("tp, pp, ep", [(1, 1, 1), (2, 2, 1), (1, 2, 2)])
@pytest.mark.parametrize("before, now", [(4, 3), (3, 4), (6, 2), (2, 1), (1, 4)])
def test_pieces_of_another_world_make_the_states_of_this_one(before, now, tp, pp, ep, sharded):
    # With experts on ep ranks there are dp = ep x edp replicas.
    worlds = [n * tp * pp * ep for n in (before, now)]
    for seed in range(4):
        of_world = []
        for world in worlds:
            of_world.append([state_of(r, world, tp, pp, ep, sharded=sharded, seed=seed) for r in range(world)])
        had = [bytes_of(state) for state in of_world[0]]
        config = config_of(worlds[1], tp=tp, pp=pp, ep=ep, sharded=sharded)
        for rank, state in enumerate(of_world[1]):
            found = torch.zeros(size_of(state), dtype=torch.uint8)
            for owner, at, to, size in pieces(state, rank, config, worlds[0]):
                found[to : to + size] = had[owner][at : at + size]
            assert torch.equal(found, bytes_of(state))


@pytest.mark.parametrize("world", range(2, 14))
def test_every_rank_is_in_one_set_of_at_least_two_whatever_number_there_is(world):
    for jump in range(1, world // 2 + 1):
        sets, _ = sets_of(config_of(world, replication_jump=jump))
        assert sorted(rank for ranks in sets for rank in ranks) == list(range(world))
        assert all(len(ranks) > 1 for ranks in sets)
        assert all(ranks == tuple(range(ranks[0], ranks[-1] + 1, jump)) for ranks in sets)


def test_ranks_of_one_machine_do_not_keep_each_others_state_if_there_are_more_machines():
    two = ["a", "a", "b", "b"]
    assert list(lost_with_a_host([(0, 2), (1, 3)], two)) == []
    assert list(lost_with_a_host([(0, 1), (2, 3)], ["a"] * 4)) == []
    problems = list(lost_with_a_host([(0, 1), (2, 3)], two))
    assert len(problems) == 2
    assert "ranks 0, 1 keep each other's state, and they are on one machine" in problems[0]
    assert problems[0].endswith("Use --replication with --replication-jump 2, the ranks of a machine.")
