"""What a user reads about experts that cannot be, each in one line and all at once."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import pytest

from megapipe.checks.run import validate
from megapipe.config.model.moe import layer_frequency
from megapipe.flags.idle import idle

from .sound import config

EXPERTS = "--num-experts 8"


MIXTRAL = """--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
--moe-grouped-gemm --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce
--use-distributed-optimizer --expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --moe-permute-fusion"""
DEEPSEEK = """--num-experts 8 --moe-router-topk 4 --moe-router-load-balancing-type seq_aux_loss
--moe-aux-loss-coeff 1e-4 --moe-layer-freq ([0]*3+[1]*5) --moe-router-pre-softmax --moe-router-score-function sigmoid
--moe-router-dtype fp32 --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --moe-router-num-groups 4
--moe-router-group-topk 2
--moe-router-topk-scaling-factor 2.5 --moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap
--moe-grouped-gemm --moe-token-dispatcher-type flex --moe-enable-deepep --moe-ffn-hidden-size 32 --moe-router-fusion"""


@pytest.mark.parametrize("flags", [MIXTRAL, DEEPSEEK])
def test_launch_lists_of_experts_start(flags):
    validate(config(flags), has_cuda=False)


def test_what_a_run_demands_of_its_model_is_not_asked_of_a_dense_layer():
    # found by the covering array: the dense layers lack experts for --expert-model-parallel-size
    flags = """--num-experts 8 --moe-layer-freq 2 --expert-model-parallel-size 2 --moe-per-layer-logging
    --per-layer-overrides {"1":{"ffn_hidden_size":64}}"""
    validate(config(flags, world_size=2), has_cuda=False)


def test_what_has_nothing_to_act_on_is_said():
    line = ("--moe-router-pre-softmax", "there is no softmax, without --moe-router-score-function softmax")
    assert idle(config(DEEPSEEK)) == [line]


def test_a_frequency_may_have_the_quotes_that_a_shells_array_keeps():
    assert layer_frequency("'([0]*1+[1]*2)'") == [0, 1, 1]


LISTS = [
    "[1]",
    "[0,]",
    "[ 0 , 1 ]*2",
    "3*[1]",
    "([0]*3+[1]*24)*2",
    "[1]*2*3",
    "[]+[1]",
    "1",
    "12",
    "((7))",
    "[0]*0+[1]",
]
NO_LISTS = ["", "0", "-1", "[2]", "[1", "1]", "(1", "1)", "[1,,1]", "[,1]", "[1]*[1]", "2*3", "1+1", "[1]+1", "True"]
NO_LISTS += ["[1]*99999999", "[0]**2", "[1] [0]", "1 2", "[x]", "[[1]]", "1.5", "(" * 5000 + "1" + ")" * 5000, "٣"]


@pytest.mark.parametrize("text", LISTS)
def test_a_frequency_is_read_as_python_does(text):
    assert layer_frequency(text) == eval(text)


@pytest.mark.parametrize("text", NO_LISTS)
def test_what_is_no_frequency_is_refused(text):
    with pytest.raises(ValueError):
        layer_frequency(text)


class Garbage:
    """An object that the garbage collector alone frees, with a finalizer in which another thread may go on."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        for _ in range(10):
            pass


@contextmanager
def threads_that_take_turns_often() -> Iterator[None]:
    seconds = sys.getswitchinterval()
    counts = gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(3)
    try:
        yield
    finally:
        sys.setswitchinterval(seconds)
        gc.set_threshold(*counts)


def test_threads_at_different_depths_may_read_a_frequency_at_a_time():
    # ast.parse of CPython 3.11 raises SystemError here: AST constructor recursion depth mismatch
    found = []

    def read(depth: int) -> None:
        if depth:
            return read(depth - 1)
        for _ in range(2000):
            Garbage()
            found.append(layer_frequency("[0, 1, 1, 1] + [0] * 3"))

    threads = [Thread(target=read, args=(7 * n,)) for n in range(4)]
    with threads_that_take_turns_often():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 4 * 2000


UPCYCLED = "--moe-use-upcycling --load dense --save made --save-interval 5"
