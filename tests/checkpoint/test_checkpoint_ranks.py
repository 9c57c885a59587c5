"""A checkpoint of any layout is gone on from under any other, bit for bit, and all ranks stop together."""

import os
import re
import struct
import time

import pytest
import torch
import toy_run
from rank_pool import WORLD
from toy_run import SINGLE, Run

from megapipe.checkpoint import commit
from megapipe.config import CheckpointConfig


@pytest.mark.parametrize(
    ("before", "after", "dtype", "shares"),
    [
        ((2, 1, 2), (2, 2, 1), torch.float32, ("nothing", "all")),
        ((1, 4, 1), (1, 1, 4), torch.float32, ("optimizer", "nothing")),
        ((4, 1, 1), (1, 2, 2), torch.bfloat16, ("nothing", "nothing")),
        ((1, 2, 2), (4, 1, 1), torch.bfloat16, ("all", "nothing")),
        ((1, 4, 1), (1, 2, 2), torch.bfloat16, ("optimizer", "all")),
        ((2, 2, 1, 1, 2), (1, 4, 1, 1, 4), torch.float32, ("all", "nothing")),
        ((1, 2, 2, 1, 2), (2, 1, 2, 1, 2, 1), torch.bfloat16, ("nothing", "optimizer")),
        ((1, 2, 2), (1, 4, 1, 1, 2, 2), torch.float32, ("all", "optimizer")),
    ],
)
def test_any_layout_goes_on_from_any_other_bit_for_bit(pool, tmp_path, before, after, dtype, shares):
    """Layouts are (pp, dp, tp, cp, ep, etp), experts split with all else by default; `shares` says what each of the two
    runs splits over dp: nothing, the optimizer's state (ZeRO-1), or all (ZeRO-3)."""
    for wrong, counters in pool.run(toy_run.reshard, (before, after), tmp_path, dtype, shares):
        assert wrong == []
        assert counters == (2, 16, 2)


@pytest.mark.parametrize("layouts", [((1, 2, 2), (1, 2, 2)), ((2, 1, 2), (1, 2, 2, 1, 2, 2))])
def test_state_on_the_host_goes_on_where_the_mesh_is_of_a_gpu(pool, tmp_path, layouts):
    """ZeRO-1's state of split parameters was read into copies there: moments stayed zero, main weights drawn."""
    for wrong, counters in pool.run(toy_run.reshard_on_a_gpu, layouts, tmp_path):
        assert wrong == []
        assert counters == (2, 16, 2)


def test_one_process_goes_on_from_many(pool, tmp_path):
    folder = pool.run(toy_run.save, [(2, 1, 2)], tmp_path)[0]
    run = Run(SINGLE)
    run.load(folder)
    assert run.train(3, 4).differing(Run(SINGLE).train(1, 4)) == []


@pytest.mark.parametrize("mesh", [(2, 1, 2), (1, 4, 1)])
def test_what_processes_beside_the_ranks_have_written_is_gone_on_from(pool, tmp_path, mesh):
    assert pool.run(toy_run.save_behind, [mesh], tmp_path) == [4] * WORLD
    run = Run(SINGLE)
    run.load(tmp_path / "iter_0000004")
    assert run.differing(Run(SINGLE).train(1, 4)) == []


def test_many_processes_go_on_from_one(pool, tmp_path):
    folder = Run(SINGLE).train(1, 2).save(tmp_path, 2)
    assert pool.run(toy_run.load, [(2, 1, 2)], folder) == [[]] * WORLD


def test_data_parallel_replicas_are_written_once(pool, tmp_path):
    whole = Run(SINGLE).save(tmp_path / "one", 1)
    folder = pool.run(toy_run.save, [(1, 4, 1)], tmp_path / "four")[0]

    def tensor_bytes(folder):
        heads = [(path, struct.unpack("<Q", path.read_bytes()[:8])[0]) for path in folder.glob("*.safetensors")]
        return sum(path.stat().st_size - 8 - head for path, head in heads)

    assert tensor_bytes(folder) == tensor_bytes(whole)


def test_an_error_on_one_rank_stops_all_with_the_same_text(pool, tmp_path):
    text = "a shard: No space left on device"
    assert pool.run(toy_run.failing_save, [(2, 1, 2)], tmp_path / "full") == [(text,)] * WORLD
    assert os.listdir(tmp_path / "full") == []
    folder = pool.run(toy_run.save, [(2, 1, 2)], tmp_path)[0]
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-1])
    size = shard.stat().st_size
    text = f"{shard} has {size} bytes, not {size + 1}. Load another iteration with --ckpt-step"
    assert pool.run(toy_run.damaged_load, [(1, 1, 4)], folder) == [(text,)] * WORLD


@pytest.mark.parametrize(
    ("what", "waits"),
    [
        ("memory", True),
        ("room", False),
        ("copy", True),
        ("file", True),
        ("memory", False),
        ("writer", False),
        ("own memory", False),
    ],
)
def test_a_save_that_fails_on_some_ranks_fails_on_all_with_the_reason_of_each(pool, tmp_path, what, waits):
    """A rank without memory for what it writes left the others in the gathering of shards until the time-out."""
    begun = time.monotonic()
    for found, left, there in pool.run(toy_run.failing_stream, [(1, 4, 1)], tmp_path, what, waits):
        texts = [re.sub(r"tmp-\w+", "tmp", text).partition(" (")[0] for text in found]
        assert texts == toy_run.told(tmp_path / "iter_0000004.tmp", what)
        assert left == ["iter_0000002", commit.POINTER]
        assert there == [2, 6]
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("shares", ["nothing", "all"])
@pytest.mark.parametrize("waits", [True, False])
def test_a_disk_that_is_full_in_a_save_leaves_the_last_checkpoint_and_the_next_save_works(
    pool, tmp_path, shares, waits
):
    """Whether a rank writes its own tensors or what it has gathered of shards: the same words, and the same after."""
    begun = time.monotonic()
    for found, left, wrong in pool.run(toy_run.full_disk, [(1, 2, 2)], tmp_path, shares, waits):
        texts = {re.sub(r"tmp-\w+", "tmp", text).partition(" (")[0] for text in found}
        folder = tmp_path / "iter_0000004.tmp"
        if waits:
            assert texts == {f"{folder}, on rank 2: [Errno 27] File too large"}
        else:
            others = "iteration 4: another rank could not write its part"
            assert texts == {f"iteration 4: {folder}: [Errno 27] File too large", others}
        assert left == ["iter_0000002", commit.POINTER]
        assert wrong == []
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("what", ["read", "share"])
def test_a_load_that_fails_on_some_ranks_fails_on_all_with_the_reason_of_each(pool, tmp_path, what):
    folder = pool.run(toy_run.save, [(1, 4, 1)], tmp_path)[0]
    for found, wrong in pool.run(toy_run.failing_read, [(1, 4, 1)], folder, what):
        assert list(found) == toy_run.told(folder, what)
        assert wrong == []


def test_a_rank_without_memory_for_saves_beside_steps_stops_all_with_the_same_text(pool, tmp_path):
    """It was that rank's traceback, and the others waited for it until the time-out."""
    text = "rank 2's memory: Cannot allocate memory"
    assert pool.run(toy_run.unlearned_save, [(2, 1, 2)], tmp_path) == [(text,)] * WORLD


def test_all_ranks_find_what_the_first_finds(pool, tmp_path):
    config = CheckpointConfig(load=str(tmp_path))
    assert pool.run(toy_run.find, [(1, 4, 1)], config) == [None] * WORLD
    folder = pool.run(toy_run.save, [(1, 4, 1)], tmp_path)[0]
    assert pool.run(toy_run.find, [(1, 4, 1)], config) == [folder] * WORLD
