"""Ranks that end in the middle of a copy, of a return or of a return in another world lose no state that was whole.

A rank is a thread here, with the files of a real run. It ends at a drawn operation on these: what a process had written
by then is what SIGKILL leaves of shared memory.
"""

import os
import random
import shutil
import threading
import time

import pytest
import torch

from megapipe.checkpoint.memory.back import go_back
from megapipe.checkpoint.memory.cliques import Clique, sets_of
from megapipe.checkpoint.memory.copies import Copies
from megapipe.checkpoint.memory.relayout import Kept, pieces, size_of
from megapipe.checkpoint.memory.slots import Slot
from megapipe.config import Config
from megapipe.distributed.axis import Axis
from megapipe.pipeline_parallel.threads import run_threads

FILLED = 64 * 7
NIGHTLY = bool(os.environ.get("MEGAPIPE_NIGHTLY"))


class Killed(Exception):
    """A rank has ended."""


def config_of(world):
    return Config(world_size=world).with_fields(use_distributed_optimizer=True, replication=True, elastic=True)


def whole(step):
    """A flat tensor of all ranks after so many steps."""
    return torch.arange(FILLED) * 1.5 + 1000 * step


class Rank:
    """A data-parallel rank with a share of a flat tensor, in a process that has the folder of its place."""

    def __init__(self, mesh, folder, places, step=0):
        self.world, self.step, self.rank = mesh.world, step, mesh.world.rank
        self.config = config_of(len(places))
        self.share = -(-FILLED // (64 * len(places))) * 64
        self.tensor = torch.zeros(self.share)
        self.set(step)
        self.state = [[Kept(self.tensor, FILLED)]]
        self.folder = folder / str(places[self.rank])
        self.folder.mkdir(exist_ok=True)
        own = next(ranks for ranks in sets_of(self.config)[0] if self.rank in ranks)
        # Members of a clique are numbered in the group of all ranks.
        axis = Axis(own.index(self.rank), len(own), own, Numbered(mesh.world.group, own))
        sizes = [size_of(self.state)] * len(own)
        self.copies = Copies(self.folder, Clique(axis, True), sizes, self.state, 1, len(places))
        self.copies.content = lambda: {"iteration": self.step}

    def set(self, step):
        padded = torch.cat([whole(step), torch.zeros(self.share * self.world.size - FILLED)])
        self.tensor.copy_(padded[self.rank * self.share :][: self.share])

    def holds(self, step):
        now = self.tensor.clone()
        self.set(step)
        return torch.equal(now, self.tensor)

    def back(self):
        find = lambda before: pieces(self.state, self.rank, self.config, before)  # noqa: E731
        back = go_back(self.copies, self.world, lambda: self.world.group, find)
        self.step = (back and back.generation) or 0
        return back

    def train(self, steps):
        for _ in range(steps):
            self.copies.now()
            self.step += 1
            self.set(self.step)
            self.world.barrier()


class Numbered:
    """A group of some ranks, by messages of the group of all."""

    def __init__(self, group, ranks):
        self.group, self.ranks = group, ranks

    def send(self, tensors, to, tag):
        return self.group.send(tensors, self.ranks[to], tag)

    def recv(self, tensors, source, tag):
        return self.group.recv(tensors, self.ranks[source], tag)


class Cut:
    """Ends a drawn rank at a drawn operation: before a header is dropped or written, or half of a checksum's bytes."""

    def __init__(self, monkeypatch, folder):
        self.left, self.place, self.passed = -1, -1, 0
        self.lock = threading.Lock()
        for name in ("drop", "seal", "checksum"):
            monkeypatch.setattr(Slot, name, self.counted(getattr(Slot, name)))
        monkeypatch.setattr(Slot, "__init__", self.placed(Slot.__init__, folder))

    def placed(self, made, folder):
        def call(slot, path, size):
            made(slot, path, size)
            slot.place = int(path.relative_to(folder).parts[0])

        return call

    def counted(self, function):
        def call(slot, *args):
            with self.lock:
                if slot.place == self.place:
                    self.passed += 1
                    if self.left >= 0:
                        self.left -= 1
                        if self.left < 0:
                            self.left = 0
                            raise Killed
            return function(slot, *args)

        return call

    def of(self, place, after):
        self.place, self.left, self.passed = place, after, 0


def run(body, ranks, *, ends=False):
    """Run ranks, of which one may end; return what they return, None if one has ended."""
    before = threading.active_count()
    try:
        return run_threads(body, dp=ranks, timeout_s=2 if ends else 60)
    except (Killed, RuntimeError):
        # A rank that lost its peer may be seen first.
        if not ends:
            raise
        return None
    finally:
        # The others still wait for the one that has ended, and must not write to what is found next.
        until = time.monotonic() + 60
        while threading.active_count() > before and time.monotonic() < until:
            time.sleep(0.01)


@pytest.mark.parametrize("seed", range(50 if NIGHTLY else 10))
def test_a_rank_that_ends_at_any_moment_loses_at_most_the_step_it_was_in(tmp_path, monkeypatch, seed):
    draw = random.Random(seed)
    cut = Cut(monkeypatch, tmp_path)
    ranks = draw.choice([2, 3, 4])
    places = list(range(ranks))
    run(lambda mesh: Rank(mesh, tmp_path, places).train(3), ranks)
    where = draw.choice(["copy", "return", "other world"])
    cut.of(draw.choice(places), draw.randrange(8))
    now = places
    if where == "copy":
        run(lambda mesh: (rank := Rank(mesh, tmp_path, places, 3)).back() and rank.train(2), ranks, ends=True)
    else:
        # A rank has lost its memory, and another one ends while all go back.
        gone = draw.choice([place for place in places if place != cut.place])
        shutil.rmtree(tmp_path / str(gone))
        if where == "other world" and ranks > 2:
            now = [place for place in places if place != gone]
        run(lambda mesh: Rank(mesh, tmp_path, now).back(), len(now), ends=True)
    cut.of(-1, -1)
    draw.shuffle(now)

    def body(mesh):
        rank = Rank(mesh, tmp_path, now)
        back = rank.back()
        return back.generation, back.generation is not None and rank.holds(back.generation)

    # A memory that one rank alone had may be lost with the second one: only then is there nothing.
    found = run(body, len(now))
    assert {good for _, good in found} == {True}
    assert {n for n, _ in found} <= {2, 3, 4}


@pytest.mark.parametrize("seed", range(20 if NIGHTLY else 4))
def test_two_buddies_that_are_lost_are_named(tmp_path, seed):
    draw = random.Random(seed)
    places = list(range(4))
    steps = draw.randrange(2, 4)
    run(lambda mesh: Rank(mesh, tmp_path, places).train(steps), 4)
    pair = draw.choice([(0, 2), (1, 3)])
    for place in pair:
        shutil.rmtree(tmp_path / str(place))
    backs = run(lambda mesh: Rank(mesh, tmp_path, places).back(), 4)
    assert [(back.generation, back.lost) for back in backs] == [(None, dict.fromkeys(pair))] * 4
    # Nothing of that run stays, which goes on from disk.
    assert run(lambda mesh: Rank(mesh, tmp_path, places).back(), 4) == [None] * 4
