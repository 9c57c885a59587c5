"""Runs of passes with --use-megatron-fsdp: the bits of training without it, and no more held than the clock says."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from short_run import config, datasets, run_of
from tiny import STYLES

from megapipe.checkpoint import shards
from megapipe.config import ParallelConfig
from megapipe.distributed.device import Gauge
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError, ScheduleError
from megapipe.optim.sharded.buffers import ShardedBuffers
from megapipe.pipeline_parallel.families import PASSES
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.plan import whole_step
from megapipe.schedule import Costs, Kind, build, simulate
from megapipe.schedule.families.sharding.sharded import UnshardedStages, with_sharded_weights
from megapipe.training.hooks import Callback, Hooks

from ..test_distributed import compare

FSDP = {"use_megatron_fsdp": True}
VOCABULARY = {"vocab_parallel_pipeline": True}.items()
GRADS = {**FSDP, "data_parallel_sharding_strategy": "optim_grads"}


@pytest.mark.parametrize(
    ("schedule", "pp", "ours", "flags"),
    [
        ("1f1b", 1, FSDP, {"bf16": True}),
        ("zb-v", 2, {**FSDP, "overlap_grad_reduce": True, "ddp_num_buckets": 2}, {"both": VOCABULARY}),
        ("interleaved", 2, {**GRADS, "overlap_grad_reduce": True, "overlap_param_gather": True}, {}),
        ("dualpipe", 2, {"use_torch_fsdp2": True}, {"bf16": True, "grad_reduce_in_bf16": True}),
    ],
)
def test_a_run_has_the_bits_of_one_without(schedule, pp, ours, flags):
    for plain, split in compare(2, pp, ours, style="gpt2", schedule=schedule, **flags):
        assert plain[0] == split[0]
        assert all(torch.equal(x, split[1][key]) for key, x in plain[1].items())


@pytest.mark.parametrize(
    ("schedule", "living"),
    [
        ("interleaved", UnshardedStages(1, 1)),
        ("interleaved", UnshardedStages(2, 1, ahead=True)),
        ("interleaved", UnshardedStages(3, 3)),
        ("zb-v", UnshardedStages(1, 1)),
        ("zb-v", UnshardedStages(2, 2)),
    ],
)
def test_a_rank_has_no_more_whole_than_the_clock_says(schedule, living, monkeypatch):
    """Of storages as they are after each change: weights of 2 bytes, gradients of 4. On a V the head's is the embedding
    of its own rank, and the first stage is whole with the last, once: the clock had both, 16% too much."""
    counted: dict[int, list[int]] = {}
    tied = schedule == "zb-v"
    add = Gauge.add

    def counting(live: Gauge, size: int) -> None:
        add(live, size)
        if id(live) in counted:
            held = [x.untyped_storage().nbytes() for b in buffers[id(live)] for x in (b.model, b.grads)]
            assert sum(held) == live.bytes
            counted[id(live)].append(sum(held))

    buffers: dict[int, list[ShardedBuffers]] = {}

    def peak(mesh: ProcessMesh) -> tuple[int, float]:
        training = run_of(mesh, base)
        optimizer, stages = training.run.optimizer, training.run.stages
        on_ranks = mesh.pp.gather_json([sum(b.model.numel() for b in chunk) for chunk in optimizer.chunks])
        plain = build(schedule, 2, 4, chunks=None if tied else 3)
        by_stage = [on_ranks[r].pop(0) for r in plain.placement.rank_of]  # stages of a rank are in order
        lent = (0.0, 0.0, 0.0, 2.0 * by_stage[0]) if tied else 0.0
        bytes_of = {"mem_a": tuple(2 * n for n in by_stage), "mem_g": tuple(4 * n for n in by_stage), "mem_lent": lent}
        free = Costs(mem_b=0, mem_w=0, **bytes_of)
        table = with_sharded_weights(plain, living=living)
        stages.follow(table, free)
        buffers[id(optimizer.live)] = optimizer.buffers
        counted[id(optimizer.live)] = []
        training.driver.whole()
        return max(counted[id(optimizer.live)]), simulate(table, free).peak[mesh.pp.rank]

    monkeypatch.setattr(Gauge, "add", counting)
    model = replace(STYLES["gpt2"], num_layers=8 if tied else 6, untie_embeddings_and_output_weights=not tied)
    plain = config(model, dp=2, pp=2, schedule=schedule, bf16=True)
    parallel = replace(plain.parallel, num_virtual_stages_per_pipeline_rank=None if tied else 3, **FSDP)
    base = replace(plain, parallel=parallel, batch=replace(plain.batch, micro_batch_size=1))
    datasets()
    for held, predicted in run_threads(peak, dp=2, pp=2):
        assert held == pytest.approx(predicted, rel=0.01)


def test_a_callback_sees_whole_weights():
    class Reads(Callback):
        def after_step(self, run, result):
            self.seen = {name: p.detach().clone() for name, p in run.optimizer.params.items()}

    def seen(mesh: ProcessMesh, parallel: dict) -> dict[str, torch.Tensor]:
        plain, reads = config(STYLES["gpt2"], dp=2, bf16=True), Reads()
        flags = replace(plain, parallel=replace(plain.parallel, **parallel))
        training = run_of(mesh, flags, Hooks(callbacks=(reads, Callback())))
        training.driver.ended(training.driver.whole())
        assert not training.run.optimizer.live.bytes
        return reads.seen

    datasets()
    whole, shares = (run_threads(partial(seen, parallel=parallel), dp=2)[0] for parallel in ({}, FSDP))
    assert all(torch.equal(x, shares[name]) for name, x in whole.items())


def test_a_checkpoint_has_a_tied_weight_that_a_depth_repeats_on_a_rank_without_its_owner():
    """Head and depth of the last rank have one memory. The depth's view of it, without values, was saved and loaded."""

    def saved(mesh: ProcessMesh, parallel: dict[str, bool]) -> dict[str, torch.Tensor]:
        plain = config(replace(STYLES["gpt2"], mtp_num_layers=1), dp=2, pp=2)
        run = run_of(mesh, replace(plain, parallel=replace(plain.parallel, **parallel))).run
        of_rank = run.optimizer.saved()
        tensors = shards.tensors_of(run.modules, of_rank, mesh)
        shards.fill(Path("none"), tensors, of_rank.shards, tensors.keys(), mesh)
        return {key: x.clone() for key, x in tensors.items()}

    datasets()
    plain, sharded = (run_threads(partial(saved, parallel=parallel), dp=2, pp=2) for parallel in ({}, FSDP))
    for whole, gathered in zip(plain, sharded, strict=True):
        assert whole.keys() == gathered.keys()
        assert [key for key, x in whole.items() if not torch.equal(x, gathered[key])] == []


def test_strategies_split_what_their_names_say():
    names = ("no_shard", "optim", "optim_grads", "optim_grads_params")
    par = [ParallelConfig(**FSDP, data_parallel_sharding_strategy=name) for name in names]
    par += [ParallelConfig(use_torch_fsdp2=True), ParallelConfig(use_distributed_optimizer=True), ParallelConfig()]
    split = [(p.splits_optimizer, p.shards_grads, p.shards_weights) for p in par]
    three, one, none = (True, True, True), (True, False, False), (False, False, False)
    assert split == [none, one, (True, True, False), three, three, one, none]


def test_a_table_for_shares_needs_their_flag():
    base = config(STYLES["gpt2"], dp=2, pp=2)
    table = with_sharded_weights(build("1f1b", 2, 4))
    asked = replace(base, parallel=replace(base.parallel, **FSDP))
    assert whole_step(table, asked) == table
    with pytest.raises(ScheduleError, match=r"1f1b has AF, RS, .*--data-parallel-sharding-strategy optim_grads_params"):
        whole_step(table, base)


@pytest.mark.parametrize("kind", [Kind.AF, Kind.AB, Kind.RS, Kind.A, Kind.G])
def test_a_loop_without_megapipes_optimizer_refuses_such_passes(kind):
    with pytest.raises(ConfigError, match=r"has passes of a stage's weights .* Leave them out of the table"):
        PASSES[kind](SimpleNamespace(weights=None), 0, [])
