"""What Megatron derives from flags, and every sentence a user reads when flags cannot be true together."""

from dataclasses import replace

import pytest

from megapipe.checks.run import validate
from megapipe.config import Config, ModelConfig
from megapipe.errors import ConfigError
from megapipe.schedule import Kind, Pass, Placement, Schedule, build, to_json

from .sound import config, problem, problems, without


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("", 1),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --global-batch-size 32", 16),
        ("--group-query-attention --num-query-groups 4 --tensor-model-parallel-size 4", 4),
        ("--save runs/new --save-interval 5 --load runs/new", 1),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 5 --lr-warmup-iters 3 --min-lr 1e-4", 1),
        ("--eval-iters 0 --eval-interval 5 --split 969,30,1", 1),
    ],
)
def test_a_sound_configuration_passes(flags, world_size):
    validate(config(flags, world_size), has_cuda=False)


# What Megatron derives (megatron/training/arguments.py, validate_args).


def test_ffn_is_four_times_hidden_and_two_thirds_of_it_rounded_down_to_64_with_swiglu():
    assert ModelConfig(hidden_size=768).ffn == 3072
    assert ModelConfig(hidden_size=4096, swiglu=True).ffn == 10880


def test_padded_vocabulary_does_not_depend_on_tensor_parallel_size():
    assert ModelConfig().padded_vocab(50257) == 50304
    assert ModelConfig(padded_vocab_size=50432).padded_vocab(50257) == 50432


def test_microbatches_are_the_quotient_of_the_batch():
    c = config("--pipeline-model-parallel-size 2 --global-batch-size 24", world_size=4)
    assert (c.data_parallel_size, c.global_batch_size, c.num_microbatches) == (2, 24, 6)
    assert config(world_size=4).global_batch_size == 8


# Single values.


def test_every_missing_flag_is_named_with_an_example():
    with pytest.raises(ConfigError) as caught:
        validate(without("lr", "micro-batch-size", "train-iters"), has_cuda=False)
    assert caught.value.problems == (
        "--micro-batch-size is missing, for example --micro-batch-size 4",
        "--lr is missing, for example --lr 3e-4",
        "--train-iters (or --train-samples) is missing, for example --train-iters 1000",
    )


def test_an_empty_configuration_is_a_list_of_what_is_missing():
    with pytest.raises(ConfigError) as caught:
        validate(Config(), has_cuda=False)
    assert len(caught.value.problems) == 7 + 3  # that are Required; length of the run, data, tokenizer


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--attention-dropout 1", "--attention-dropout 1.0 must be at least 0 and below 1"),
        ("--lr-warmup-fraction 1.5", "--lr-warmup-fraction 1.5 must be at least 0 and below 1"),
        ("--eval-interval 0", "--eval-interval 0 must be at least 1"),
        ("--lr nan", "--lr nan must be above 0"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size 0 must be at least 1 and at most 100000"),
        ("--rotary-percent 0", "--rotary-percent 0.0 must be above 0 and at most 1"),
    ],
)
def test_a_value_out_of_range(flags, text):
    assert problem(flags) == text


# Model and layout.


def test_layers_that_do_not_fill_the_stages():
    assert problem("--num-layers 30 --pipeline-model-parallel-size 4", 4) == (
        "--num-layers 30 does not fill 4 stages: 30 = 4 x 7 + 2.\n"
        "      Use --num-layers 28 or 32,\n"
        "      or --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split,\n"
        "      or --decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 7,\n"
        "      or --pipeline-model-parallel-layout auto."
    )


def test_heads_that_do_not_divide_by_tensor_ranks():
    assert problem("--num-attention-heads 4 --tensor-model-parallel-size 8", 8) == (
        "--num-attention-heads 4 does not divide by --tensor-model-parallel-size 8: 4 = 8 x 0 + 4. "
        "Use --tensor-model-parallel-size 1, 2 or 4."
    )


def test_query_groups_and_ffn_that_do_not_divide_by_tensor_ranks():
    flags = "--group-query-attention --num-query-groups 2 --ffn-hidden-size 102 --tensor-model-parallel-size 4"
    assert problems(flags, 4) == [
        "--num-query-groups 2 does not divide by --tensor-model-parallel-size 4: 2 = 4 x 0 + 2. "
        "Use --tensor-model-parallel-size 1 or 2.",
        "--ffn-hidden-size 102 does not divide by --tensor-model-parallel-size 4: 102 = 4 x 25 + 2. "
        "Use --tensor-model-parallel-size 1 or 2.",
    ]


def test_heads_that_do_not_divide_by_query_groups():
    assert problem("--group-query-attention --num-query-groups 3") == (
        "--num-attention-heads 8 does not divide by --num-query-groups 3: 8 = 3 x 2 + 2. "
        "Use --num-query-groups 1, 2, 4 or 8."
    )


def test_hidden_that_does_not_divide_by_heads():
    assert problem("--hidden-size 100") == (
        "--hidden-size 100 does not divide by --num-attention-heads 8: 100 = 8 x 12 + 4. "
        "Use --hidden-size 96 or 104, or give the size of a head with --kv-channels."
    )


def test_rotary_positions_need_an_even_part_of_the_head():
    assert problem("--position-embedding-type rope --kv-channels 7").startswith(
        "--position-embedding-type rope turns pairs, but --rotary-percent 1.0 of a head of 7 is 7, an odd number."
    )


def test_sequence_longer_than_positions():
    assert problem("--seq-length 64") == (
        "--seq-length 64 is above --max-position-embeddings 32. Use --max-position-embeddings 64."
    )


def test_world_size_that_is_no_multiple_lists_what_would_fit():
    assert problem("--tensor-model-parallel-size 4", 6) == (
        "6 processes are not --tensor-model-parallel-size 4 x --pipeline-model-parallel-size 1 x data-parallel ranks: "
        "6 = 4 x 1 + 2.\n      Start a multiple of 4, such as torchrun --nproc-per-node 4, or use tensor x pipeline "
        "1 x 2, 2 x 1, 1 x 1."
    )


def test_batch_that_does_not_divide():
    assert problem("--global-batch-size 10", 2) == (
        "--global-batch-size 10 does not divide by --micro-batch-size 2 x 2 data-parallel ranks = 4: 10 = 4 x 2 + 2.\n"
        "      Use --global-batch-size 8 or 12."
    )


def test_unknown_schedule_gets_a_suggestion():
    assert (
        problem("--pipeline-schedule 1f1")
        == "--pipeline-schedule 1f1: unknown schedule 1f1; did you mean 1f1b or 1f1b-v?"
    )


def test_a_schedule_that_needs_more_microbatches_shows_where_they_come_from():
    text = problem("--pipeline-schedule dualpipe --pipeline-model-parallel-size 4 --global-batch-size 12", 4)
    assert text.startswith("--pipeline-schedule dualpipe on 4 ranks needs an even number of at least 8")
    assert "6 microbatches = --global-batch-size 12 / (--micro-batch-size 2 x 1 data-parallel ranks)" in text


@pytest.mark.parametrize(
    ("rank_of", "sentence"),
    [
        (
            [0, 1, 0, 1],
            "stage 0 is on rank 0, its replica 2 on 0. Gradients are summed between mirrored ranks, 0 and 1",
        ),
        ([0, 0, 1, 1, 1, 1, 0, 0], "the model is there 4 times; at most two chains train."),
        ([0, 0, 1, 1], "rank 1 has no stage of the first chain, 0 to 1. With two chains every rank needs a stage of"),
    ],
)
def test_a_file_with_chains_that_cannot_train_is_refused(tmp_path, rank_of, sentence):
    place = Placement(tuple(rank_of), 2)
    rows = [[], []]
    for number in range(4):
        chain = number * place.num_chains // 4
        for kind in (Kind.F, Kind.BW):
            for stage in (2 * chain, 2 * chain + 1)[:: 1 if kind is Kind.F else -1]:
                rows[rank_of[stage]].append((Pass(kind, stage, number),))
    file = tmp_path / "chains.json"
    file.write_text(to_json(Schedule("chains", place, 4, tuple(map(tuple, rows)))))
    flags = f"--pipeline-schedule {file} --pipeline-model-parallel-size 2 --global-batch-size 8"
    assert sentence in problem(flags, 2)


def test_a_schedule_from_a_file_is_checked_as_it_is(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(to_json(build("1f1b", 2, 3)))
    flags = f"--pipeline-schedule {file} --pipeline-model-parallel-size 2 --global-batch-size"
    validate(config(f"{flags} 6", 2), has_cuda=False)
    assert problem(f"{flags} 6 --num-layers 7", 2).startswith("--num-layers 7 does not fill 2 stages: 7 = 2 x 3 + 1.")
    assert problem(f"{flags} 8", 2) == (
        f"--pipeline-schedule {file} is made for 2 ranks and 3 microbatches, not 2 and 4.\n"
        "      4 microbatches = --global-batch-size 8 / (--micro-batch-size 2 x 1 data-parallel ranks), "
        "--pipeline-model-parallel-size 2.\n"
        "      Use --global-batch-size 6, or make the file for it."
    )
    assert "Use --pipeline-model-parallel-size 2, or" in problem(f"--pipeline-schedule {file} --global-batch-size 6")
    assert "no/such.csv" in problem("--pipeline-schedule no/such.csv")


def test_layers_and_batch_are_named_together():
    both = problems("--num-layers 7 --pipeline-model-parallel-size 2 --global-batch-size 3", 2)
    assert [text.split()[0] for text in both] == ["--global-batch-size", "--num-layers"]


# Length and learning rate.


def test_iterations_and_samples_do_not_mix():
    assert problems("--lr-decay-samples 40 --lr-warmup-fraction 0.1 --lr-warmup-iters 2") == [
        "--lr-decay-samples 40 counts samples, but --train-iters counts iters. "
        "Use --lr-decay-iters, or --train-samples.",
        "--lr-warmup-fraction 0.1 and --lr-warmup-iters 2 both give the warm-up. Leave one out.",
    ]
    assert problem("--train-samples 40") == "--train-iters 20 and --train-samples 40: one of them is the length."


def test_fewer_samples_than_a_batch():
    with pytest.raises(ConfigError, match="--train-samples 1 is less than one batch of 2"):
        validate(
            replace(without("train-iters"), train=replace(config().train, train_iters=None, train_samples=1)),
            has_cuda=False,
        )


def test_learning_rate_limits():
    assert problems("--min-lr 1 --lr-warmup-init 2") == [
        "--min-lr 1 is above --lr 0.001. Use --min-lr 0.0001.",
        "--lr-warmup-init 2 is above --lr 0.001. Use --lr-warmup-init 0.0001.",
    ]


def test_a_curve_that_cannot_be():
    assert problem("--lr-warmup-iters 20").startswith("the learning rate warms up for 40 samples but decays until")
    assert problem("--lr-decay-style WSD").startswith("--lr-decay-style WSD needs --lr-wsd-decay-iters")


def test_the_command_line_or_the_checkpoint_decides():
    assert "Leave one out." in problem("--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler")
