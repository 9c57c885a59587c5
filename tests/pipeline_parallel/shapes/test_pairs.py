"""Two passes together: who has the turn, whose gradient comes first, how an error ends both, the bits of one by one."""

from __future__ import annotations

import gzip
import json
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import record_function

from megapipe.config import LogConfig
from megapipe.distributed.axis import Pending
from megapipe.pipeline_parallel.shapes.pairs import together
from megapipe.pipeline_parallel.shapes.pairs.together import How, Together, how
from megapipe.pipeline_parallel.stopwatch import Stopwatch
from megapipe.schedule import Kind, Pass
from megapipe.tensor_parallel.rng import MicrobatchContext, current_microbatch
from megapipe.tensor_parallel.weight_grad import WeightGrads
from megapipe.training.report.profile import Profiler, trace_path
from tools.proofs.equivalence_case import Case
from tools.proofs.tables.together import differences

CPU = torch.device("cpu")


def collective(log: list[str], name: str) -> Pending:
    log.append(f"start {name}")
    return Pending(torch.zeros(1), SimpleNamespace(wait=lambda: log.append(f"wait {name}")))


def layers(log: list[str], name: str, number: int) -> Callable[[], str]:
    """A pass that computes and communicates in turn."""

    def run() -> str:
        for layer in range(number):
            log.append(f"{name}{layer}")
            collective(log, f"{name}{layer}").wait()
        return name

    return run


def run(one: Callable[[], Any], other: Callable[[], Any], way: How = How.ONE_BEGINS) -> tuple[Any, Any]:
    return Together(CPU).run(one, other, way, Stopwatch(CPU))


def test_a_pass_computes_while_the_other_ones_collective_is_under_way() -> None:
    log: list[str] = []
    assert run(layers(log, "f", 2), layers(log, "b", 1)) == ("f", "b")
    first = ["f0", "start f0", "b0", "start b0", "wait f0", "f1", "start f1", "wait b0", "wait f1"]
    assert log == first


def test_the_other_one_may_begin_and_results_keep_their_places() -> None:
    log: list[str] = []
    assert run(layers(log, "f", 1), layers(log, "b", 1), How.OTHER_BEGINS) == ("f", "b")
    assert log == ["b0", "start b0", "f0", "start f0", "wait b0", "wait f0"]


def test_products_of_weights_are_cut_where_a_transfer_may_be_over() -> None:
    log: list[str] = []
    grads = WeightGrads()
    with grads.deferring(0):
        for name in "xyz":
            grads.submit(lambda name=name: log.append(name))  # type: ignore[misc]
    run(layers(log, "f", 2), lambda: grads.run(0))
    assert [name for name in log if " " not in name] == ["f0", "x", "f1", "y", "z"]


@pytest.mark.parametrize(
    ("pair", "same", "apart"),
    [
        ("F F", How.ONE_BEGINS, How.ONE_BEGINS),
        ("F BW", How.OTHER_BEGINS, How.OTHER_BEGINS),
        ("W F", How.OTHER_BEGINS, How.OTHER_BEGINS),
        ("B W", How.ONE_BEGINS, How.ONE_BEGINS),
        ("BW BW", How.ONE_BEGINS, How.ONE_BEGINS),
        ("BW W", How.APART, How.ONE_BEGINS),
        ("B BW", How.APART, How.ONE_BEGINS),
        ("S F", How.APART, How.APART),
    ],
)
def test_passes_of_one_stage_run_apart_where_gradients_would_add_in_another_order(
    pair: str, same: How, apart: How
) -> None:
    one, other = map(Kind, pair.split())
    for number, wanted in ((0, same), (1, apart)):
        assert how(Pass(one, 0, 1), Pass(other, number, 2), lambda: True) is wanted


def test_of_two_microbatches_one_of_which_is_recomputed_the_later_would_overtake() -> None:
    for number, wanted in ((0, How.APART), (1, How.ONE_BEGINS)):
        assert how(Pass(Kind.BW, 0, 1), Pass(Kind.BW, number, 2), lambda: False) is wanted


@pytest.mark.parametrize(("pair", "way"), [("BW BW", How.APART), ("B W", How.APART), ("F BW", How.OTHER_BEGINS)])
def test_two_backwards_run_apart_where_megatrons_code_synchronises_in_the_last(pair: str, way: How) -> None:
    """The other one's gradients would arrive while synchronisation is on: 11 of 12 hooks saw it, for 6 of 12."""
    one, other = map(Kind, pair.split())
    assert how(Pass(one, 0, 1), Pass(other, 1, 2), lambda: True, synchronises=True) is way


def failing(log: list[str], name: str) -> Callable[[], None]:
    def run() -> None:
        collective(log, name).wait()
        raise ValueError(f"{name} is not finite")

    return run


def ending(log: list[str]) -> Callable[[], None]:
    """A pass that says when it ends, by whatever."""

    def run() -> None:
        try:
            layers(log, "x", 5)()
        finally:
            log.append("ended")

    return run


@pytest.mark.parametrize("fails_first", [True, False])
def test_an_error_in_one_ends_the_other_and_comes_out_as_it_was(fails_first: bool) -> None:
    log: list[str] = []
    passes = [failing(log, "f"), ending(log)]
    both = Together(CPU)
    with pytest.raises(ValueError, match="f is not finite"):
        both.run(*(passes if fails_first else passes[::-1]), How.ONE_BEGINS, Stopwatch(CPU))
    assert log[-1] == "ended"
    assert "x4" not in log
    assert both.run(layers(log, "a", 2), layers(log, "b", 2), How.ONE_BEGINS, Stopwatch(CPU)) == ("a", "b")


def test_a_pass_that_has_not_begun_does_not_begin_when_the_first_fails() -> None:
    log: list[str] = []
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 / 0, ending(log))
    assert log == []


def test_a_signal_that_stops_the_first_pass_ends_the_second() -> None:
    log: list[str] = []

    def stop(*_: object) -> None:
        raise RuntimeError("stopped by a signal")

    def second() -> None:
        try:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            layers(log, "x", 10**6)()
        finally:
            log.append("ended")

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(RuntimeError, match="stopped by a signal"):
            run(lambda: collective(log, "f").wait(), second)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert log[-1] == "ended"


class Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str]) -> Tensor:
        ctx.log = log
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        collective(ctx.log, "grad").wait()
        return grad * 2, None


def test_an_error_ends_a_backward_in_the_middle_of_its_graph() -> None:
    log: list[str] = []
    x = torch.ones(1, requires_grad=True)
    y = Waits.apply(Waits.apply(x, log), log)  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="f is not finite"):
        run(y.backward, failing(log, "f"))
    assert x.grad is None
    y = Waits.apply(Waits.apply(x, log), log)  # type: ignore[no-untyped-call]
    z = Waits.apply(Waits.apply(x, log), log)  # type: ignore[no-untyped-call]
    run(y.backward, z.backward)
    assert x.grad == 8


def test_the_second_pass_finds_what_the_thread_of_the_first_had_set() -> None:
    seen: list[Any] = []

    def second() -> None:
        seen.extend((current_microbatch().sample, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    with MicrobatchContext(1, 41).active(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        run(lambda: None, second)
    assert seen == [41, False, True]


def test_waits_are_timed_alone_and_together() -> None:
    watch = Stopwatch(CPU)
    log: list[str] = []
    Together(CPU).run(layers(log, "f", 2), layers(log, "b", 3), How.ONE_BEGINS, watch)
    Together(CPU).run(layers(log, "f", 2), layers(log, "b", 3), How.APART, watch)
    assert len(watch.waits) == 10
    assert 0 < watch.exposed_communication < 60


_EXPERTS = Case(
    "1f1b", 2, 4, (1, 1), tp=2, sequence_parallel=True, experts="softmax", ep=2, etp=1, dispatcher="alltoall", joined=3
)
_RING = Case("zb-h1", 2, 4, (1, 1), cp=2, recompute="full", dtype="bfloat16", joined=3)


@pytest.mark.parametrize("case", [_EXPERTS, _RING], ids=["experts", "ring"])
def test_passes_run_together_have_the_bits_of_one_after_the_other(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[None] = []
    give = together.Shared.to_second
    monkeypatch.setattr(together.Shared, "to_second", lambda pair: turns.append(None) or give(pair))
    assert differences(replace(case, steps=1)) == []
    assert len(turns) > 50


def test_a_trace_has_both_of_two_passes_that_run_together(tmp_path: Path) -> None:
    log = LogConfig(profile=True, use_pytorch_profiler=True, profile_step_start=0, profile_step_end=1)
    log = replace(log, tensorboard_dir=str(tmp_path / "board"))
    profiler = Profiler(log, 0)
    profiler.before(0)

    def named(name: str) -> None:
        with record_function(name):
            collective([], name).wait()

    run(partial(named, "1F1"), partial(named, "1BW0"))
    profiler.after(1)
    events = json.loads(gzip.decompress(trace_path(log, 0).read_bytes()))["traceEvents"]
    assert {"1F1", "1BW0"} <= {event["name"] for event in events}
