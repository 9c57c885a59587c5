"""A lost rank's passes go to its peers: a sound table, nothing else moves, at most d/(d-1) of a step."""

from collections import Counter
from itertools import cycle, product
from random import Random

import pytest
from nightly import by_night

from megapipe.errors import ScheduleError
from megapipe.schedule import Costs, Kind, build, simulate, verify
from megapipe.schedule.core.joint import Joint, joint, joint_costs
from megapipe.schedule.core.reroute import reroute
from megapipe.schedule.recipe import Recipe

NAMES = ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe", "seq1f1b"]
COSTS = Costs(1.0, 1.5, 0.5, comm=0.1)


def owner(table, replicas, lost, item):
    """(replica, microbatch within it, position in the model) of a pass of a joint table."""
    microbatch, replica = divmod(item.microbatch, replicas)
    return replica, microbatch, table.placement.position(item.stage % table.placement.chain)


@pytest.mark.parametrize("name, replicas", by_night(product(NAMES, [2, 4]), day=zip(NAMES, cycle([2, 4]))))
def test_the_table_is_sound_and_every_pass_of_every_replica_is_in_it_once(name, replicas):
    table = build(name, 4, 8)
    found = reroute(table, replicas, (1, 2), COSTS)
    verify(found, costs=joint_costs(COSTS, table))
    whole = Counter((x.kind, *owner(table, replicas, None, x), x.slice) for x in joint(table, replicas).passes())
    assert Counter((x.kind, *owner(table, replicas, None, x), x.slice) for x in found.passes()) == whole
    assert set(whole.values()) == {1}
    assert len(found.ranks) == 4 * replicas - 1


@pytest.mark.parametrize("name", NAMES)
def test_others_keep_their_rows_and_peers_the_order_of_their_own_passes(name):
    table = build(name, 4, 8)
    lost = (0, 1)
    ranks = Joint(table, 3, lost)
    found = reroute(table, 3, lost, COSTS)
    for replica in range(3):
        for rank, row in enumerate(table.ranks):
            if (replica, rank) == lost:
                continue
            there = found.ranks[ranks.rank(replica, rank)]
            own = [step for step in there if step[0].microbatch % 3 == replica]
            assert [[x.kind for x in step] for step in own] == [[x.kind for x in step] for step in row]
            adopted = [x for step in there for x in step if x.microbatch % 3 != replica]
            # Each peer has its share of the lost rank's passes; no other rank has any.
            assert bool(adopted) == (rank == lost[1])
            assert {x.microbatch % 3 for x in adopted} <= {lost[0]}


@pytest.mark.parametrize("name, replicas", by_night(product(NAMES, [2, 3, 4]), day=zip(NAMES, cycle([3, 2, 4]))))
def test_a_step_takes_no_longer_than_if_all_work_of_the_replica_were_divided(name, replicas):
    table = build(name, 4, 8)
    healthy = simulate(table, COSTS).makespan
    rerouted = simulate(reroute(table, replicas, (0, 3), COSTS), joint_costs(COSTS, table)).makespan
    assert rerouted <= replicas / (replicas - 1) * healthy


@pytest.mark.parametrize("name", NAMES)
def test_no_rank_holds_more_than_the_limit_though_a_peer_runs_the_passes_of_two(name):
    table = build(name, 4, 8)
    memory = max(simulate(table, COSTS).peak)
    free = simulate(reroute(table, 2, (1, 0), COSTS), joint_costs(COSTS, table))
    found = reroute(table, 2, (1, 0), COSTS, memory)
    verify(found, memory=memory, costs=joint_costs(COSTS, table))
    bound = simulate(found, joint_costs(COSTS, table))
    assert max(bound.peak) <= memory < max(free.peak)
    # The whole replica first, then all that the lost rank left: never longer.
    assert bound.makespan <= 2 * simulate(table, COSTS).makespan


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(("name", "ranks"), [("gpipe", 1), ("v-half", 2), ("interleaved-zb", 2)])
def test_the_memory_of_the_fullest_rank_is_enough_for_peers_though_sums_are_rounded(name, ranks, replicas):
    """They were refused for 1.01e9 of 1.01e9, or no step fitted and `min` had nothing."""
    table = build(name, ranks, 8)
    draw = Random(0)
    for _ in range(6):
        held = [draw.uniform(0.1, 1) for _ in range(table.placement.chain)]
        costs = Costs(1.0, 1.5, 0.5, mem_b=tuple(held), mem_w=tuple(x * draw.random() for x in held))
        memory = max(simulate(table, costs).peak)
        verify(reroute(table, replicas, (0, 0), costs, memory), memory=memory, costs=joint_costs(costs, table))


FULL = [
    ("v-min", 4, 12, 3),
    ("breadth-first", 6, 18, 3),
    ("dualpipe-v", 3, 6, 3),
    ("zb-h2", 6, 6, 3),
    ("interleaved-zb", 4, 12, 3),
    ("group-interleaved", 2, 6, 3),
    ("zb-h1", 2, 12, 4),
    # Too slow if a peer's later microbatches do not wait for its whole block.
    ("interleaved-zb", 4, 9, 3),
    ("seq1f1b", 4, 9, 3),
    # Too slow if a block does not wait for the peer's microbatches before it.
    ("dualpipe", 2, 4, 3),
]


@pytest.mark.parametrize(("name", "ranks", "microbatches", "replicas"), FULL)
def test_peers_without_spare_memory_take_turns_and_a_step_is_within_the_bound(name, ranks, microbatches, replicas):
    """They stopped one of their pipelines for the other: 1.94 times the healthy step for group-interleaved."""
    table = build(name, ranks, microbatches)
    costs = joint_costs(COSTS, table)
    healthy = simulate(table, COSTS)
    memory = max(healthy.peak)
    found = reroute(table, replicas, (1, 1), COSTS, memory)
    verify(found, memory=memory, costs=costs)
    assert simulate(found, costs).makespan <= replicas / (replicas - 1) * healthy.makespan
    whole = Counter((x.kind, *owner(table, replicas, None, x)) for x in joint(table, replicas).passes())
    assert Counter((x.kind, *owner(table, replicas, None, x)) for x in found.passes()) == whole


def test_in_blocks_a_pipeline_is_empty_where_a_peer_goes_over_to_the_other():
    """Replica 2 of 4 has the second of three blocks: after half of its 12 microbatches."""
    table = build("1f1b", 4, 12)
    ranks = Joint(table, 4, (0, 3), positions=tuple(range(12)))
    assert [ranks.borders(replica) for replica in range(4)] == [[4, 8], [0], [6], [12]]
    assert [ranks.peer(microbatch) for microbatch in range(12)] == [1] * 4 + [2] * 4 + [3] * 4
    rows = dict(list(ranks.queues())[:15])
    for rank, border in [(ranks.rank(2, 0), 6), (ranks.rank(2, 3), 6), (ranks.rank(0, 0), 4)]:
        numbers = [step[0].microbatch // 4 for step in rows[rank]]
        assert numbers[2 * border :] == [n for n in numbers if n >= border]


def test_what_fits_into_bubbles_costs_little():
    """ReCycle: with 4 replicas of 4 ranks and 4 microbatches a peer has 3 idle slots, and adopts 4/3 microbatches."""
    table = build("1f1b", 4, 4)
    found = reroute(table, 4, (2, 0))
    assert simulate(found, joint_costs(Costs(), table)).makespan <= 1.2 * simulate(table).makespan


def test_without_a_loss_the_joint_table_takes_as_long_as_one_replica():
    for name in NAMES:
        table = build(name, 4, 8)
        assert simulate(joint(table, 3), joint_costs(COSTS, table)).makespan == pytest.approx(
            simulate(table, COSTS).makespan
        )


def test_what_cannot_be_rerouted_is_refused_with_its_reason():
    table = build("1f1b", 4, 8)
    with pytest.raises(ScheduleError, match="rank 1 of replica 0 has no peer"):
        reroute(table, 1, (0, 1))
    with pytest.raises(ScheduleError, match=r"there is no rank 4 of replica 0, only 4 ranks of 2 replica"):
        reroute(table, 2, (0, 4))
    with pytest.raises(ScheduleError, match="a peer would hold 4, more than 3"):
        reroute(table, 2, (0, 0), memory=3.0)
    stepped = Recipe("1f1b", 4, 8, replicas=True).whole()
    assert Kind.P in stepped.kinds
    with pytest.raises(ScheduleError, match="has P: reroute F, B, W and BW"):
        reroute(stepped, 2, (0, 0))
