"""What Megatron derives from flags, and every sentence a user reads when flags cannot be true together."""

from dataclasses import replace

import pytest

from megapipe.checks.run import validate
from megapipe.config import Config, ModelConfig
from megapipe.errors import ConfigError
from megapipe.schedule import Kind, Pass, Placement, Schedule, build, to_json

from .sound import config, problem, without


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


# Model and layout.


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


# Length and learning rate.


def test_fewer_samples_than_a_batch():
    with pytest.raises(ConfigError, match="--train-samples 1 is less than one batch of 2"):
        validate(
            replace(without("train-iters"), batch=replace(config().batch, train_iters=None, train_samples=1)),
            has_cuda=False,
        )
