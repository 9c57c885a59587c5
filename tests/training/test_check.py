"""--check: one process tells what would run, and what becomes of each flag."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pretrain_gpt
from megapipe.checks.machine import on_cpus
from megapipe.config import Config
from megapipe.flags.parse import parse

RUN = (
    "--check --check-paths no --world-size 16 --num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 32 --lr 1e-3 --train-iters 20 --bf16 "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --data-path no/where --tokenizer-model no.model "
    "--tokenizer-type SentencePieceTokenizer --async-save --save-interval 5 --distributed-backend nccl"
)


def test_a_check_lists_what_holds_and_what_is_missing_and_plans(capsys):
    pretrain_gpt.main(RUN.split())
    text = re.sub(" +", " ", capsys.readouterr().out)
    assert "16 processes = 2 tensor x 4 pipeline x 2 data parallel; a batch of 32 = 8 microbatches of 2 each" in text
    assert " --async-save nothing is saved, without --save\n" in text
    assert " --save-interval 5 nothing is saved, without --save\n" in text
    (flags,) = (line for line in text.splitlines() if line.startswith("flags: "))
    assert "--save-interval" not in flags
    assert "--num-layers 8 " in flags
    assert "missing: --data-path no/where: no file" in text
    assert "missing: --tokenizer-model no.model: No such file" in text
    assert "the plan assumes 32000 ids" in text
    assert "pipeline schedule 1f1b: predicted bubble" in text


def test_the_kubernetes_manifest_asks_for_a_run_that_checks_out(capsys):
    text = Path(pretrain_gpt.__file__).with_name("scripts").joinpath("pretrain_gpt_kubernetes.yaml").read_text()
    pretrain_gpt.main(["--check", "--check-paths", "no", "--world-size", "16", *re.findall(r"- (--\S+)", text)])
    assert "16 processes = 2 tensor x 4 pipeline x 2 data parallel" in capsys.readouterr().out


def test_a_check_that_finds_a_problem_exits_with_2(capsys):
    with pytest.raises(SystemExit) as stopped:
        pretrain_gpt.main(RUN.replace("--num-layers 8", "--num-layers 9").split())
    assert stopped.value.code == 2
    assert "--num-layers 9 does not fill 4 stages" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        pretrain_gpt.main(RUN.replace("--check-paths no", "--check-paths yes").split())
    assert "no.model: No such file" in capsys.readouterr().err


def test_a_torch_without_cuda_runs_a_clusters_flags_and_says_how():
    flags = "--transformer-impl transformer_engine --attention-backend fused --distributed-backend nccl"
    config = on_cpus(parse(Config, flags.split()))
    assert (config.model.transformer_impl, config.model.attention_backend) == ("local", "auto")
    assert config.parallel.distributed_backend == "gloo"
    assert [flag for flag, _ in config.holding] == [f"--{flag}" for flag in flags.removeprefix("--").split(" --")]
    assert on_cpus(Config()) == Config()
