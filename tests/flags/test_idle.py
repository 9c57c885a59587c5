"""No flag does nothing in silence: each acts in every run, says where it does not, or is refused there."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, get_args

import pytest

from megapipe.config import Config
from megapipe.flags.idle import IDLE, idle, without_idle
from megapipe.flags.parse import Flag, parse, to_flags

from .test_flags_act import rate, updated

RUNS = [
    "",
    "--check --save a --save-keep-last 2 --load a --swiglu --disable-bias-linear --tensor-model-parallel-size 2 "
    "--overlap-moe-expert-parallel-comm --mtp-num-layers 1 --cpu-offload "
    "--context-parallel-size 2 --cp-comm-type p2p --fp16 --recompute-granularity full --group-query-attention "
    "--padded-vocab-size 128 --init-method-xavier-uniform --position-embedding-type rope --rotary-percent 0.5 "
    "--use-rope-scaling --optimizer sgd",
    "--fp8-format e4m3 "
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --use-ring-exchange-p2p "
    "--optimizer muon --overlap-grad-reduce --lr-decay-style constant --lr-warmup-iters 5 --decoupled-lr 1 "
    "--disable-bias-linear --tokenizer-type GPT2BPETokenizer --enable-optimizer-post-validation "
    "--weight-decay-incr-style linear --eval-interval 5",
    "--fp8-format e4m3 --fp8-recipe tensorwise --first-last-layers-bf16 "
    "--log-format short --tokenizer-type TikTokenizer --dataloader-type cyclic --eval-iters 0 --eval-interval 5 "
    "--exit-signal-handler --rerun-mode disabled --profile --exp-avg-dtype bf16 --position-embedding-type yarn",
    "--tensorboard-dir a --wandb-project b --timing-log-level 1 --use-pytorch-profiler "
    "--tokenizer-type HuggingFaceTokenizer --error-injection-rate 3",
    "--tokenizer-type NullTokenizer --save a --manual-gc --cuda-graph-impl local --position-embedding-type longrope "
    "--window-size 3,0",
    "--timing-log-level 1 --pipeline-slices 2 --attention-temperature-beta 0.5 --non-persistent-ckpt-type local",
    "--num-experts 8 --moe-use-upcycling --use-megatron-fsdp --experimental-attention-variant gdn",
    "--fp8-format e4m3 --fp8-recipe mxfp8 --use-distributed-optimizer --non-persistent-ckpt-type local --replication",
    "--multi-latent-attention",
    "--multi-latent-attention --rope-type rope --disable-bias-linear --normalization RMSNorm",
    "--num-experts 8 --moe-expert-capacity-factor 1 --moe-shared-expert-intermediate-size 8 --moe-router-group-topk 2 "
    "--moe-router-enable-expert-bias --moe-router-score-function sigmoid --metrics-file a",
]


@cache
def run_of(base: str, more: tuple[str, ...] = ()) -> Config:
    """One process without flags, two replicas of the model with them."""
    config = parse(Config, [*base.split(), *more])
    return replace(config, world_size=2 * config.parallel.ranks_of_a_replica if base else 1)


def other(flag: Flag) -> list[str]:
    """The flag with a value that is not its default."""
    kind = get_args(flag.kind)[0] if flag.count == "many" else flag.kind
    used = (flag.default, *flag.default) if flag.count == "many" else (flag.default,)
    choices = [choice for choice in get_args(kind) if choice not in used]
    value: Any = {int: 7, float: 0.5, str: "x"}.get(kind) or (choices or [None])[0]
    return flag.spell([] if flag.count == "none" else [str(value)])


@pytest.mark.parametrize("flag, where, text", IDLE, ids=[f"{flag.name}, {text}" for flag, _, text in IDLE])
def test_each_row_holds_in_some_runs_alone_and_there_is_its_line(flag, where, text):
    holds = [base for base in RUNS if where(run_of(base))]
    assert holds
    assert len(holds) < len(RUNS)
    told = {}
    for base in RUNS:
        given = run_of(base, tuple(other(flag)))
        told |= {line: base for name, line in idle(given) if name.split()[0] == flag.name}
        taken_out = getattr(getattr(without_idle(given), flag.section), flag.field) == flag.default
        assert taken_out == any(where(given) for one, where, _ in IDLE if one == flag)
    assert text in told


def test_what_is_said_to_change_no_number_of_an_update_changes_none():
    """The rates of a run, and a matrix after two updates, where a flag of them is said to be idle."""
    sizes = "--micro-batch-size 2 --global-batch-size 4 --seq-length 8 --lr 1 --train-iters 100"
    tried = set()
    for optimizer in ("adam", "sgd", "muon"):
        for curve in ("--lr-decay-style constant", "--lr-warmup-iters 5", "--min-lr 0.1"):
            base = f"{sizes} --optimizer {optimizer} {curve}"
            for flag, where, _ in IDLE:
                name = flag.field.partition("_")[0]
                if name not in ("lr", "min", "adam", "sgd", "muon") or flag.field == "min_loss_scale":
                    continue
                without, given = (parse(Config, [*base.split(), *more]) for more in ([], other(flag)))
                if where(given):
                    tried.add(flag.field)
                    assert (rate(given), updated(given)) == (rate(without), updated(without)), (base, flag.name)
    assert len(tried) > 13


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--save-interval 5", ("--save-interval 5", "nothing is saved, without --save")),
        ("--no-load-optim", ("--no-load-optim", "nothing is loaded, without --load")),
        ("--eval-iters -1", ("--eval-iters -1", "nothing is evaluated, without --eval-interval")),
        (
            "--eval-iters -1 --eval-interval 5",
            ("--eval-interval 5", "nothing is evaluated, without --eval-iters of at least 1"),
        ),
        ("--world-size 4", ("--world-size 4", "the launch says it, without --check")),
        # User 3's run on CPUs: "the launch says it" read as if a run predicted by the rates.
        (
            "--rates h200",
            ("--rates h200", "only megapipe plan and check use it, without --check or --memory-limit-gib"),
        ),
        ("--check-paths no", ("--check-paths no", "a launch needs all its files and folders, without --check")),
        (
            "--override-opt_param-scheduler",
            ("--override-opt_param-scheduler", "nothing is loaded, without --load"),
        ),
        (
            "--recompute-num-layers 1",
            ("--recompute-num-layers 1", "nothing is computed again, without --recompute-granularity full"),
        ),
        (
            "--no-bias-gelu-fusion --swiglu",
            ("--no-bias-gelu-fusion", "the MLP has another activation, without GELU"),
        ),
        (
            "--num-query-groups 4",
            ("--num-query-groups 4", "each query head has its own key and value, without --group-query-attention"),
        ),
        ("--profile", ("--profile", "nothing is recorded, without --use-pytorch-profiler")),
        (
            "--initial-loss-scale 65536 --bf16",
            (
                "--initial-loss-scale 65536",
                "the scale does not move, without a dynamic loss scale (--fp16 without --loss-scale)",
            ),
        ),
    ],
)
def test_what_megatron_ignores_is_said_in_a_line(flags, line):
    assert idle(parse(Config, flags.split())) == [line]


def test_one_rank_names_every_flag_of_sharding():
    """Found by drawn lines of `megapipe check`: --data-parallel-sharding-strategy was dropped in silence."""
    flags = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --data-parallel-flops-per-byte 5"
    one_copy = "there is one copy of the weights, without several data- or context-parallel ranks"
    assert idle(parse(Config, flags.split())) == [
        ("--use-megatron-fsdp", one_copy),
        ("--data-parallel-sharding-strategy optim_grads", one_copy),
        ("--data-parallel-flops-per-byte 5", one_copy),
    ]


def test_flags_that_have_nothing_to_act_on_are_taken_out_of_what_runs():
    config = parse(Config, ["--num-layers", "4", "--num-query-groups", "4", "--save-interval", "5", "--no-load-optim"])
    assert to_flags(without_idle(config)) == ["--num-layers", "4"]
    assert without_idle(without_idle(config)) == without_idle(config)


def test_flags_that_have_something_to_act_on_are_not_idle():
    flags = "--save a --save-interval 5 --load a --no-load-optim --profile --use-pytorch-profiler --fp16 --hysteresis 3"
    assert idle(parse(Config, f"{flags} --recompute-granularity full --recompute-num-layers 2".split())) == []
