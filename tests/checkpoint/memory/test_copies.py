"""States in memory: two generations, checked at both ends; what comes back, and what is refused."""

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megapipe.checkpoint.memory import slots
from megapipe.checkpoint.memory.back import go_back
from megapipe.checkpoint.memory.cliques import Clique, sets_of
from megapipe.checkpoint.memory.copies import Copies
from megapipe.checkpoint.memory.relayout import Kept, size_of
from megapipe.checkpoint.memory.slots import HEADER, Slot
from megapipe.config import Config
from megapipe.errors import CheckpointError
from megapipe.pipeline_parallel.threads import run_threads

ALONE = [0, 1]


def state_of(rank):
    """Two stages, of unlike tensors; what they hold depends on the rank alone."""
    draw = torch.Generator().manual_seed(rank)
    first = [torch.randn(70, generator=draw), torch.randn(3, 5, generator=draw).bfloat16()]
    return [first, [torch.randn(9, generator=draw).double(), torch.zeros(0)]]


def kept(state):
    return [[Kept(x) for x in stage] for stage in state]


class Rank:
    """A rank of a clique, with a folder of its own in place of a machine's memory."""

    def __init__(self, mesh, folder, *, sends=True, step=0, equal=False):
        self.number = mesh.world.rank
        self.world = mesh.world
        self.step = step
        self.state = state_of(0 if equal else self.number)
        self.folder = folder / str(self.number)
        self.folder.mkdir(exist_ok=True)
        sizes = mesh.world.gather_json(size_of(kept(self.state)))
        self.copies = Copies(self.folder, Clique(mesh.world, sends), sizes, kept(self.state), 1, mesh.world.size)
        self.copies.content = lambda: {"iteration": self.step}

    def train(self, steps):
        """Each step adds 1 to the whole state, after the copy of the state before it."""
        for _ in range(steps):
            self.copies.now()
            for tensor in (x for stage in self.state for x in stage):
                tensor.add_(1)
            self.step += 1
            # A step's norm needs all ranks.
            self.world.barrier()

    def holds(self, step):
        """Whether the state is the one after so many steps."""
        expected = state_of(self.number)
        for tensor in (x for stage in expected for x in stage):
            for _ in range(step):
                tensor.add_(1)
        pairs = zip(expected, self.state, strict=True)
        return all(torch.equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))


def trained(folder, steps=3, *, ranks=2, **how):
    """Train in memory, and leave what a killed run leaves."""
    run_threads(lambda mesh: Rank(mesh, folder, **how).train(steps), pp=ranks)


def came_back(folder, *, ranks=2, **how):
    """What each rank finds when it starts again, and whether its state is that of the step."""

    def body(mesh):
        rank = Rank(mesh, folder, **how)
        back = go_back(rank.copies, rank.world, lambda: mesh.world.group)
        step = None if back is None else back.generation
        return back, step is not None and rank.holds(step), sorted(rank.copies.listed())

    return run_threads(body, pp=ranks)


def test_a_first_start_finds_nothing(tmp_path):
    assert [back for back, _, _ in came_back(tmp_path)] == [None, None]


def test_all_come_back_from_their_own_memory_to_the_last_generation(tmp_path):
    trained(tmp_path)
    for back, good, _ in came_back(tmp_path):
        # The last step is not copied any more: it was to be copied during the next one.
        assert (back.generation, back.content, back.reached, back.lost, good) == (2, {"iteration": 2}, 2, {}, True)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("lost", ALONE)
def test_a_lost_rank_gets_its_state_from_the_clique_and_keeps_the_others_again(tmp_path, lost, ranks):
    trained(tmp_path, ranks=ranks)
    shutil.rmtree(tmp_path / str(lost))
    for back, good, held in came_back(tmp_path, ranks=ranks):
        held = [(name.owner, n, slot) for name, n, slot in held]
        assert back.generation == 2
        assert back.lost == {lost: 1 if lost == 0 else 0}
        assert good
        assert held == [(rank, 2, held[0][2]) for rank in range(ranks)]
    # Also the other one may be lost then.
    shutil.rmtree(tmp_path / str(1 - lost))
    assert all(good for _, good, _ in came_back(tmp_path, ranks=ranks))


class ChangedOnItsWay:
    """A group whose received bytes are others than were sent."""

    def __init__(self, group):
        self.group = group
        self.send = group.send

    def recv(self, places, source, tag):
        work = self.group.recv(places, source, tag)
        return SimpleNamespace(wait=lambda: (work.wait(), places[0].add_(1)))


def test_a_state_that_changes_on_its_way_ends_all_ranks_and_is_not_used(tmp_path):
    """Only the rank that received it raised, and the others waited for that rank."""
    trained(tmp_path)
    shutil.rmtree(tmp_path / "1")

    def body(mesh):
        rank = Rank(mesh, tmp_path)
        try:
            go_back(rank.copies, rank.world, lambda: ChangedOnItsWay(mesh.world.group))
        except CheckpointError as error:
            return str(error)

    text = "a state has changed on its way from rank 0 to 1"
    assert run_threads(body, pp=2, timeout_s=20) == [text, text]
    assert all(good for _, good, _ in came_back(tmp_path))


def test_with_both_of_a_pair_nothing_comes_back_and_nothing_old_stays(tmp_path):
    trained(tmp_path)
    for rank in ALONE:
        shutil.rmtree(tmp_path / str(rank))
    assert [back for back, _, _ in came_back(tmp_path)] == [None, None]


def test_of_four_in_two_pairs_one_of_each_may_go_and_not_both_of_one(tmp_path):
    def body(mesh, lose):
        pair = mesh.dp
        rank = Rank(mesh, tmp_path)
        sizes = pair.gather_json(size_of(kept(rank.state)))
        # Ranks n and n + 2, as with --replication-jump 2.
        rank.copies = Copies(rank.folder, Clique(pair, True), sizes, kept(rank.state), 1, 4)
        rank.copies.content = lambda: {"iteration": rank.step}
        back = go_back(rank.copies, mesh.world, lambda: mesh.world.group)
        if back is None or back.generation is None:
            rank.train(2)
        if rank.number in lose:
            shutil.rmtree(rank.folder)
        return back

    def four(*lose):
        return run_threads(lambda mesh: body(mesh, lose), dp=2, pp=2)

    pairs = run_threads(lambda mesh: mesh.dp.ranks, dp=2, pp=2)
    one, other = pairs[0], next(x for x in pairs if x != pairs[0])
    assert four(one[0], other[1]) == [None] * 4
    assert {back.generation for back in four(*one)} == {1}
    gone = four()
    assert {back.generation for back in gone} == {None}
    assert gone[0].lost == {one[0]: None, one[1]: None}


def test_a_kill_within_a_copy_leaves_the_generation_before(tmp_path, monkeypatch):
    trained(tmp_path, 2)
    seal = Slot.seal
    own = []
    # Each rank ends before its own header, when its buddy has all of it.
    monkeypatch.setattr(Slot, "seal", lambda slot, header: slot in own or seal(slot, header))

    def body(mesh):
        rank = Rank(mesh, tmp_path, step=2)
        own.extend(rank.copies.slot(rank.copies.name, n) for n in range(2))
        mesh.world.barrier()
        rank.train(1)

    run_threads(body, pp=2)
    monkeypatch.setattr(Slot, "seal", seal)
    shutil.rmtree(tmp_path / "0")
    # Of generation 2, rank 1 has its buddy's state, and the buddy that had rank 1's is lost.
    for back, good, _ in came_back(tmp_path):
        assert (back.generation, back.lost, good) == (1, {0: 1}, True)


def test_a_changed_byte_in_a_replica_is_refused_a_hundred_times_of_a_hundred(tmp_path):
    draw = random.Random(49)
    state = kept(state_of(1))
    slot = Slot(tmp_path / "slot", size_of(state))
    slot.data.copy_(torch.arange(slot.data.numel()) % 251)
    slot.seal({"generation": 7, "checksum": slot.checksum(), "layout": None})
    header = slot.head.tolist()
    length = 8 + int.from_bytes(bytes(header[:4]), "little")
    refused = 0
    for _ in range(100):
        # In the header as far as it says something, or in the state.
        at = draw.choice([draw.randrange(length), HEADER + draw.randrange(slot.data.numel())])
        whole = bytearray((tmp_path / "slot").read_bytes())
        whole[at] ^= 1 << draw.randrange(8)
        (tmp_path / "changed").write_bytes(whole)
        refused += not Slot(tmp_path / "changed", slot.data.numel()).sound(7)
    assert slot.sound(7)
    assert not slot.sound(6)
    assert refused == 100


def test_a_damaged_replica_sends_all_ranks_to_the_generation_before(tmp_path):
    trained(tmp_path)
    shutil.rmtree(tmp_path / "1")
    for path in (tmp_path / "0").glob("*-1.*"):
        slot = Slot(path, path.stat().st_size - HEADER)
        if slot.header()["generation"] == 2:
            slot.data[5] ^= 1
    for back, good, _ in came_back(tmp_path):
        assert (back.generation, back.lost, good) == (1, {1: 0}, True)


def test_where_data_parallelism_keeps_states_equal_nothing_is_sent_and_a_peer_has_it(tmp_path):
    trained(tmp_path, sends=False, equal=True)
    assert sorted(path.name for path in (tmp_path / "1").iterdir()) == ["2-0.0", "2-0.1"]
    shutil.rmtree(tmp_path / "1")
    backs = came_back(tmp_path, sends=False, equal=True)
    assert [(back.generation, back.lost) for back, _, _ in backs] == [(2, {1: 0})] * 2
    assert backs[0][1]


# A clique has jump x factor ranks from its first to its last, and these divide the world; the checks refuse any other.
CLIQUES = [
    (world, jump, factor)
    for world in (8, 12, 24)
    for jump, factor in [(1, 2), (2, 2), (4, 2), (2, 3), (None, 2), (None, 4)]
    if world % ((jump or world // factor) * factor) == 0
]


@pytest.mark.parametrize("world, jump, factor", CLIQUES)
def test_cliques_are_those_of_the_resiliency_extension(world, jump, factor):
    """{n, n+J, ..., n+(F-1)J}, n = aJF + b: each rank is in one of them."""
    flags = {"replication": True, "replication_jump": jump, "replication_factor": factor}
    config = Config(world_size=world).with_fields(pipeline_model_parallel_size=world, **flags)
    jump = jump or world // factor
    sets, sends = sets_of(config)
    expected = [
        tuple(a * jump * factor + b + k * jump for k in range(factor))
        for a in range(world // (jump * factor))
        for b in range(jump)
    ]
    assert sends
    assert sorted(sets) == sorted(expected)


def test_memory_goes_with_the_launcher_and_a_full_one_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(slots, "SHARED", tmp_path)
    stale = tmp_path / f"megapipe-{os.getuid()}-1-1"
    stale.mkdir()
    code = (
        "import os, sys; from pathlib import Path; from megapipe.checkpoint.memory import slots\n"
        "slots.SHARED = Path(sys.argv[1])\n"
        "rank = os.fork()\n"
        "if not rank: print(slots.own_folder(), flush=True); os._exit(0)\n"
        "os.waitpid(rank, 0)\n"
        "rank = os.fork()\n"
        "if not rank: print(slots.own_folder(), flush=True); os._exit(0)\n"
        "os.waitpid(rank, 0)\n"
        "sys.stdin.read()"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    first, second = (Path(launcher.stdout.readline().strip()) for _ in range(2))
    assert first == second
    assert first.is_dir()
    assert not stale.exists()
    launcher.communicate()
    until = time.monotonic() + 120
    while first.parent.exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert not first.parent.exists()
    with pytest.raises(OSError, match=r"too large|No space"):
        Slot(tmp_path / "large", 1 << 60)
