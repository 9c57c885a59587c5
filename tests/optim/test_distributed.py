"""ZeRO-1: the same bits as plain data parallelism, with 1/dp of the optimizer state."""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from short_run import config, datasets, run_of
from tiny import STYLES
from torch import nn

from megapipe.config import OptimizerConfig
from megapipe.distributed.mesh import ProcessMesh
from megapipe.optim.optimizer import Optimizer
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.plan import whole_step
from megapipe.schedule import Kind, ScheduleError, build
from megapipe.schedule.families.step.optimizer import with_optimizer
from megapipe.schedule.families.step.reduction import with_reduction

Result = tuple[list[tuple[float, float, int]], dict[str, torch.Tensor], list[int]]


NIGHTLY = bool(os.environ.get("MEGAPIPE_NIGHTLY"))  # scripts/nightly.sh trains all; dualpipe reduces in bf16 below
STEPS = 3 if NIGHTLY else 2  # the second begins with the weights that the first has gathered


def trained(mesh: ProcessMesh, *, parallel: dict[str, int], steps: int = STEPS, style: str, **flags) -> Result:
    """Loss, norm and zeros of every step; weights, moments and main weights by key; elements of each moment here."""
    model = replace(STYLES[style], num_layers=2 * mesh.pp.size)
    plain = config(model, dp=mesh.dp.size, pp=mesh.pp.size, **{"clip_grad": 0.5, **flags})
    training = run_of(
        mesh,
        replace(
            plain,
            parallel=replace(plain.parallel, **parallel),
            batch=replace(plain.batch, micro_batch_size=1, global_batch_size=4 * mesh.dp.size),
            log=replace(plain.log, log_num_zeros_in_grad=True),
        ),
    )
    said = [(r.losses["lm loss"], r.grad_norm, r.num_zeros) for r in (training.driver.whole() for _ in range(steps))]
    optimizer = training.run.optimizer
    kept = {f"{kind} {n}": x.clone() for kind, views in optimizer.state().items() for n, x in views.items()}
    with optimizer.gathers.whole():
        kept |= {name: param.detach().clone() for name, param in optimizer.params.items()}
    return said, kept, [moment.numel() for moment in optimizer.moments["exp_avg"]]


ZERO = {"use_distributed_optimizer": True}
OVERLAP = {**ZERO, "overlap_grad_reduce": True, "overlap_param_gather": True}

ROUNDED = dict.fromkeys(("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), "bf16")


def compare(dp: int, pp: int = 1, ours: dict[str, int] = ZERO, both=(), **how) -> list[tuple[Result, Result]]:
    datasets()
    ways = dict(both), {**dict(both), **ours}
    plain, split = (run_threads(partial(trained, parallel=parallel, **how), dp=dp, pp=pp) for parallel in ways)
    return list(zip(plain, split, strict=True))


@pytest.mark.parametrize(
    ("schedule", "pp", "style", "flags"),
    [
        ("1f1b", 1, "gpt2", {}),
        ("zb-h1", 2, "gpt2", {"bf16": True, **ROUNDED}),
        *[("dualpipe", 2, "llama", {"bf16": True})] * NIGHTLY,
        *[("1f1b", 2, "gpt2", {"bf16": True, "grad_reduce_in_bf16": True})] * NIGHTLY,
    ],
)
def test_two_ranks_train_the_same_bits_as_without_it(schedule, pp, style, flags):
    for plain, split in compare(2, pp, style=style, schedule=schedule, **flags):
        assert plain[0] == split[0]
        assert any(norm > 0.5 for _, norm, _ in plain[0]), "clipped"
        assert plain[1].keys() == split[1].keys()
        assert all(torch.equal(x, split[1][key]) for key, x in plain[1].items())
        padding = 64 * 2  # of a buffer, in elements
        assert all(n / 2 <= m <= n / 2 + padding for n, m in zip(plain[2], split[2], strict=True))


@pytest.mark.parametrize(
    ("schedule", "pp", "ours", "flags"),
    [
        ("zb-v", 2, OVERLAP, {"bf16": True}),
        ("dualpipe", 2, {**OVERLAP, "ddp_bucket_size": 1}, {"bf16": True, "grad_reduce_in_bf16": True}),
        *[("zb-h1", 2, {"overlap_grad_reduce": True, "ddp_num_buckets": 2}, {})] * NIGHTLY,
        *[("interleaved", 2, {"overlap_grad_reduce": True}, {})] * NIGHTLY,
        ("1f1b", 1, {**OVERLAP, "ddp_num_buckets": 3}, {}),
    ],
)
def test_what_overlaps_trains_the_same_bits(schedule, pp, ours, flags):
    for plain, split in compare(2, pp, ours, style="gpt2", schedule=schedule, **flags):
        assert plain[0] == split[0]
        assert all(torch.equal(x, split[1][key]) for key, x in plain[1].items())


def test_four_ranks_train_the_same_to_rounding():
    """Four numbers have several sums: a reduce-scatter may add them in another order than an all-reduce."""
    for plain, split in compare(4, style="gpt2"):
        for ours, theirs in zip(plain[0], split[0], strict=True):
            assert ours[:2] == pytest.approx(theirs[:2], rel=1e-6)
        for key, x in plain[1].items():
            torch.testing.assert_close(x, split[1][key], rtol=1e-4, atol=1e-6)
        assert all(n / 4 <= m <= n / 4 + 64 for n, m in zip(plain[2], split[2], strict=True))


@pytest.mark.parametrize("dp", [2, 4])
def test_a_rank_has_its_part_of_the_optimizer_state_within_a_hundredth(dp):
    """12 bytes per parameter of main weight and moments, over dp."""

    def held(mesh: ProcessMesh) -> tuple[int, int]:
        net = nn.Sequential(nn.Linear(160, 161), nn.LayerNorm(161), nn.Linear(161, 160)).bfloat16()
        optimizer = Optimizer([net], OptimizerConfig(lr=0.1), mesh, distributed=True)
        flats = [b.main for b in optimizer.owned] + [x for flats in optimizer.moments.values() for x in flats]
        return sum(x.nbytes for x in flats), sum(p.numel() for p in net.parameters())

    for state, parameters in run_threads(held, dp=dp):
        assert state == pytest.approx(12 * parameters / dp, rel=0.01)


def test_state_loads_at_any_other_size():
    """What two ranks' shares make up is what one rank has, and back: checkpoints know whole tensors alone."""

    def body(mesh: ProcessMesh) -> bool:
        training = run_of(mesh, replace(base, parallel=replace(base.parallel, use_distributed_optimizer=True)))
        training.driver.whole()
        optimizer = training.run.optimizer
        state = optimizer.state()
        want = {
            kind: {name: torch.full_like(x, i) for i, (name, x) in enumerate(views.items())}
            for kind, views in state.items()
        }
        saved = optimizer.saved()
        for shard in saved.shards:
            shard.allocate()
        for kind, views in saved.state.items():
            for name, x in views.items():
                x.copy_(want[kind][name])
        for shard in saved.shards:
            shard.keep()
        return all(torch.equal(x, want[kind][n]) for kind, views in optimizer.state().items() for n, x in views.items())

    base = config(STYLES["gpt2"], dp=2, bf16=True)
    datasets()
    assert all(run_threads(body, dp=2))


def test_a_table_may_have_the_rest_of_its_step_but_no_v():
    """As a file may: its own G and A stay where they are, U is behind the passes, V cannot be run."""
    flags = config(STYLES["gpt2"], dp=2, pp=2)
    asked = replace(flags, parallel=replace(flags.parallel, **OVERLAP))
    plain = build("zb-h1", 2, 4)
    whole = with_optimizer(with_reduction(plain), gather="ahead")
    assert whole_step(whole, asked) == whole_step(plain, asked)
    assert whole_step(whole, flags).kinds == plain.kinds | {Kind.G, Kind.A}
    assert whole_step(plain, flags) == plain
    with pytest.raises(ScheduleError, match=r"zb-h1 has V, .* leave V out of the table"):
        whole_step(with_optimizer(with_reduction(plain), barrier=False), flags)
