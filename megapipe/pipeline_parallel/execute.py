"""The one engine: walks a program, item by item. A pass calls a stage, an exchange calls the communicator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import reduce
from time import monotonic
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.profiler import record_function

from megapipe.distributed.meeting.position import Position
from megapipe.pipeline_parallel.calls import Call, looked_up
from megapipe.pipeline_parallel.messages.messenger import Messenger
from megapipe.pipeline_parallel.messages.transport import InFlight
from megapipe.pipeline_parallel.stopwatch import Stopwatch
from megapipe.schedule import Exchange, Kind, Pass, Placement, Program
from megapipe.schedule.kinds import Lane


class Stage(Protocol):
    """What a program can do to a stage."""

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        """Input (None at the embedding) -> output (None at the loss), which the stage itself lets go of."""

    def backward(self, microbatch: int, grad: Tensor | None, *, weights: bool) -> Tensor | None:
        """Gradient of the output (None at the loss) -> of the input (None at the embedding); with or without W."""

    def weight(self, microbatch: int) -> None:
        """The weight gradients that a backward without weights left out."""

    def forget(self) -> None:
        """The forwards so far, which come again from the first one on."""


class OverlappedStage(Protocol):
    """A stage that can run its forward of one microbatch together with a backward, DualPipe's overlapped pair."""

    def overlapped_forward_backward(
        self,
        microbatch: int,
        x: Tensor | None,
        backward_stage: Stage,
        backward_microbatch: int,
        grad: Tensor | None,
        *,
        weights: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """What `forward(microbatch, x)` and `backward_stage.backward(backward_microbatch, grad)` return."""


StartOfStage = Callable[[int], Callable[[], bool | None]]
"""Begins what is done to a stage as a whole, by its number; what it returns waits for the end. V's says True if what
stands before it is to run again."""


class Lanes(NamedTuple):
    """What runs beside the passes of microbatches: how each kind begins, and how to wait for those that have begun;
    and who takes the time of all."""

    start: Mapping[Kind, StartOfStage]
    under_way: dict[Pass, Callable[[], bool | None]]
    watch: Stopwatch


class _Hand(dict[Pass, Tensor | InFlight]):
    """What a rank holds between two items, by the pass that made it; `uses`: of what is used more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[Pass, int] = {}

    def give(self, made_by: Pass, made: Tensor, uses: int) -> None:
        """Hold until it is used so often."""
        self[made_by], self.uses[made_by] = made, uses

    def take(self, made_by: Pass) -> Tensor:
        """Use once, waiting for it if it is under way."""
        held = self[made_by]  # in hand while it is waited for: so `watch` knows
        tensor = held.wait() if isinstance(held, InFlight) else held
        left = self.uses.pop(made_by, 1) - 1
        if left:
            self.give(made_by, tensor, left)
        else:
            del self[made_by]
        return tensor


def execute(
    program: Program,
    placement: Placement,
    stages: Mapping[int, Stage],
    comm: Messenger,
    *,
    on_stage_done: Callable[[int], None] | None = None,
    of_stage: Mapping[Kind, StartOfStage] | None = None,
    position: Position | None = None,
    watch: Stopwatch | None = None,
) -> None:
    """Run one rank's program from first to last item.

    A message is waited for when a pass uses it; an output lives here until it is sent and nowhere longer. While a
    profiler records, every pass is labelled `1F0`, every message `send 1F0 ->2` and `recv 0F1 <-0` (the wait for it).

    Args:
        program: this rank's part of `schedule.lower`.
        stages: this rank's stages by number; those with pairs in the program are `OverlappedStage`s.
        comm: moves tensors between ranks.
        on_stage_done: called with a stage's number when its last pass is over.
        of_stage: how the kinds of a stage as a whole that the program has are begun. A pass that needs one waits for
            it, and the end of the program for all.
        position: kept up to date, for `pipeline_parallel.watch`.
        watch: takes the time of every pass.
    Raises: whatever a pass or message raises, with its place in a note; AssertionError if a tensor is never used.
    """
    hand = _Hand()
    lanes = Lanes(of_stage or {}, {}, watch or Stopwatch(comm.pp.device))
    step = _run_labelled if profiler._is_profiler_enabled else _run
    item: tuple[Call, ...] | Exchange = ()
    position = position or Position()
    plan = looked_up(program, placement, comm.pp.rank, comm.receives_ahead)
    position.comm, position.hand, position.plan = comm, hand, plan  # in this order: `watch` reads them meanwhile
    at = 0
    try:
        while at < len(plan):
            item = plan[at]
            position.at = item, monotonic()
            lanes.watch.ask()
            if step(item, stages, hand, comm, lanes):
                _forget(stages, hand)
                lanes.watch.restart()
                at = 0
                continue
            at += 1
            if on_stage_done is not None and not isinstance(item, Exchange):
                for call in item:
                    if call.ends:
                        on_stage_done(call.item.stage)
        position.at = "the end of the passes", monotonic()
        for needed, end in lanes.under_way.items():
            with record_function(f"wait {needed}"):
                end()
        comm.finish()
    except Exception as error:
        error.add_note(f"in {_text(item)} of pipeline rank {comm.pp.rank}")
        raise
    assert not hand, f"never used: {', '.join(map(str, hand))}"


def _forget(stages: Mapping[int, Stage], hand: _Hand) -> None:
    """Go back to the beginning of the program. All that other ranks have sent so far is here or awaited."""
    for held in hand.values():
        if isinstance(held, InFlight):
            held.wait()
    hand.clear()
    for stage in stages.values():
        stage.forget()


def _run(
    item: tuple[Call, ...] | Exchange, stages: Mapping[int, Stage], hand: _Hand, comm: Messenger, lanes: Lanes
) -> bool:
    """Returns: is the program to begin again?"""
    if isinstance(item, Exchange):
        hand.update(comm.exchange(item.messages, hand.take))
        return False
    for needed in (p for call in item for p in call.awaits if p in lanes.under_way):
        lanes.under_way.pop(needed)()
    kind, stage, _ = item[0].item
    if kind.rule.per_stage:
        begin = lanes.watch.mark()
        finish = lanes.start[kind](stage)
        if kind.rule.lane is Lane.COMPUTE:
            again = bool(finish())
            lanes.watch.note(begin)
            return again
        lanes.under_way[item[0].item] = finish
    elif len(item) == 2:
        _run_pair(cast(OverlappedStage, stages[item[0].item.stage]), item, stages, hand, lanes.watch)
    else:
        _run_pass(item[0], stages[item[0].item.stage], hand, lanes.watch)
    return False


def _run_pass(call: Call, stage: Stage, hand: _Hand, watch: Stopwatch) -> None:
    kind, _, microbatch = call.item
    given = [hand.take(taken) for taken, _ in call.takes]
    begin = watch.mark()
    made = _DISPATCH[kind](stage, microbatch, given)
    watch.note(begin)
    _give(call, made, hand)


_DISPATCH: Mapping[Kind, Callable[[Any, int, list[Tensor]], Tensor | None]] = {
    Kind.F: lambda stage, microbatch, given: stage.forward(microbatch, _sum(given)),
    Kind.B: lambda stage, microbatch, given: stage.backward(microbatch, _sum(given), weights=False),
    Kind.BW: lambda stage, microbatch, given: stage.backward(microbatch, _sum(given), weights=True),
    Kind.W: lambda stage, microbatch, _: stage.weight(microbatch),
    Kind.E: lambda stage, microbatch, _: stage.share.look_up(microbatch),
    Kind.S: lambda stage, microbatch, given: stage.share.give(microbatch, *given),
    Kind.C: lambda stage, microbatch, given: stage.combine(microbatch, given),
    Kind.T: lambda stage, microbatch, given: stage.share.head_gradient(microbatch, *given),
    Kind.EW: lambda stage, microbatch, given: stage.share.rows_gradient(microbatch, *given),
}
"""How a stage runs a pass of one microbatch."""


def _run_pair(
    forward: OverlappedStage, pair: tuple[Call, ...], stages: Mapping[int, Stage], hand: _Hand, watch: Stopwatch
) -> None:
    f, b = pair
    x, grad = (_sum([hand.take(taken) for taken, _ in call.takes]) for call in pair)
    begin = watch.mark()
    made = forward.overlapped_forward_backward(
        f.item.microbatch, x, stages[b.item.stage], b.item.microbatch, grad, weights=not b.item.kind.is_split
    )
    watch.note(begin, passes=2)
    for call, tensor in zip(pair, made, strict=True):
        _give(call, tensor, hand)


def _sum(given: list[Tensor]) -> Tensor | None:
    """In their order, so that it has the same bits whatever arrives first."""
    return reduce(torch.add, given) if given else None


def _give(call: Call, made: Tensor | None, hand: _Hand) -> None:
    if call.gives:
        assert made is not None, f"{call.item} made nothing for the next stage"
        hand.give(call.item, made, call.gives)


def _run_labelled(
    item: tuple[Call, ...] | Exchange, stages: Mapping[int, Stage], hand: _Hand, comm: Messenger, lanes: Lanes
) -> bool:
    if isinstance(item, Exchange):
        names = [f"send {m.made_by} ->{m.dst}" for m in item.messages if m.src == comm.pp.rank]
    else:
        for needed in (p for call in item for p in call.awaits if p in lanes.under_way):
            with record_function(f"wait {needed}"):
                lanes.under_way.pop(needed)()
        for call in item:
            for taken, source in call.takes:
                if isinstance(held := hand[taken], InFlight):
                    with record_function(f"recv {taken} <-{source}"):
                        hand[taken] = held.wait()
        names = [str(call.item) for call in item]
    with ExitStack() as labels:
        for name in names:
            labels.enter_context(record_function(name))
        return _run(item, stages, hand, comm, lanes)


def _text(item: tuple[Call, ...] | Exchange) -> str:
    if isinstance(item, Exchange):
        return f"exchange {' '.join(map(str, item.messages))}"
    return f"pass {' '.join(str(call.item) for call in item)}"
