"""--use-megatron-fsdp in the plan: bytes by hand, how long weights live, what fits, and what the reader is told."""

from dataclasses import replace

import pytest

from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse
from megapipe.plan import make_plan, pieces_of
from megapipe.plan.plan import Plan
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.links import knows_links
from megapipe.plan.seconds.messages import with_messages
from megapipe.plan.seconds.step import in_seconds
from megapipe.plan.table import summary
from megapipe.schedule import Kind, Schedule, simulate, verify
from megapipe.schedule.families.offload.rules import MOVES

FLAGS = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --global-batch-size 32 --mock-data --tokenizer-type NullTokenizer --vocab-size 99 "
    "--padded-vocab-size 128 --lr 1e-3 --train-iters 2 --untie-embeddings-and-output-weights --bf16 "
    "--pipeline-schedule breadth-first --num-virtual-stages-per-pipeline-rank 4"
)
FSDP, DP = "--use-megatron-fsdp", 4


def plan(*more: str) -> tuple[Plan, Config]:
    made = parse(Config, [*FLAGS.split(), *more])
    config = Config(**{**vars(made), "world_size": DP * made.parallel.pipeline_model_parallel_size}).with_batch(32)
    return make_plan(config), config


def count(table: Schedule, *kinds: Kind) -> int:
    return sum(x.kind in kinds for row in table.ranks for step in row for x in step)


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("depths", [1, 2])
def test_depths_of_multi_token_prediction_have_shards_too(strategy, depths):
    """Every such run was refused by a sentence of the clock, as the costs had no column for a depth."""
    made, _ = plan(
        FSDP, "--data-parallel-sharding-strategy", strategy, "--mtp-num-layers", str(depths),
        "--pipeline-model-parallel-size", "2",
    )  # fmt: skip
    verify(made.schedule)
    assert made.schedule.placement.depths == depths
    assert count(made.schedule, Kind.RS) >= made.schedule.placement.num_stages


@pytest.mark.parametrize(
    "flags, kept",
    [
        (["--use-distributed-optimizer"], 2 + 4 + 12 / DP),
        ([FSDP, "--data-parallel-sharding-strategy", "optim"], 2 + 4 + 12 / DP),
        ([FSDP, "--data-parallel-sharding-strategy", "optim_grads"], 2 + (4 + 12) / DP),
        ([FSDP], (2 + 4 + 12) / DP),
    ],
)
def test_a_rank_keeps_a_share_of_what_the_strategy_names(flags: list[str], kept: float) -> None:
    """Of a parameter: 2 bytes of weight, 4 of gradient, 12 of main parameter and moments."""
    made, _ = plan(*flags)
    parameters = sum(work.parameters for work in made.works)
    assert made.state_bytes == (pytest.approx(kept * parameters),)


def test_rows_of_a_shared_vocabulary_are_whole_for_ever() -> None:
    """Embedding and head of 128 x 64, half of each on a rank; what is left of a rank is gathered."""
    flags = [FSDP, "--pipeline-model-parallel-size", "2", "--vocab-parallel-pipeline"]
    made, rows = plan(*flags)[0], 2 * 128 * 64 / 2
    parameters = [sum(made.works[s].parameters for s in made.schedule.placement.stages_on(rank)) for rank in (0, 1)]
    kept = [18 / DP * (n - rows) + (2 + 4 + 12 / DP) * rows for n in parameters]
    assert made.state_bytes == pytest.approx(kept)
    of_first = made.works[0].parameters - rows
    assert made.costs.mem_a[0] == 2 * of_first


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_nothing_is_shared_with_one_data_parallel_rank(strategy: str) -> None:
    flags = [*FLAGS.split(), FSDP, "--data-parallel-sharding-strategy", strategy, "--overlap-grad-reduce"]
    alone = make_plan(parse(Config, flags).with_batch(32))
    assert alone.schedule.kinds == {Kind.F, Kind.BW}
    assert alone.state_bytes == (pytest.approx((2 + 4 + 12) * sum(work.parameters for work in alone.works)),)


def test_rows_that_both_ends_of_a_shared_vocabulary_use_are_one_weight_with_two_gradients() -> None:
    """64 of the 128 rows are a rank's: 2 bytes of weight, 4 of each gradient, a quarter of 12 of optimizer state."""
    flags = FLAGS.replace("--untie-embeddings-and-output-weights ", "").split()
    two = ["--pipeline-model-parallel-size", "2", "--vocab-parallel-pipeline"]
    made = make_plan(Config(**{**vars(parse(Config, [*flags, FSDP, *two])), "world_size": 2 * DP}).with_batch(32))
    rows = 128 * 64 / 2
    for rank, state in enumerate(made.state_bytes):
        stages = made.schedule.placement.stages_on(rank)
        others = sum(made.works[stage].parameters for stage in stages) - 2 * rows
        assert state == pytest.approx(18 / DP * others + (2 + 2 * 4 + 12 / DP) * rows)


def test_shares_of_experts_are_of_the_ranks_that_have_the_same() -> None:
    """Four experts, two on each rank: two of the four ranks share them, and all four what is dense."""
    flags = ["--num-experts", "4", "--expert-model-parallel-size", "2", "--ffn-hidden-size", "128"]
    made, _ = plan(FSDP, *flags)
    experts = sum(work.experts for work in made.works)
    dense = sum(work.parameters for work in made.works) - experts
    assert experts > 0
    assert made.state_bytes == (pytest.approx(18 * (dense / DP + experts / 2 / 2)),)


def test_two_stages_weights_and_two_stages_gradients_are_whole_at_most() -> None:
    made, _ = plan(FSDP)
    verify(made.schedule)
    first, second, third, last = (work.parameters for work in made.works)
    whole = simulate(made.schedule, replace(made.costs, mem_b=0.0, mem_w=0.0)).peak
    # Gradients of the stage before are being summed, its own grow, the weights of the next come.
    assert whole == (max(4 * last + (2 + 4) * third + 2 * second, 4 * second + (2 + 4) * first),)
    assert count(made.schedule, Kind.AF, Kind.AB) == 2 * 4 - 2
    assert count(made.schedule, Kind.RS) == 4


def test_weights_shared_by_both_ends_have_their_gradients_whole_between_runs() -> None:
    apart = plan(FSDP, "--pipeline-model-parallel-size", "2")[0]
    shared = [*FLAGS.replace("--untie-embeddings-and-output-weights ", "").split(), FSDP]
    made = parse(Config, [*shared, "--pipeline-model-parallel-size", "2"])
    one = make_plan(Config(**{**vars(made), "world_size": 2 * DP}).with_batch(32))
    words = 4.0 * 128 * 64
    assert not any(one.costs.mem_lent)  # the head is on another rank, and has a weight of its own
    made = parse(Config, shared)
    here = make_plan(Config(**{**vars(made), "world_size": DP}).with_batch(32)).costs
    assert here.mem_lent == (0.0, 0.0, 0.0, here.mem_a[0])
    assert one.state_bytes == tuple(x + words for x in apart.state_bytes)


def test_a_limit_makes_weights_live_as_shortly_as_they_must_and_says_what_is_too_little() -> None:
    near = [FSDP, "--data-parallel-flops-per-byte", "1333"]
    free = plan(*near)[0]
    limit = max(free.peak_bytes) - free.works[2].parameters  # half of the weights that came early
    tight, config = plan(*near, "--memory-limit-gib", f"{limit / 2**30}")
    assert max(tight.peak_bytes) <= limit
    assert count(tight.schedule, Kind.AF, Kind.AB) == 2 * 4 - 1
    assert "where a byte takes as long as 1333 FLOPs" in summary(tight, config)
    assert "sharded: a rank makes up to 7 gathers of weights and 4 reductions of gradients a step" in summary(
        tight, config
    )
    with pytest.raises(ConfigError, match="is less than pipeline rank 0 of breadth-first is predicted to need"):
        plan(FSDP, "--memory-limit-gib", f"{max(free.state_bytes) / 2**30 * 1.01}")
    less, _ = plan(*near, "--memory-limit-gib", f"{limit / 2**30 * 0.99}")
    assert less.schedule.kinds & MOVES, "what weights leave no room for is moved out of the way"


def test_over_a_slow_link_activations_leave_that_weights_may_stay() -> None:
    free = plan(FSDP)[0]
    limit = max(free.peak_bytes) - free.works[2].parameters
    made, _ = plan(FSDP, "--memory-limit-gib", f"{limit / 2**30}")
    assert max(made.peak_bytes) <= limit
    assert count(made.schedule, Kind.AF, Kind.AB) == 2 * 4 - 2
    assert made.schedule.kinds & MOVES
    assert made.timeline.makespan < 1.01 * free.timeline.makespan


def test_copies_make_room_for_weights() -> None:
    zero, free = plan("--use-distributed-optimizer")[0], plan(FSDP)[0]
    gib = (max(free.peak_bytes) - 0.5 * zero.timeline.peak[0]) / 2**30
    made, _ = plan(
        FSDP, "--memory-limit-gib", f"{gib}", "--fine-grained-activation-offloading", "--offload-time", "0.1"
    )
    assert {Kind.AF, Kind.RS, Kind.O} <= made.schedule.kinds
    assert max(made.peak_bytes) <= gib * 2**30


@pytest.mark.parametrize("ep, near", [(8, 1), (4, 2), (2, 4)])
def test_weights_of_experts_travel_between_fewer_ranks_that_lie_further_apart(ep: int, near: int) -> None:
    """A search took a plan for Mixtral whose gathers of experts were counted at NVLink's speed, over 8 nodes.

    Of 64 / ep ranks with the same experts `near` are on a node, and the nodes' cards send 40 GB/s each. Of the other
    weights 8 ranks of a node have the same, whose cards together send faster than a device to its neighbour, 300 GB/s.
    """
    h, f, vocab = 64, 4096, 128
    made = parse(
        Config,
        [
            *FLAGS.split(), *f"--ffn-hidden-size {f} --disable-bias-linear --normalization RMSNorm --num-experts 8 "
            f"--moe-token-dispatcher-type alltoall --expert-model-parallel-size {ep} --global-batch-size 64 "
            f"--position-embedding-type rope {FSDP}".split(),
        ],
    )  # fmt: skip
    config = replace(made, world_size=64).with_batch(64)
    device = Device(latency=0.0)
    layer, experts = 4 * h * h + 2 * h + 8 * h, 8 / ep * 2 * h * f

    def seconds(dense: float, of_experts: float) -> float:
        m = 64 // ep
        return 63 / 64 * dense / 3e11 + (m - 1) / m * of_experts / (near * 4e10)

    plan = make_plan(config)
    costs = with_messages(in_seconds(plan, config, device), plan, config, device)
    # The second and third of four stages are two layers each, of 2 bytes a weight and 4 a gradient.
    assert isinstance(costs.a, tuple)
    assert isinstance(costs.g, tuple)
    assert costs.a[1:3] == pytest.approx([seconds(4 * layer, 4 * experts)] * 2, rel=1e-9)
    assert costs.g[1:3] == pytest.approx([seconds(8 * layer, 8 * experts)] * 2, rel=1e-9)
    dense = 8 * layer + 2 * vocab * h + h
    sent = 63 / 64 * dense + (1 - ep / 64) * 8 * experts
    known = knows_links(config, device).parallel.data_parallel_flops_per_byte
    assert known == round(device.flops * seconds(dense, 8 * experts) / sent)


def test_links_of_data_parallel_ranks_count_depths_and_no_only_replica() -> None:
    """A depth's layer has experts too, whose 8 replicas lie on 8 nodes: 40 GB/s, where all else has 300."""
    flags = "--num-experts 8 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 8 --mtp-num-layers 2"
    words = [*FLAGS.split(), FSDP, *flags.split(), "--global-batch-size", "64"]
    deep = replace(parse(Config, words), world_size=64).with_batch(64)
    device = Device(latency=0.0)
    pieces = pieces_of(deep, deep.model)
    parts = [pieces.embedding, *pieces.layers, *pieces.depths, pieces.head]
    assert len(pieces.depths) == 2
    experts = 7 / 8 * sum(part.experts for part in parts) / 8
    dense = 63 / 64 * sum(part.parameters - part.experts for part in parts)
    known = knows_links(deep, device).parallel.data_parallel_flops_per_byte
    assert known == pytest.approx(device.flops * (dense / 3e11 + experts / 4e10) / (dense + experts), abs=1)
    alone = replace(deep, world_size=1, parallel=replace(deep.parallel, expert_model_parallel_size=1))
    assert knows_links(alone, device) == alone
