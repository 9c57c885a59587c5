"""Sentences about data, tokenizer, checkpoints, the profile and the machine."""

from dataclasses import replace

import pytest

from megapipe.checks.run import validate
from megapipe.checks.vocabulary import vocabulary_problems
from megapipe.errors import ConfigError

from .sound import config, problem, problems, without


def test_no_data_and_missing_files():
    def of(*data_path):
        c = without("mock-data")
        with pytest.raises(ConfigError) as caught:
            validate(replace(c, data=replace(c.data, data_path=data_path)), has_cuda=False)
        return caught.value.problems

    assert of()[0].startswith("--data-path is missing.")
    first, second = of("1", "no/where", "2", "no/such")
    assert first.startswith("--data-path no/where: no file no/where.idx and no/where.bin.")
    assert second.startswith("--data-path no/such: no file")


def test_a_truncated_token_file_is_found_before_the_run(tmp_path):
    prefix = str(tmp_path / "text")
    (tmp_path / "text.idx").write_bytes(b"MMIDIDX\x00\x00")
    (tmp_path / "text.bin").write_bytes(b"")
    c = without("mock-data")
    with pytest.raises(ConfigError, match="damaged or incomplete"):
        validate(replace(c, data=replace(c.data, data_path=(prefix,))), has_cuda=False)


def test_a_tokenizer_needs_its_file(tmp_path):
    assert problem("--tokenizer-type SentencePieceTokenizer").startswith("--tokenizer-model is missing.")
    (tmp_path / "t.model").write_text("this is no model")
    assert "is not a complete SentencePiece model" in "\n".join(
        problems(f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {tmp_path / 't.model'}")
    )


def test_padded_vocabulary():
    assert problem("--padded-vocab-size 999").startswith("--padded-vocab-size 999 is less than the 1000 ids")
    assert problem("--make-vocab-size-divisible-by 7 --tensor-model-parallel-size 2", 2) == (
        "a vocabulary padded to 1001 rows is not divisible by --tensor-model-parallel-size 2: 1001 = 2 x 500 + 1. "
        "Use --make-vocab-size-divisible-by 8."
    )
    assert not [*vocabulary_problems(config("--tensor-model-parallel-size 8"), 50257)]


@pytest.mark.parametrize("flag", ["save", "tensorboard-dir", "data-cache-path", "metrics-file"])
def test_nothing_is_written_below_a_file(flag, tmp_path):
    """`--save file/x` ended in a traceback, a profile beside `--tensorboard-dir file/x` at the end of its window."""
    (tmp_path / "file").touch()
    (said,) = problems(f"--{flag} {tmp_path}/file/x" + " --save-interval 1" * (flag == "save"))
    assert said == f"--{flag} {tmp_path}/file/x: {tmp_path}/file is a file, not a folder. Give another name."


def test_what_the_machine_cannot_do():
    assert problem("--distributed-backend nccl") == (
        "--distributed-backend nccl needs a GPU for every rank of a machine, and torch sees fewer. Use gloo."
    )
    assert problem("--attention-backend fused").startswith("--attention-backend fused has no kernel for CPUs.")
    assert problem("--attention-backend flash", has_cuda=True).endswith("--attention-backend auto, or --bf16.")
    validate(config("--attention-backend flash --bf16"), has_cuda=True)
    assert problem("--transformer-impl transformer_engine").endswith("Use --transformer-impl local.")
