"""Flags of gated delta nets that do not fit each other or the ranks are refused, each with a remedy."""

from __future__ import annotations

import pytest

from megapipe.checks.run import flag_problems
from megapipe.config import Config
from megapipe.flags.parse import parse

WHOLE = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 63 --experimental-attention-variant gated_delta_net --linear-num-key-heads 4 "
    "--linear-num-value-heads 8 --linear-key-head-dim 8 --linear-value-head-dim 8"
)
REFUSED = {
    "": "Give --linear-attention-freq",
    "--linear-attention-freq x": "an integer of at least 1",
    "--linear-attention-freq [1,0]": "says 2 layers, and --num-layers 4",
    "--linear-attention-freq [0]*4": "leaves no layer",
    "--linear-attention-freq 1": "leaves no layer",
    "--linear-attention-freq 4 --linear-num-value-heads 6": "--linear-num-value-heads 6 is not divisible",
    "--linear-attention-freq 4 --tensor-model-parallel-size 8": "--linear-num-key-heads 4 is not divisible",
    "--linear-attention-freq 4 --context-parallel-size 2": "Use --cp-comm-type a2a",
    "--linear-attention-freq 4 --context-parallel-size 8 --cp-comm-type a2a": "--linear-num-key-heads 4 is not",
    "--linear-attention-freq 4 --pipeline-slices 2": "--pipeline-slices 2 does not go with",
    "--linear-attention-freq 4 --bf16 --fp8-format hybrid": "--linear-key-head-dim 8",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_flags_that_do_not_fit_are_refused(flags):
    problems = flag_problems(parse(Config, [*WHOLE.split(), *flags.split()]))
    assert any(REFUSED[flags] in line for line in problems), problems


@pytest.mark.parametrize("flags", ["4", "2 --cp-comm-type a2a --context-parallel-size 2", "[0,1,1,0]"])
def test_flags_that_fit_are_accepted(flags):
    problems = flag_problems(parse(Config, [*WHOLE.split(), "--linear-attention-freq", *flags.split()]))
    assert not [line for line in problems if "processes are not" not in line]
