"""The one engine: walks a program, item by item. A pass calls a stage, an exchange calls the communicator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache, reduce
from time import monotonic
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.profiler import record_function

from megapipe.distributed.position import Position
from megapipe.pipeline_parallel.messenger import Messenger, receive_ahead
from megapipe.pipeline_parallel.transport import Ahead, InFlight
from megapipe.schedule import Exchange, Kind, Pass, Placement, Program
from megapipe.schedule.kinds import Lane, Where


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


class Call(NamedTuple):
    """A pass as the engine needs it.

    Attributes:
        takes: the passes whose results it uses, each with the rank that it is made on; none at an end of the model, and
            for W.
        gives: how often its result is used here, by passes and by messages.
        ends: is it the last pass of a microbatch on its stage?
        awaits: passes of other lanes that must have ended.
    """

    item: Pass
    takes: tuple[tuple[Pass, int], ...]
    gives: int
    ends: bool
    awaits: tuple[Pass, ...]


StartOfStage = Callable[[int], Callable[[], bool | None]]
"""Begins what is done to a stage as a whole, by its number; what it returns waits for the end. V's says True if what
stands before it is to run again."""


class Lanes(NamedTuple):
    """What runs beside the passes of microbatches: how each kind begins, and how to wait for those that have begun."""

    start: Mapping[Kind, StartOfStage]
    under_way: dict[Pass, Callable[[], bool | None]]


_Plan = tuple[tuple[Call, ...] | Exchange, ...]


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
        position: kept up to date, for `watch`.
    Raises: whatever a pass or message raises, with its place in a note; AssertionError if a tensor is never used.
    """
    hand = _Hand()
    lanes = Lanes(of_stage or {}, {})
    step = _run_labelled if profiler._is_profiler_enabled else _run
    item: tuple[Call, ...] | Exchange = ()
    position = position or Position()
    plan = _plan(program, placement, comm.pp.rank, comm.receives_ahead)
    position.plan, position.hand, position.comm = plan, hand, comm
    at = 0
    try:
        while at < len(plan):
            item = plan[at]
            position.at = item, monotonic()
            if step(item, stages, hand, comm, lanes):
                _forget(stages, hand)
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


@lru_cache(maxsize=64)
def _plan(program: Program, placement: Placement, rank: int, ahead: Ahead) -> _Plan:
    """The program with everything looked up that does not change from step to step."""
    items = receive_ahead(program, rank, ahead)
    passes = [p for item in items if not isinstance(item, Exchange) for p in item]
    messages = [m for item in items if isinstance(item, Exchange) for m in item.messages]
    made = {(p.kind.rule.makes[0], p.stage, p.microbatch): p for p in [*passes, *(m.made_by for m in messages)]}
    takes = {p: [made[what, stage, p.microbatch] for what, stage in placement.sources(p)] for p in passes}
    uses = Counter([*(p for taken in takes.values() for p in taken), *(m.made_by for m in messages if m.src == rank)])
    last = {p.stage: p for p in passes if not p.kind.rule.per_stage}
    beside = [p for p in passes if p.kind.rule.lane is not Lane.COMPUTE]

    def call(p: Pass) -> Call:
        taken = tuple((one, placement.rank_of[one.stage]) for one in takes[p])
        return Call(p, taken, uses[p], last.get(p.stage) == p, tuple(_awaited(p, beside)))

    return tuple(item if isinstance(item, Exchange) else tuple(map(call, item)) for item in items)


def _awaited(item: Pass, beside: Sequence[Pass]) -> Iterator[Pass]:
    """Of the passes on other lanes those whose results a pass needs: its stage's own, or any if it needs all."""
    for need in item.kind.rule.needs:
        own = need.where is Where.STEP
        yield from (p for p in beside if need.made in p.kind.rule.makes and (p.stage == item.stage or not own))


def _forget(stages: Mapping[int, Stage], hand: _Hand) -> None:
    """Go back to the beginning of the program. All that other ranks have sent so far is here or awaited."""
    for held in hand.values():
        if isinstance(held, InFlight):
            held.wait()
    hand.clear()
    hand.uses.clear()
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
        finish = lanes.start[kind](stage)
        if kind.rule.lane is Lane.COMPUTE:
            return bool(finish())
        lanes.under_way[item[0].item] = finish
    elif len(item) == 2:
        _run_pair(cast(OverlappedStage, stages[item[0].item.stage]), item, stages, hand)
    else:
        _run_pass(item[0], stages[item[0].item.stage], hand)
    return False


def _run_pass(call: Call, stage: Stage, hand: _Hand) -> None:
    kind, _, microbatch = call.item
    _give(call, _DISPATCH[kind](stage, microbatch, [hand.take(taken) for taken, _ in call.takes]), hand)


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


def _run_pair(forward: OverlappedStage, pair: tuple[Call, ...], stages: Mapping[int, Stage], hand: _Hand) -> None:
    f, b = pair
    made = forward.overlapped_forward_backward(
        f.item.microbatch,
        _sum([hand.take(taken) for taken, _ in f.takes]),
        stages[b.item.stage],
        b.item.microbatch,
        _sum([hand.take(taken) for taken, _ in b.takes]),
        weights=not b.item.kind.is_split,
    )
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
