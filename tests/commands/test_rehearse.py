"""A run foreseen from single ranks: what each needs is what it needs in the run, and the step is the simulator's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megapipe.commands.plan import main as plan
from megapipe.commands.plan import rehearse
from megapipe.commands.plan.held_bytes import parts_of
from megapipe.commands.plan.rehearsed_rank import Alone, Rehearsed, answers_of, rank_alone, run_on
from megapipe.errors import ConfigError, UserError
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.plan.seconds.device import load_device
from megapipe.plan.state import bytes_at_peak
from megapipe.schedule import Kind, Pass
from megapipe.schedule.measured.costs import MeasuredPass

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --train-iters 9 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
    "--distributed-backend gloo --pipeline-model-parallel-size 2 "
)


@pytest.mark.parametrize(
    "axes, flags",
    [
        ({"tp": 2}, "--global-batch-size 8 --pipeline-schedule 1f1b --recompute-granularity full"),
        ({}, "--global-batch-size 8 --pipeline-schedule dualpipe"),
        ({"dp": 2}, "--global-batch-size 16 --pipeline-schedule zb-v --bf16 --use-distributed-optimizer"),
        ({"dp": 2}, "--global-batch-size 16 --pipeline-schedule zb-v --bf16 --use-megatron-fsdp"),
        ({}, "--global-batch-size 4 --pipeline-schedule zb-h1 --pipeline-slices 3 --recompute-granularity full"),
    ],
    ids=str,
)
def test_a_rank_alone_needs_what_it_needs_in_the_run(axes, flags):
    sizes = f"--tensor-model-parallel-size {axes.get('tp', 1)} {'--sequence-parallel' * ('tp' in axes)}"
    world = 2 * axes.get("tp", 1) * axes.get("dp", 1)
    config, plan = rehearse.prepared(f"{MODEL} {sizes} {flags}".split(), world)

    real = run_threads(lambda mesh: held_in(mesh, config, plan), pp=2, **axes)
    ranks = rehearse.world_ranks(config)
    answers = answers_of(config, plan, ranks)
    for rank in ranks:
        training = rank_alone(config, plan, rank, answers)
        assert training.driver.whole().grad_norm > 0
        assert parts_of(training) == real[rank]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize(
    "dp, flags",
    [(1, ""), (2, "--bf16 --use-distributed-optimizer"), (2, "--bf16 --use-megatron-fsdp")],
    ids=["plain", "zero-1", "zero-3"],
)
def test_the_plans_bytes_by_purpose_are_those_of_the_run(dp, flags, schedule):
    config, plan = rehearse.prepared(
        f"{MODEL} --global-batch-size {8 * dp} --pipeline-schedule {schedule} {flags}".split(), 2 * dp
    )
    real = run_threads(lambda mesh: held_in(mesh, config, plan), pp=2, dp=dp)
    for rank, (row, peak) in enumerate(zip(bytes_at_peak(plan, config), plan.peak_bytes, strict=True)):
        assert sum(row.values()) == pytest.approx(peak)
        found = real[[*rehearse.world_ranks(config)][rank]]
        weights = row["weights"]
        if "fsdp" in flags:
            # Whole gradients count as gathered weights there.
            weights += row["gathered"]
        assert weights == pytest.approx(found["weights"], rel=0.02)
        for name in ("gradients", "optimizer"):
            assert row[name] == pytest.approx(found[name], rel=0.02)


def held_in(mesh, config, plan) -> dict[str, float]:
    training = run_on(mesh, config, plan)
    training.driver.whole()
    return parts_of(training)


@pytest.mark.parametrize("n", [1, 2])
def test_a_few_ranks_of_many_make_the_step_of_1f1b(n):
    slices = f"--pipeline-slices {n} --pipeline-slice-cuts equal" if n > 1 else ""
    config, plan = rehearse.prepared(
        f"{MODEL} --global-batch-size 16 --num-layers 8 --pipeline-model-parallel-size 4 {slices}".split(), 4
    )
    m, f, b, u = plan.schedule.num_microbatches, 1.0 / n, 2.0 / n, 0.5

    def shown(rank: int) -> Rehearsed:
        clock, ran = 0.0, []
        for (item,) in plan.schedule.ranks[rank]:
            took = f if item.kind.is_forward else b
            ran.append(MeasuredPass(item, clock, clock + took))
            clock += took
        return Rehearsed((rank,), [ran], u, {"weights": 1.0 + rank})

    assert all(isinstance(item, Pass) for item, *_ in shown(0).steps[0])
    told = rehearse.forecast(config, plan, {rank: shown(rank) for rank in (0, 1, 3)})
    # (m n + p - 1)(F + B), stage 2 as stage 1; slices take as long here, and those of stage 2 by their attention.
    near = 1e-6 if n == 1 else 0.01
    assert told.passes == pytest.approx((m * n + 3) * (f + b), rel=near)
    assert told.step == pytest.approx(told.passes + u)
    assert told.bubble == pytest.approx(3 / (m * n + 3), rel=10 * near)


def test_copies_take_what_they_took_on_the_rank_that_was_rehearsed():
    """And of others by their bytes."""
    flags = "--num-layers 8 --pipeline-model-parallel-size 4 --fine-grained-activation-offloading --offload-time 0.01"
    config, plan = rehearse.prepared(f"{MODEL} --global-batch-size 16 {flags}".split(), 4)
    took = {Kind.F: 1.0, Kind.BW: 2.0, Kind.O: 0.25, Kind.L: 0.5}
    ran = [MeasuredPass(x, n, n + took[x.kind]) for n, (x,) in enumerate(plan.schedule.ranks[0])]
    copies = [x for x in ran if x.item.kind in (Kind.O, Kind.L)]
    passes = [x for x in ran if x not in copies]
    told = rehearse.forecast(config, plan, {0: Rehearsed((0,), [passes], 0.0, {}, [copies])}).costs
    per_byte = 0.25 / plan.costs.o[0]
    assert told.o == pytest.approx(tuple(per_byte * x for x in plan.costs.o))
    assert told.l == pytest.approx(tuple(2 * x for x in told.o))


def test_two_of_sixty_four_ranks_are_rehearsed(capsys):
    flags = "--global-batch-size 16 --num-layers 16 --pipeline-model-parallel-size 16 --tensor-model-parallel-size 2"
    flags += " --pipeline-schedule gpipe"
    own = "--world-size 64 --ranks 0,63 --steps 1 --memory-gib 1e-9 --"
    rehearse.main(f"{own} {MODEL} {flags}".split())
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert len(lines) == 1 + 16 + 3
    assert [n for n, line in enumerate(lines[1:17]) if "by the plan" not in line] == [0, 15]
    assert "runs out of memory first" in said
    assert "on 64 processes under gpipe" in said


@pytest.mark.parametrize("rank", ["2", "x", "0,", "9" * 5000])
def test_a_rank_that_the_run_has_not_is_refused(rank):
    """int() refuses 5000 digits with a ValueError, which was a traceback; found by drawn command lines."""
    with pytest.raises(ConfigError, match="must be numbers from 0 to 1, by commas"):
        rehearse.main(["--world-size", "2", "--ranks", rank, "--", *MODEL.split()])


def test_experts_without_a_token_on_a_rank_alone_get_no_rows():
    """64 ranks of 4 experts and 64 tokens: its own experts may have none of a microbatch, and so of nobody."""
    alone, nothing = Alone(1, 2), torch.ones(3, 2)
    assert alone.start_all_to_all(nothing, [[3, 0], [3, 0]]).wait().shape == (0, 2)
    assert alone.start_all_to_all(nothing, [[1, 2], [1, 2]]).wait().shape == (4, 2)
    assert alone.start_all_to_all(nothing[:0], [[0, 5], [0, 0]]).wait().shape == (5, 2), "and theirs come back"


@pytest.mark.parametrize("rank", range(4))
def test_as_many_rows_come_to_the_experts_of_a_rank_alone_as_leave_it(rank):
    """All other ranks had what it has, so that 4 times the rows came that its own tokens sent to its own experts."""
    counts = torch.tensor([[7, 0, 1, 0, 0, 2, 3, 3]])
    arriving = Alone(rank, 4).all_gather(counts)[:, 2 * rank : 2 * rank + 2]
    assert arriving.sum() == counts.sum()
    assert torch.equal(arriving[rank], counts[0, 2 * rank : 2 * rank + 2])


def test_a_rehearsal_of_no_steps_or_ranks_is_refused():
    with pytest.raises(ConfigError) as refused:
        rehearse.main(["--world-size", "0", "--steps", "-1", "--"])
    assert refused.value.problems == ("--world-size must be above 0, got 0.", "--steps must be above 0, got -1.")


def test_what_cannot_be_rehearsed_is_refused_at_once():
    flags = "--global-batch-size 8 --vocab-parallel-pipeline --transformer-impl auto --num-layers 5"
    with pytest.raises(ConfigError) as refused:
        rehearse.prepared(f"{MODEL} {flags}".split(), 2)
    assert [said.split()[0] for said in refused.value.problems] == [
        "--num-layers",
        "--vocab-parallel-pipeline",
        "--transformer-impl",
    ]


def test_a_rehearsal_ends_after_a_process_that_computed_with_several_threads():
    """A fork has none of OpenMP's threads: on two cores the rehearsed rank waited for ever in its first LayerNorm."""
    flags = f"--world-size 2 --ranks 0 --steps 1 -- {MODEL} --global-batch-size 4 --num-layers 2 "
    code = (
        "import sys, torch; from megapipe.commands.plan import rehearse; torch.set_num_threads(2); "
        "torch.nn.functional.layer_norm(torch.randn(64, 4096), (4096,)).sum(); rehearse.main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, *flags.split(), "--pipeline-model-parallel-size", "2"]
    subprocess.run(command, check=True, timeout=120, capture_output=True)


@pytest.mark.parametrize(
    "before, behind, sentence",
    [
        (2, "--world-size 4", "--world-size 2 stands before --, and --world-size 4 after it"),
        (0, "", "--world-size 0 must be at least 1"),
    ],
)
def test_a_number_of_processes_that_cannot_be_is_refused(before, behind, sentence):
    with pytest.raises(ConfigError, match=sentence):
        rehearse.prepared(f"{MODEL} --global-batch-size 8 {behind}".split(), before)


def test_flags_of_the_run_without_dashes_before_them_are_answered_with_the_line_to_type() -> None:
    """It was a line `unknown flag` for each of 48 flags, and none about --."""
    with pytest.raises(ConfigError, match=r"^give the command to run after --, as in megapipe rehearse .* -- --num-"):
        rehearse.main(["--world-size", "4", *MODEL.split()])


@pytest.mark.parametrize("vocabulary", ["99999999999999999999", "9999999999999"])
def test_a_model_that_no_machine_holds_is_refused_as_the_run_refuses_it(vocabulary: str, capsys) -> None:
    """torch's TypeError, "Overflow when unpacking long long", ended it (found by drawn command lines)."""
    flags = f"{MODEL} --global-batch-size 4 --vocab-size {vocabulary}"
    with pytest.raises(UserError, match="has no memory for its stages, which need"):
        rehearse.main(["--world-size", "2", "--steps", "1", "--", *flags.split()])


def test_rates_from_a_rehearsal_give_a_plan_the_work_that_was_measured(tmp_path, capsys):
    """The sum of all passes is by definition the rehearsal's; what a step waits for follows from the file."""
    files = [str(tmp_path / name) for name in ("rates.json", "costs.json")]
    flags = f"{MODEL} --global-batch-size 16".split()
    rehearse.main(["--world-size", "2", "--save-rates", files[0], "--save-costs", files[1], "--", *flags])
    assert "rates of this machine: " in capsys.readouterr().out
    costs = json.loads(Path(files[1]).read_text())
    work = 8 * sum(sum(costs[name]) for name in "fbw") / 2
    device = load_device("--rates", files[0])
    assert device.memory > 0
    assert [size for size, _ in device.by_message] == sorted(size for size, _ in device.by_message)
    # A CPU, whose ranks share the memory of the host.
    assert device.capacity == device.host == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert "measured by megapipe rehearse on" in device.source
    plan.main([*flags, "--rates", files[0], "--json", "-"])
    step = json.loads(capsys.readouterr().out)["step"]["predicted"]
    assert step["shares"]["model"] * step["seconds"] == pytest.approx(work, rel=0.02)
