"""The size of a checkpoint that the plan tells is that of the tensors on the disk."""

from __future__ import annotations

import struct
import time
from dataclasses import replace

import pytest
import short_run
from tiny import STYLES

from megapipe.config import CheckpointConfig, Config
from megapipe.distributed.mesh import ProcessMesh
from megapipe.models.provider import gpt_provider
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.plan import make_plan
from megapipe.plan.table import checkpoint_bytes, checkpoint_line, waiting_bytes
from megapipe.training.forward_step import forward_step
from megapipe.training.pretrain import Training


def planned(style: str, dp: int = 1, zero: bool = False, **train) -> Config:
    config = short_run.config(STYLES[style], dp=dp, **train)
    return replace(config, parallel=replace(config.parallel, use_distributed_optimizer=zero))


@pytest.mark.parametrize(("style", "train"), [("gpt2", {}), ("llama", {"bf16": True})])
@pytest.mark.parametrize("no_save_optim", [False, True])
def test_the_plan_tells_the_bytes_of_the_tensors_on_the_disk(tmp_path, capsys, style, train, no_save_optim):
    flags = CheckpointConfig(save=str(tmp_path), save_interval=100, no_save_optim=no_save_optim)
    config = replace(planned(style, exit_interval=1, **train), checkpoint=flags)
    data, one = short_run.datasets(), ProcessMesh.single()
    Training(config, one, gpt_provider, forward_step, data, 126, time.monotonic()).train()
    size, most = checkpoint_bytes(make_plan(config), config)
    shards = [path.read_bytes() for path in tmp_path.glob("iter_*/*.safetensors")]
    assert sum(len(shard) - 8 - struct.unpack("<Q", shard[:8])[0] for shard in shards) == size
    # A tied weight is written once, and its rank has it once.
    assert most == 2 * size
    assert checkpoint_line(make_plan(config), config) in capsys.readouterr().out


@pytest.mark.parametrize("zero", [False, True])
def test_a_save_is_refused_for_the_bytes_on_the_disk_however_the_optimizer_state_is_divided(
    tmp_path, monkeypatch, zero
):
    """Under ZeRO-1 only a rank's shard of the optimizer state was asked for, and the first save did not fit."""
    asked: list[int] = []
    monkeypatch.setattr("megapipe.training.pretrain.check_save", lambda *given: asked.append(given[-1]))
    flags = CheckpointConfig(save=str(tmp_path), save_interval=100)
    config = replace(planned("llama", dp=2, zero=zero, exit_interval=1, bf16=True), checkpoint=flags)
    run_threads(lambda mesh: short_run.run_of(mesh, config).train(), dp=2)
    written = sum(path.stat().st_size for path in tmp_path.glob("iter_*/*.safetensors"))
    assert asked == [checkpoint_bytes(make_plan(config), config)[0]] * 2
    assert asked[0] == pytest.approx(written, rel=0.05)


def test_replicas_divide_the_writing_with_zero_1_and_without():
    alone = checkpoint_bytes(make_plan(planned("llama")), planned("llama"))
    two, zero = planned("llama", dp=2), planned("llama", dp=2, zero=True)
    size, most = checkpoint_bytes(make_plan(two), two)
    assert (size, most) == (alone[0], alone[1] / 2)
    assert checkpoint_bytes(make_plan(zero), zero) == (size, most)
    assert checkpoint_line(make_plan(two), two) == ""


def test_a_run_with_shards_of_weights_starts_with_one_stage_of_them_on_a_device_and_the_rest_on_the_host():
    """A search put 87 GiB of weights on devices of 80: a start and a save had the weights of all stages."""
    config = short_run.config(STYLES["llama"], dp=2, schedule="breadth-first", bf16=True)
    chunks = {"num_virtual_stages_per_pipeline_rank": 2}
    sharded = replace(config, parallel=replace(config.parallel, use_megatron_fsdp=True, **chunks))
    plan = make_plan(sharded)

    def full(mesh):
        optimizer = short_run.run_of(mesh, sharded).run.optimizer
        started = optimizer.live.peak
        gathered = []
        for b in optimizer.buffers:
            b.gathered = lambda *given, real=b.gathered: gathered.append(real(*given)) or gathered[-1]
        optimizer.state()
        return started, max(x.nbytes for x in gathered), len(gathered)

    largest = max(work.parameters for work in plan.works)
    for started, gathered, count in run_threads(full, dp=2):
        # Tensors are rounded up to 64 elements. One stage has weights in 2 bytes and gradients in 4, and one kind of
        # state in 4.
        assert started == pytest.approx(6 * largest, rel=0.02)
        assert gathered == pytest.approx(4 * largest, rel=0.02)
        assert count == 4 * len(plan.works)
    assert waiting_bytes(plan, sharded) == 2 * sum(work.parameters for work in plan.works)
    assert waiting_bytes(plan, planned("llama", dp=2, zero=True)) == 0
