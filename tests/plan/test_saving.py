"""The size of a checkpoint that the plan tells is that of the tensors on the disk."""

from __future__ import annotations

import struct
import time
from dataclasses import replace

import pytest
import short_run
from tiny import STYLES

from megapipe.commands.plan.verdict import Machine
from megapipe.config import CheckpointConfig, Config
from megapipe.distributed.mesh import ProcessMesh
from megapipe.flags.parse import parse
from megapipe.models.provider import gpt_provider
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.plan import GIB, make_plan
from megapipe.plan.table import checkpoint_bytes, checkpoint_line, gathered_bytes
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


def test_replicas_divide_the_writing_and_zero_1_gathers_the_state_whole():
    alone = checkpoint_bytes(make_plan(planned("llama")), planned("llama"))
    two, zero = planned("llama", dp=2), planned("llama", dp=2, zero=True)
    size, most = checkpoint_bytes(make_plan(two), two)
    assert (size, most) == (alone[0], alone[1] / 2)
    assert checkpoint_bytes(make_plan(zero), zero) == (size, most + size * 8 / 12)
    assert checkpoint_line(make_plan(two), two) == ""


# Buffers round small tensors up, such as the biases of gpt2. Its head is its embedding, once.
@pytest.mark.parametrize(("style", "off"), [("llama", 0.01), ("gpt2", 0.02)])
def test_a_run_with_shards_of_weights_starts_with_all_of_them_and_the_plan_counts_that(style, off):
    """A search put 87 GiB of weights on devices of 80."""
    config = planned(style, dp=2, bf16=True)
    sharded = replace(config, parallel=replace(config.parallel, use_megatron_fsdp=True))

    def gathered(mesh):
        optimizer = short_run.run_of(mesh, sharded).run.optimizer
        # As a start and a save do.
        with optimizer.gathers.whole():
            return optimizer.live.bytes

    plan = make_plan(sharded)
    more = gathered_bytes(plan, sharded) - max(plan.state_bytes)
    assert more == pytest.approx(run_threads(gathered, dp=2)[0], rel=off)
    once = sum(work.parameters for work in plan.works) - plan.tied * plan.vocab_weights
    assert more == 2 * once


def test_what_a_start_needs_is_not_said_to_be_spare():
    """A page said what a step leaves. A start with weights in shards leaves less: it has all stages of a rank."""
    flags = (
        "--num-layers 16 --hidden-size 256 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
        "--micro-batch-size 1 --global-batch-size 8 --train-iters 1 --lr 1e-3 --mock-data "
        "--tokenizer-type NullTokenizer --vocab-size 99 --padded-vocab-size 128 --use-megatron-fsdp --bf16 "
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 8 --pipeline-schedule breadth-first "
        "--memory-limit-gib 0.024"
    )
    config = replace(parse(Config, flags.split()), world_size=16)
    plan = make_plan(config)
    peak, start = max(plan.peak_bytes), gathered_bytes(plan, config)
    assert peak < start
    said = Machine(2 * start).fits(plan, config)
    assert f"{start / GIB:.3g} to start and to save: fits with {start / GIB:.3g} to spare" in said
