"""Collectives of CPU ranks on one host go through shared memory, and give what gloo gives."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from programs import start_ranks

from megapipe.distributed import shared_memory
from megapipe.pipeline_parallel.threads import run_threads

LARGE = 64  # rows of 128 elements


def tensors(rank, dtype, rows=LARGE):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rows, 128, generator=generator).mul(100).to(dtype)


def collectives(mesh, dtype, rows=LARGE):
    """Of both ways: what came out, and how many exchanges went through shared memory."""
    tp, gloo = mesh.tp, replace(mesh.tp, shared=None)
    x = tensors(tp.rank, dtype, rows)
    results = [
        (axis.all_reduce(x.clone()), axis.all_gather(x), axis.reduce_scatter(x), axis.all_reduce(x.clone(), "max"))
        for axis in (tp, gloo)
    ]
    return *results, tp.shared._started


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_two_ranks_get_the_bits_that_gloo_gives(dtype):
    for ours, gloos, exchanges in run_threads(lambda mesh: collectives(mesh, dtype), tp=2):
        assert exchanges == 4
        for mine, theirs in zip(ours, gloos, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_ranks_all_get_the_sum_in_rank_order(dtype):
    parts = [tensors(rank, dtype) for rank in range(4)]
    expected = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    for rank, (ours, _, _) in enumerate(run_threads(lambda mesh: collectives(mesh, dtype), tp=4)):
        assert torch.equal(ours[0], expected)
        assert torch.equal(ours[1], torch.cat(parts))
        assert torch.equal(ours[2], expected.chunk(4)[rank])
        assert torch.equal(ours[3], torch.stack(parts).amax(0))


@pytest.mark.parametrize("rows", [0, 2])
def test_small_tensors_take_one_segment_in_turn_with_large_ones(rows):
    def body(mesh):
        results = collectives(mesh, torch.float32, rows)
        return *results, len(mesh.tp.shared._slots), collectives(mesh, torch.float32)[2], len(mesh.tp.shared._slots)

    for ours, gloos, *counts in run_threads(body, tp=2):
        assert counts == [4, 2, 8, 2]
        for mine, theirs in zip(ours, gloos, strict=True):
            assert torch.equal(mine, theirs)


def test_a_view_is_summed_where_it_lies():
    def body(mesh):
        x = tensors(mesh.tp.rank, torch.float32)
        mesh.tp.all_reduce(x.t())
        return x

    expected = sum(tensors(rank, torch.float32) for rank in range(2))
    assert all(torch.equal(x, expected) for x in run_threads(body, tp=2))


def test_exchanges_under_way_at_once_do_not_mix_in_any_order_of_their_ends():
    def body(mesh):
        rank = mesh.tp.rank
        given = [tensors(10 * n + rank, torch.float32, LARGE + 32 * n) for n in range(5)]
        pending = [mesh.tp.start_all_reduce(x) for x in given]
        for n in (3, 0, 4, 1, 2):
            pending[n].wait()
        return given

    for given in run_threads(body, tp=2):
        for n, x in enumerate(given):
            rows = LARGE + 32 * n
            assert torch.equal(x, tensors(10 * n, torch.float32, rows) + tensors(10 * n + 1, torch.float32, rows))


def test_one_after_the_other_they_take_two_segments_in_turn():
    def body(mesh):
        total = torch.zeros(())
        for n in range(50):
            if n % 7 == mesh.tp.rank:
                time.sleep(0.002)  # neither rank is always the first
            total += mesh.tp.all_reduce(torch.full((LARGE, 128), float(n + mesh.tp.rank))).mean()
        return total.item(), len(mesh.tp.shared._slots)

    assert run_threads(body, tp=2) == [(sum(2 * n + 1 for n in range(50)), 2)] * 2


def refuse(monkeypatch, owner, name, nth, error):
    """The nth call of all ranks together fails."""
    real, calls = getattr(owner, name), itertools.count()

    def call(*args):
        if next(calls) == nth:
            raise error
        return real(*args)

    monkeypatch.setattr(owner, name, call, raising=False)


@pytest.mark.parametrize(
    "owner, name, nth, error",
    [
        (shared_memory, "_open", 0, FileNotFoundError()),  # as in two containers
        (shared_memory, "_where", 1, FileNotFoundError()),  # a sandbox that hides /proc
        (os, "pipe", 3, OSError(errno.EMFILE, "Too many open files")),
        (os, "memfd_create", 0, PermissionError()),  # seccomp
        (os, "memfd_create", 1, AttributeError()),  # a Python without it
        (os, "ftruncate", 0, OSError(errno.ENOSPC, "No space left on device")),
        (shared_memory, "_open", 6, OSError(errno.EMFILE, "Too many open files")),  # a segment, not a pipe
        (mmap, "mmap", 1, OSError(errno.ENOMEM, "Cannot allocate memory")),
    ],
)
def test_if_one_rank_cannot_have_it_all_stay_with_gloo(monkeypatch, owner, name, nth, error):
    """Only one call of one rank fails: the other has all that it asked for."""
    refuse(monkeypatch, owner, name, nth, error)
    for ours, gloos, exchanges in run_threads(lambda mesh: collectives(mesh, torch.float32), tp=2, timeout_s=10):
        assert exchanges == 0
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, gloos, strict=True))


def test_a_larger_tensor_that_finds_no_room_sends_all_that_follow_to_gloo(monkeypatch):
    def body(mesh):
        gloo = replace(mesh.tp, shared=None)
        first = mesh.tp.start_all_reduce(torch.ones(LARGE, 128))
        gloo.barrier()
        refuse(monkeypatch, os, "memfd_create", 0, OSError(errno.ENFILE, "Too many open files in system"))
        gloo.barrier()
        sums = [
            mesh.tp.all_reduce(torch.ones(4 * LARGE, 128)),
            first.wait(),
            mesh.tp.all_reduce(torch.ones(LARGE, 128)),
        ]
        return [x.unique().tolist() for x in sums], mesh.tp.shared._started

    assert run_threads(body, tp=2, timeout_s=10) == [([[2.0]] * 3, 1)] * 2


def test_a_rank_that_never_comes_is_waited_for_no_longer_than_a_message():
    """Outside a run nothing else ends it: a peer that is stopped kept the reader for ever."""

    over = threading.Event()

    def body(mesh):
        for _ in range(3):  # room is made
            mesh.tp.all_reduce(torch.ones(LARGE, 128))
        mesh.position.limit_s = 0.2
        if mesh.tp.rank == 1:
            over.wait(20)
        else:
            with pytest.raises(
                dist.DistNetworkError, match=r"Timed out after 0\.2 s of waiting for rank 1 of the tensor"
            ):
                mesh.tp.all_reduce(torch.ones(LARGE, 128))
            over.set()

    run_threads(body, tp=2)


def test_a_rank_that_ended_within_an_exchange_is_missed_although_its_tensor_is_there():
    ended = threading.Event()

    def body(mesh):
        shared, x = mesh.tp.shared, torch.ones(LARGE, 128)
        for _ in range(3):  # room is made
            mesh.tp.all_reduce(x)
        if mesh.tp.rank == 1:
            shared.start(x, lambda views: None)
            nobody = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nobody, shared._peers[0].inbox)  # as a process that ends closes it
            os.close(nobody)
            ended.set()
        else:
            ended.wait(20)
            with pytest.raises(dist.DistNetworkError, match="rank 1 of the tensor-parallel group has closed its pipe"):
                shared.start(x, lambda views: None)

    run_threads(body, tp=2)


def test_what_lies_elsewhere_under_the_same_path_is_not_opened():
    """As on two hosts whose processes have the same numbers."""
    inbox, outbox = os.pipe()
    path, *identity = shared_memory._where(outbox)
    for n in range(len(identity)):
        other = [*identity]
        other[n] = "another"
        with pytest.raises(FileNotFoundError):
            shared_memory._open([path, *other], os.O_WRONLY)
    os.close(shared_memory._open([path, *identity], os.O_WRONLY))
    os.close(inbox)
    os.close(outbox)


RANK = """
import os, signal, sys, time, torch
from megapipe.config import ParallelConfig
from megapipe.distributed.axis import CPU
from megapipe.distributed.mesh import ProcessMesh

mesh = ProcessMesh.create(ParallelConfig(tensor_model_parallel_size=2), CPU)
x = torch.ones(64, 128)
mesh.tp.all_reduce(mesh.tp.all_reduce(x))
print(x[0, 0].item(), len(mesh.tp.shared._slots), flush=True)
if mesh.tp.rank == 1:
    time.sleep(0.5)  # the other waits
    os.kill(os.getpid(), signal.SIGKILL)
mesh.tp.all_reduce(x)
"""


def test_a_rank_that_waits_for_a_killed_one_gets_an_error_at_once(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    ranks = start_ranks(2, [script], tmp_path)
    assert ranks[1].wait() == -signal.SIGKILL
    assert ranks[0].wait(30) == 1
    assert [rank.log.read_text().splitlines()[0] for rank in ranks] == ["4.0 2"] * 2
    assert "DistNetworkError: rank 1 of the tensor-parallel group has closed its pipe" in ranks[0].log.read_text()


def test_a_killed_rank_of_the_experts_is_not_said_to_be_tensor_parallel(tmp_path):
    """kill -9 of rank 1 at ep 2, tp 1 said "the tensor-parallel group", which does not exist there."""
    script = tmp_path / "rank.py"
    experts = RANK.replace("tensor_model_parallel_size", "expert_model_parallel_size")
    script.write_text(experts.replace("mesh.tp", "mesh.experts"))
    ranks = start_ranks(2, [script], tmp_path)
    assert ranks[1].wait() == -signal.SIGKILL
    assert ranks[0].wait(30) == 1
    said = "DistNetworkError: rank 1 of the group of experts has closed its pipe"
    assert said in ranks[0].log.read_text()
