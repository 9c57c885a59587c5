"""What a plan says of a step in seconds, against hand-made sums."""

import json
import re
from dataclasses import replace
from itertools import cycle, product
from typing import Literal, get_args, get_origin

import pytest
from nightly import by_night

from megapipe.checks.run import flag_problems
from megapipe.commands.plan.main import main as plan_command
from megapipe.config import Config
from megapipe.errors import ConfigError, ScheduleError, UserError
from megapipe.flags.parse import flags_of, parse
from megapipe.plan import make_plan
from megapipe.plan.seconds.device import Device, device_of, load_device
from megapipe.plan.seconds.page import digest, numbers
from megapipe.plan.seconds.step import timed
from megapipe.schedule import SCHEDULES
from megapipe.training.check import check

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 32 --train-iters 9 --lr 1e-3 --mock-data --vocab-size 1000 "
    "--tokenizer-type NullTokenizer --make-vocab-size-divisible-by 1 --bf16 "
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"


def predicted(flags: str, world_size: int, device: Device) -> dict:
    config = parse(Config, [*MODEL.split(), *flags.split()])
    model = replace(config.model, padded_vocab_size=1001)
    config = replace(config, model=model, world_size=world_size)
    return numbers(timed(make_plan(config), config, device), device)


def test_a_step_of_one_process_is_its_flops_and_its_passes():
    found = predicted("", 1, Device(flops=1e12, overhead=1e-3, peak=2e12))
    tokens, h, s, vocab = 32 * 64, 64, 64, 1001
    # A layer has 12 h^2 weights; causal attention reads half of each row of scores, in two products.
    forward = tokens * (4 * (2 * 12 * h * h + 2 * s * h) + 2 * h * vocab)
    seconds = 3 * forward / 1e12 + 16 * 2 * 1e-3
    assert found["seconds"] == pytest.approx(seconds)
    assert found["mfu"] == pytest.approx(3 * forward / 2e12 / seconds)
    assert found["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert found["bubble"] == pytest.approx(0)


def test_ranks_that_share_the_vocabulary_work_for_a_quarter_of_the_flops_and_their_own_passes():
    flags, vocab = "--pipeline-model-parallel-size 4 --vocab-parallel-pipeline", 1001
    slow, quick = (Device(flops=1e12, overhead=x, inside=1e18, outside=1e18, latency=0.0) for x in (1e-3, 0.0))
    tokens, h, s = 32 * 64, 64, 64
    forward = tokens * (4 * (2 * 12 * h * h + 2 * s * h) + 2 * h * vocab)

    def busy(device: Device) -> float:
        found = predicted(flags, 4, device)
        return (1 - found["bubble"]) * found["seconds"]

    assert busy(quick) == pytest.approx(3 * forward / 4 / 1e12)
    # 16 microbatches of one layer on each rank: F and BW have the overhead, passes of the vocabulary none.
    assert busy(slow) - busy(quick) == pytest.approx(16 * 2 * 1e-3)


@pytest.mark.parametrize(
    "flags",
    [
        "--pipeline-model-parallel-size 4",
        "--pipeline-model-parallel-size 4 --vocab-parallel-pipeline",
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2 --pipeline-schedule dualpipe-v " + EXPERTS,
        "--pipeline-model-parallel-size 2 --use-megatron-fsdp --recompute-granularity full --recompute-method uniform",
    ],
)
def test_the_parts_of_a_step_add_up_to_it(flags):
    found = predicted(flags, 4, Device(flops=1e12, inside=1e9, outside=1e9, overhead=1e-5))
    assert sum(found["shares"].values()) == pytest.approx(1, abs=2e-3)  # parts below 0.05% are left out
    assert all(share > 0 for share in found["shares"].values())


ASKED = [name for name, entry in SCHEDULES.items() if not entry.searched]
VOCABULARIES = ["", "--vocab-parallel-pipeline"]


@pytest.mark.parametrize(
    "schedule, vocabulary", by_night(product(ASKED, VOCABULARIES), day=zip(ASKED, cycle(VOCABULARIES)))
)
def test_the_model_takes_three_forwards_of_a_step_whatever_recomputes_them(schedule, vocabulary):
    """With a shared vocabulary the head's own work was taken from the recomputation's."""
    chunks = "" if SCHEDULES[schedule].chunks else "--num-virtual-stages-per-pipeline-rank 2"
    device = Device(flops=1e10, peak=1e10, inside=1e9, outside=1e9, overhead=1e-5)
    found = predicted(
        f"--num-layers 8 --pipeline-model-parallel-size 4 --pipeline-schedule {schedule} {chunks} {vocabulary} "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        4,
        device,
    )
    assert sum(found["shares"].values()) == pytest.approx(1, abs=2e-3)
    assert found["shares"]["model"] == pytest.approx(found["mfu"])
    tokens, h, s = 32 * 64, 64, 64
    again = tokens * 8 * (2 * 12 * h * h + 2 * s * h) / 4 / 1e10
    assert found["shares"]["recomputation"] * found["seconds"] == pytest.approx(again)


def test_the_bubble_is_split_into_messages_unequal_stages_and_warm_up():
    """1F1B of p equal stages idles for p - 1 microbatches; a last stage of more work sets the pace of all m."""
    ranks, microbatches = 4, 16
    flags = f"--pipeline-model-parallel-size {ranks}"
    free = {"flops": 1e12, "inside": 1e30, "outside": 1e30, "latency": 0.0, "overhead": 0.0}
    shares = predicted(flags, ranks, Device(**free))["shares"]
    # Forward FLOPs of a token: of a layer, and of the head on the last stage.
    layer = 24 * 64 * 64 + 4 * 64 * 64 / 2
    last = layer + 2 * 64 * 1001
    mean = (3 * layer + last) / ranks
    whole = 3 * layer + microbatches * last
    assert shares["warm-up and drain"] == pytest.approx(3 * mean / whole)
    assert shares["unequal stages"] == pytest.approx(1 - (microbatches + 3) * mean / whole)
    assert "messages between stages" not in shares
    slow = predicted(flags, ranks, Device(**(free | {"latency": 1e-6})))
    waits = ("messages between stages", "unequal stages", "warm-up and drain")
    assert slow["bubble"] == pytest.approx(sum(slow["shares"][name] for name in waits))
    assert slow["shares"]["messages between stages"] > 0


def test_a_pair_hides_messages_of_experts_and_a_slow_link_costs_more_alone():
    flags = f"--pipeline-model-parallel-size 2 --pipeline-schedule {{}} {EXPERTS}"
    slow = Device(flops=1e12, inside=2e9, outside=2e9, overhead=0.0)
    alone = predicted(flags.format("zb-v"), 4, slow)["shares"]["messages of experts"]
    paired = predicted(flags.format("dualpipe-v"), 4, slow)["shares"]["messages of experts"]
    assert paired < 0.8 * alone


def test_check_and_plan_name_a_plan_alike_and_another_plan_otherwise(capsys):
    flags = [*MODEL.split(), "--pipeline-model-parallel-size", "4", "--world-size", "4"]
    plan_command([*flags, "--json", "-"])
    said = json.loads(capsys.readouterr().out)
    check(parse(Config, [*flags, "--check"]))
    out = capsys.readouterr().out
    assert f"plan {said['plan']}" in out
    assert f"predicted step {said['step']['predicted']['seconds']:.4g} s" in out
    other = parse(Config, [*flags, "--pipeline-schedule", "zb-h1"])
    other = replace(other, model=replace(other.model, padded_vocab_size=1001), world_size=4)
    assert digest(make_plan(other), other) != said["plan"]


FLAGS_OF_A_PLAN = [
    flag
    for flag in flags_of(Config).values()
    if flag.section == "parallel" or re.search("recompute|overlap|sequence_parallel|dispatcher|fp8", flag.field)
]
SLOW_AND_FAST = [
    Device(flops=1e12, inside=1e10, outside=1e9, node=2, overhead=1e-6, latency=1e-6, memory=1e11),
    Device(flops=1e11, inside=1e11, outside=1e10, node=4, overhead=1e-6, latency=1e-7, memory=1e10),
]


def measured(words: list[str]) -> tuple[str, list[float]] | None:
    """(id, seconds and peaks) of a plan; None if a run refuses the flags."""
    config = replace(parse(Config, words), world_size=8)
    if flag_problems(config):
        return None
    plan = make_plan(config)
    steps = [timed(plan, config, device).step for device in SLOW_AND_FAST]
    return digest(plan, config), [*steps, *plan.peak_bytes]


@pytest.mark.parametrize(
    ("own", "fewest"),
    [
        (f"{EXPERTS} --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel", 15),
        ("--pipeline-model-parallel-size 2 --recompute-granularity full --overlap-grad-reduce", 15),
        # The gather of a second stage hides.
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --overlap-grad-reduce", 13),
    ],
)
def test_whatever_flag_changes_the_seconds_or_the_memory_of_a_plan_changes_its_id(own, fewest):
    """One id had 7.644 and 7.492 s, by --ddp-bucket-size, and another 7.963 and 7.995, by --tp-comm-overlap."""
    line = [*MODEL.split(), *f"--padded-vocab-size 1024 --use-distributed-optimizer {own}".split()]
    mine = measured(line)
    assert mine is not None
    changed = set()
    for flag in FLAGS_OF_A_PLAN:
        values: list[list[str]] = [["2"], ["40"]]
        if flag.count == "none":
            values = [[]]
        elif get_origin(flag.value_type) is Literal:
            values = [[str(x)] for x in get_args(flag.value_type)]
        for value in values:
            try:
                other = measured([*line, flag.name, *value])
            except (UserError, ScheduleError):
                continue
            if other is not None and other[1] != mine[1]:
                changed.add(flag.name)
                assert other[0] != mine[0], (flag.name, value)
    assert len(changed) >= fewest


def test_a_run_on_cpus_has_no_device_until_rates_name_one(tmp_path):
    flags = [*MODEL.split(), "--distributed-backend", "gloo"]
    assert device_of(parse(Config, flags)) is None
    (tmp_path / "laptop.json").write_text('{"flops": 1e11, "source": "measured"}')
    device = device_of(parse(Config, [*flags, "--rates", str(tmp_path / "laptop.json")]))
    assert device == Device(flops=1e11, source="measured")


def test_rates_by_size_are_those_between_their_neighbours(tmp_path):
    (tmp_path / "rates.json").write_text(
        '{"flops": [[100, 10], [200, 30]], "inside": [[1000, 1], [3000, 2]], "node": 2, "outside": 100, "latency": 5}'
    )
    device = load_device("--rates", str(tmp_path / "rates.json"))
    assert [device.rate(size) for size in (1, 100, 150, 200, 900)] == [10, 10, 20, 30, 30]
    # Two messages of 1 s, of 1.5 s; above the largest one the speed stays that of 3000 bytes.
    assert [device.seconds(sent, 2, 2) for sent in (0, 200, 4000, 12000)] == [0, 2, 3, 8]
    assert device.seconds(1000, 4, 2) == 1000 / 100 + 2 * 5
    assert (device.flops, device.inside) == (30, 1500)
    (tmp_path / "rates.json").write_text('{"inside": [[1000, 2], [3000, 1]]}')
    with pytest.raises(ConfigError, match=r"inside must be a number above 0, or pairs .* by ascending size"):
        load_device("--rates", str(tmp_path / "rates.json"))


@pytest.mark.parametrize("zero, moved", [("", 38), ("--use-distributed-optimizer", 8 + 30 / 2)])
def test_an_update_takes_the_time_of_the_memory_it_reads_and_writes(zero, moved):
    flags = f"--pipeline-model-parallel-size 2 {zero}"
    none, some = (predicted(flags, 4, Device(flops=1e12, memory=memory)) for memory in (0.0, 1e9))
    # Bytes of a parameter in bf16 with float32 gradient, moments and main parameter. The first rank
    # has the embedding of 1001 rows and 64 positions, and two layers of 12 h^2 weights and 13 h more.
    parameters = (1001 + 64) * 64 + 2 * (12 * 64**2 + 13 * 64)
    assert some["seconds"] - none["seconds"] == pytest.approx(moved * parameters / 1e9)


@pytest.mark.parametrize("times", ["1", "[1, 2, 3, 4]"])
def test_measured_times_have_a_unit_of_their_own(times, tmp_path, capsys):
    """They were taken for FLOPs, and one number for all stages ended in a traceback."""
    (tmp_path / "costs.json").write_text(f'{{"f": {times}, "b": {times}, "w": {times}}}')
    flags = [*MODEL.split(), "--pipeline-model-parallel-size", "4", "--world-size", "4"]
    costs = str(tmp_path / "costs.json")
    plan_command([*flags, "--costs", costs, "--json", "-"])
    assert json.loads(capsys.readouterr().out)["step"]["predicted"] is None
    plan_command([*flags, "--costs", costs])
    assert "no seconds are predicted by --rates" in capsys.readouterr().out
    check(parse(Config, [*flags, "--check", "--pipeline-costs", costs]))
    assert "no seconds are predicted by --rates" in capsys.readouterr().out
    plan_command([*flags, "--pipeline-costs", costs, "--search"])
    assert "yours: " in capsys.readouterr().out
