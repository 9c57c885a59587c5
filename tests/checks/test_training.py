"""Flags of precision, sequence parallelism and leaving a run: the sentences a user reads, and what the flags cause."""

from __future__ import annotations

from dataclasses import replace

import programs
import pytest

from megapipe.checks.run import flag_problems
from megapipe.checks.training import training_problems
from megapipe.config import Config, ModelConfig, ParallelConfig, TrainConfig
from megapipe.flags.parse import parse


def problems(**train: object) -> list[str]:
    return list(training_problems(Config(train=TrainConfig(**train))))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"bf16": True, "fp16": True}, "--bf16 and --fp16 are two types for the same weights. Leave one out."),
        (
            {"grad_reduce_in_bf16": True},
            "--grad-reduce-in-bf16 has no effect without --bf16. Add it, or leave --grad-reduce-in-bf16 out.",
        ),
        (
            {"fp16": True, "initial_loss_scale": 2.0, "min_loss_scale": 8.0},
            "--initial-loss-scale 2 is below --min-loss-scale 8. Use --initial-loss-scale 8.",
        ),
    ],
)
def test_flags_that_contradict_or_need_each_other(flags, sentence):
    assert problems(**flags) == [sentence]


def test_a_sequence_must_divide_over_the_ranks_that_share_it():
    config = Config(
        model=ModelConfig(sequence_parallel=True),
        parallel=ParallelConfig(tensor_model_parallel_size=4),
        train=TrainConfig(seq_length=18),
    )
    assert list(training_problems(config)) == [
        "--sequence-parallel splits --seq-length 18 over --tensor-model-parallel-size 4, which does not divide it. "
        "Use --seq-length 20, or leave --sequence-parallel out."
    ]
    assert not list(training_problems(replace(config, train=TrainConfig(seq_length=20))))


def test_deterministic_mode_refuses_a_kernel_that_does_not_repeat(tmp_path):
    (tmp_path / "main.py").write_text(
        "import torch; from megapipe.distributed.device import be_deterministic; be_deterministic();"
        "torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2))"
    )
    done = programs.run([tmp_path / "main.py"])
    assert "does not have a deterministic implementation" in done.stderr


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            "--use-megatron-fsdp --enable-optimizer-post-validation",
            "--enable-optimizer-post-validation repeats forwards after a wrong guess, and --use-megatron-fsdp lets go "
            "of what they need. Leave one of them out.",
        ),
        (
            "--use-torch-fsdp2 --check-weight-hash-across-dp-replicas-interval 5",
            "--check-weight-hash-across-dp-replicas-interval 5 compares weights that --use-torch-fsdp2 leaves no rank "
            "whole. Leave one of them out.",
        ),
        (
            "--use-megatron-fsdp --reschedule-after 5",
            "--reschedule-after 5 times passes, not what --use-megatron-fsdp gathers and reduces beside them. Leave "
            "one of them out.",
        ),
        (
            "--use-megatron-fsdp --use-torch-fsdp2",
            "--use-megatron-fsdp and --use-torch-fsdp2 say the same. Leave one out.",
        ),
        (
            "--use-megatron-fsdp --optimizer muon",
            "--optimizer muon needs whole parameters, and --use-megatron-fsdp splits them over data-parallel ranks. "
            "Leave --use-megatron-fsdp out, or use --optimizer adam.",
        ),
    ],
)
def test_shares_refuse_what_needs_the_whole(flags, sentence):
    """On four ranks, two of each stage."""
    base = "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 "
    base += "--micro-batch-size 1 --global-batch-size 16 --train-iters 9 --lr 1e-3 --mock-data --vocab-size 127 "
    base += "--tokenizer-type NullTokenizer --pipeline-model-parallel-size 2 --make-vocab-size-divisible-by 2 "
    config = parse(Config, (base + flags).split())
    assert flag_problems(replace(config, world_size=4)) == [sentence]
