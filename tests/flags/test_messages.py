"""What a user reads after the commonest mistakes: one message, exit status 2, no traceback."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from token_files import add_document

import pretrain_gpt
from megapipe.data.indexed import IndexedWriter

GOOD = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --micro-batch-size 2 --global-batch-size 8 "
    "--train-iters 20 --lr 3e-3 --num-workers 0"
)
REAL = GOOD.replace("--mock-data ", "--data-path {}/set_text_document ")


def says(capsys: pytest.CaptureFixture[str], flags: str) -> str:
    """The message of a run that must end in one."""
    with pytest.raises(SystemExit) as stopped:
        pretrain_gpt.main(flags.split())
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert error.count("error: ") == 1
    return error


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with IndexedWriter(tmp_path / "set_text_document", np.uint16) as writer:
        for _ in range(50):
            add_document(writer, np.arange(100))
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--frobnicate 3", "unknown flag --frobnicate"),
        ("--tensor-model-paralel-size 2", "did you mean --tensor-model-parallel-size?"),
        ("--decrease-batch-size-if-needed", "--decrease-batch-size-if-needed is a Megatron-LM flag"),
        ("--num-layers 30 --pipeline-model-parallel-size 4", "30 = 4 x 7 + 2"),
        ("--num-attention-heads 4 --tensor-model-parallel-size 8", "--num-attention-heads 4"),
        ("--save out", "--save-interval"),
        ("--load nowhere", "--load nowhere"),
        ("--data-path missing", "missing.bin"),
    ],
)
def test_one_message_names_flag_and_remedy(capsys, monkeypatch, flags, expected):
    sizes = dict(zip(flags.split()[::2], flags.split()[1::2], strict=False))
    world = [int(v) for k, v in sizes.items() if k.endswith("parallel-size")]
    monkeypatch.setenv("WORLD_SIZE", str(world[0] if world else 1))
    good = GOOD.replace("--mock-data ", "") if "--data-path" in flags else GOOD
    assert expected in says(capsys, f"{good} {flags}")


def test_a_world_that_is_not_tp_x_pp_x_dp_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    text = says(capsys, f"{GOOD} --pipeline-model-parallel-size 2")
    assert "3" in text
    assert "--pipeline-model-parallel-size 2" in text


def test_a_truncated_bin_is_named_with_both_sizes(capsys, data):
    path = data / "set_text_document.bin"
    path.write_bytes(path.read_bytes()[:-10])
    text = says(capsys, REAL.format(data))
    assert str(path) in text
    assert "9990" in text.replace(",", "")


def test_a_file_that_is_no_tokenizer_is_named(capsys, data):
    model = data / "tokenizer.model"
    model.write_bytes(b"not a model at all")
    flags = REAL.format(data).replace("--tokenizer-type NullTokenizer --vocab-size 127", f"--tokenizer-model {model}")
    assert str(model) in says(capsys, flags)


def test_every_problem_is_told_at_once(capsys):
    text = says(capsys, GOOD.replace("--lr 3e-3", "--min-lr 1") + " --hidden-size 30 --save out")
    assert all(flag in text for flag in ("--lr", "--hidden-size 30", "--save-interval"))
