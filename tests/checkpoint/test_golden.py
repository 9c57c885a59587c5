"""Checkpoints of every version so far are gone on from, with the losses that their version printed."""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path

import pytest

from megapipe.config import Config
from megapipe.data.build import Datasets, build_datasets
from megapipe.data.tokenizers.tokenizer import build_tokenizer
from megapipe.flags.parse import parse
from megapipe.models.provider import gpt_provider
from megapipe.training.forward_step import forward_step
from megapipe.training.pretrain import pretrain

GOLDEN = Path(__file__).parents[1] / "golden"
FLAGS = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --ffn-hidden-size 8 --seq-length 8 "
    "--max-position-embeddings 8 --mock-data --tokenizer-type NullTokenizer --vocab-size 15 "
    "--make-vocab-size-divisible-by 16 --num-workers 0 --micro-batch-size 1 --global-batch-size 2 --lr 1e-2 "
    "--attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --log-interval 1 --split 1,0,0 --train-iters 4"
)
PRINTED = {
    "format-1-first": [("2.755721E+00", "0.693"), ("2.710668E+00", "0.634")],
    "format-1-contents": [("2.783961E+00", "0.691"), ("2.696304E+00", "0.761")],
}
"""Loss and gradient norm of iterations 3 and 4."""


def test_every_golden_checkpoint_is_tested():
    assert PRINTED.keys() == {path.name for path in GOLDEN.glob("format-*")}


@cache
def datasets() -> Datasets:
    config = parse(Config, FLAGS.split())
    return build_datasets(config, build_tokenizer(config.data))


@pytest.mark.parametrize("name", PRINTED)
def test_a_checkpoint_of_that_version_goes_on_as_it_did_then(name, tmp_path, capsys):
    shutil.copytree(GOLDEN / name, tmp_path / "run")
    flags = [*FLAGS.split(), "--load", str(tmp_path / "run"), "--save", str(tmp_path / "run"), "--save-interval", "4"]
    pretrain(parse(Config, flags), gpt_provider, forward_step, lambda config, tokenizer: datasets())
    found = re.findall(r"iteration +[34]/.* lm loss: (\S+) .*grad norm: (\S+) ", capsys.readouterr().out)
    for (loss, norm), (then, norm_then) in zip(found, PRINTED[name], strict=True):
        assert float(loss) == pytest.approx(float(then), rel=2e-6)  # float32 on another CPU
        assert float(norm) == pytest.approx(float(norm_then), abs=2e-3)
    assert (tmp_path / "run" / "iter_0000004" / "manifest.json").exists()
