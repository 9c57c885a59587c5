"""The one engine: walks a program, item by item. A pass begins on its stage, an exchange calls the communicator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from time import monotonic
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.profiler import record_function

from megapipe.distributed.axis import at_waits
from megapipe.distributed.meeting.position import Position
from megapipe.pipeline_parallel.calls import Call, looked_up
from megapipe.pipeline_parallel.families import PASSES
from megapipe.pipeline_parallel.messages.messenger import Messenger
from megapipe.pipeline_parallel.messages.transport import InFlight
from megapipe.pipeline_parallel.passes.begin import AGAIN, Begun, Made, sum_of
from megapipe.pipeline_parallel.stopwatch import Stopwatch
from megapipe.pipeline_parallel.together import Together, how
from megapipe.schedule import Exchange, Pass, Placement, Program


class Stage(Protocol):
    """A stage as a program sees it."""

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        """Input (None at the embedding) -> output (None at the loss), which the stage itself lets go of."""

    def backward(self, microbatch: int, grad: Tensor | None, *, weights: bool) -> Tensor | None:
        """Gradient of the output (None at the loss) -> of the input (None at the embedding); with or without W."""

    def weight(self, microbatch: int) -> None:
        """The weight gradients that a backward without weights left out."""

    def forget(self) -> None:
        """The forwards so far, which come again from the first one on."""

    def alike(self, microbatch: int, other: int) -> bool:
        """Do backwards of these microbatches do the same, in the same order?"""


class PairedStage(Protocol):
    """A stage that runs its forward of one microbatch together with a backward in a way of its own, DeepSeek's."""

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
        """The results of `forward(microbatch, x)` and `backward_stage.backward(backward_microbatch, grad)`."""


_NOTHING = "{} made nothing for the next stage"


class _Hand(dict[Pass, Tensor | InFlight | Begun]):
    """The tensors that a rank holds between two items, by the pass that made them.

    Attributes:
        uses: of what is used more than once.
        beside: passes of other lanes that have begun and make nothing that is handed over.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[Pass, int] = {}
        self.beside: dict[Pass, Begun] = {}

    def give(self, made_by: Pass, made: Tensor | Begun, uses: int) -> None:
        """Hold until it is used so often."""
        self[made_by], self.uses[made_by] = made, uses

    def taken(self, call: Call) -> list[Tensor]:
        """The inputs of a pass."""
        given = []
        for made_by, _ in call.takes:
            given.append(self.take(made_by))
            if made_by in call.leaves:
                self[made_by] = given[-1]
        return given

    def take(self, made_by: Pass) -> Tensor:
        """Use once, waiting for it if it is under way."""
        held = self[made_by]  # in hand while it is waited for: so `watch` knows
        tensor = held if isinstance(held, Tensor) else held.wait()
        assert tensor is not None, _NOTHING.format(made_by)
        left = self.uses.pop(made_by, 1) - 1
        if left:
            self.give(made_by, tensor, left)
        else:
            del self[made_by]
        return tensor

    def end(self, passes: Iterable[Pass]) -> None:
        """Wait for those of them that run beside and have not been waited for."""
        for one in passes:
            if isinstance(begun := self.beside.pop(one, None) or self.get(one), Begun):
                with record_function(f"wait {one}") if profiler._is_profiler_enabled else nullcontext():
                    made = begun.wait()
                if one in self:
                    assert made is not None, _NOTHING.format(one)
                    self[one] = made


def execute(
    program: Program,
    placement: Placement,
    stages: Mapping[int, Stage],
    comm: Messenger,
    *,
    on_stage_done: Callable[[int], None] | None = None,
    read: Callable[[Pass], None] | None = None,
    position: Position | None = None,
    watch: Stopwatch | None = None,
    together: Together | None = None,
) -> None:
    """Run one rank's program from first to last item.

    A pass begins as `PASSES` says. On the compute lane it is waited for at once, on others where it is first needed, or
    at the end. A message is waited for when a pass uses it; an output lives here until it is sent and nowhere longer.
    While a profiler records, every pass is labelled `1F0`, every message `send 1F0 ->2` and `recv 0F1 <-0` (the wait
    for it), and the wait for a pass of another lane `wait 1G0`.

    Args:
        program: this rank's part of `schedule.lower`.
        stages: this rank's stages by number, with what `PASSES` calls.
        comm: moves tensors between ranks.
        on_stage_done: called with a stage's number when its last pass is over.
        read: called with each pass before its time is taken; waits for the samples that it needs.
        position: kept up to date, for `pipeline_parallel.watch`.
        watch: takes the time of every pass, and of every wait for a collective within one.
        together: runs the pairs.
    Raises: whatever a pass or message raises, with its place in a note; AssertionError if a tensor is never used.
    """
    hand, watch = _Hand(), watch or Stopwatch(comm.pp.device)
    runs = _Runs(stages, hand, comm, watch, together or Together(comm.pp.device))
    position = position or Position()
    plan = looked_up(program, placement, comm.pp.rank, comm.receives_ahead)
    position.comm, position.hand, position.plan = comm, hand, plan  # in this order: `watch` reads them meanwhile
    # In this thread on a GPU too, where autograd has one of its own for all: two backwards may run together.
    with torch.autograd.set_multithreading_enabled(False), at_waits.do(None, None):
        _walk(plan, runs, position, on_stage_done, read)
    assert not hand, f"never used: {', '.join(map(str, hand))}"


def _walk(
    plan: Sequence[tuple[Call, ...] | Exchange],
    runs: _Runs,
    position: Position,
    on_stage_done: Callable[[int], None] | None,
    read: Callable[[Pass], None] | None,
) -> None:
    stages, hand, comm, watch, _ = runs
    step = runs.labelled if profiler._is_profiler_enabled else runs.item
    item: tuple[Call, ...] | Exchange = ()
    at = 0
    try:
        # A counter in place of `for`: after a wrong guess V sends the program back to its first item.
        while at < len(plan):
            item = plan[at]
            position.at = item, monotonic()
            if read is not None and not isinstance(item, Exchange):
                for call in item:
                    read(call.item)
            watch.ask()
            if step(item):
                _forget(stages, hand)
                watch.restart()
                at = 0
                continue
            at += 1
            if on_stage_done is not None and not isinstance(item, Exchange):
                for call in item:
                    # Also passes that run beside: the stage's gradients are whole from here on.
                    if call.ends:
                        hand.end([x for x in hand.beside if x.stage == call.item.stage])
                        on_stage_done(call.item.stage)
        position.at = "the end of the passes", monotonic()
        hand.end(list(hand.beside))
        comm.finish()
    except Exception as error:
        error.add_note(f"in {_text(item)} of pipeline rank {comm.pp.rank}")
        raise


def _forget(stages: Mapping[int, Stage], hand: _Hand) -> None:
    """Go back to the beginning of the program. All that other ranks have sent so far is here or awaited."""
    hand.end(list(hand.beside))
    # Messages that have been posted cannot be called back: they are taken and thrown away, and come again.
    for held in hand.values():
        if not isinstance(held, Tensor):
            held.wait()
    hand.clear()
    for stage in stages.values():
        stage.forget()


class _Runs(NamedTuple):
    """The rank that runs the items of a program."""

    stages: Mapping[int, Stage]
    hand: _Hand
    comm: Messenger
    watch: Stopwatch
    together: Together

    def item(self, item: tuple[Call, ...] | Exchange) -> bool:
        """Returns: is the program to begin again?"""
        hand = self.hand
        if isinstance(item, Exchange):
            hand.update(self.comm.exchange(item.messages, hand.take))
            return False
        for call in item:
            if call.awaits:
                hand.end(call.awaits)
            for do in call.before:
                do(self.stages[call.item.stage])
        again = self.pair(*item) if len(item) == 2 else self.single(item[0])
        for call in item:
            for do in call.after:
                do(self.stages[call.item.stage])
        return again

    def single(self, call: Call) -> bool:
        """One pass. Returns as `item`."""
        hand, watch = self.hand, self.watch
        # Inputs are waited for before the mark: the stopwatch tells waiting from computing by it.
        kind, stage, *_ = call.item
        given = hand.taken(call)
        begin = watch.mark()
        at_waits.watch = None if call.beside or kind.traits.per_stage else watch
        made = PASSES[kind](self.stages[stage], call.number, given)
        at_waits.watch = None
        if not call.beside:
            made = made.wait() if isinstance(made, Begun) else made
            watch.note(begin)
            if made is AGAIN:
                return True
        elif isinstance(made, Begun) and made.span:
            made = watch.copying(call.item, begin, made)
        _give(call, made, hand)
        return False

    def pair(self, one: Call, other: Call) -> bool:
        """Two passes together: one computes while the other waits for a collective. Returns as `item`."""
        given = [self.hand.taken(call) for call in (one, other)]
        begin, (f, b) = self.watch.mark(), (one.item, other.item)
        stage, back = self.stages[f.stage], self.stages[b.stage]
        if hasattr(stage, "overlapped_forward_backward") and f.kind.is_forward and b.kind.is_backward:
            x, grad = map(sum_of, given)
            own, weights = cast(PairedStage, stage), not b.kind.is_split
            made: tuple[Made, Made] = own.overlapped_forward_backward(
                one.number, x, back, other.number, grad, weights=weights
            )
        else:
            run = partial(PASSES[f.kind], stage, one.number, given[0])
            beside = partial(PASSES[b.kind], back, other.number, given[1])
            synchronises = any(getattr(x, "synchronises", False) for x in (stage, back))
            way = how(f, b, lambda: back.alike(one.number, other.number), synchronises=synchronises)
            made = self.together.run(run, beside, way, self.watch)
        self.watch.note(begin, passes=2)
        for call, tensor in zip((one, other), made, strict=True):
            _give(call, tensor, self.hand)
        return False

    def labelled(self, item: tuple[Call, ...] | Exchange) -> bool:
        """`item` with labels for a profiler."""
        if isinstance(item, Exchange):
            names = [f"send {m.made_by} ->{m.dst}" for m in item.messages if m.src == self.comm.pp.rank]
        else:
            for call in item:
                self.hand.end(call.awaits)
                for taken, source in call.takes:
                    # Here, ahead of `item`: the wait for a message gets a label of its own in a trace, apart from the
                    # pass's.
                    if isinstance(held := self.hand[taken], InFlight):
                        with record_function(f"recv {taken} <-{source}"):
                            self.hand[taken] = held.wait()
            names = [str(call.item) for call in item]
        with ExitStack() as labels:
            for name in names:
                labels.enter_context(record_function(name))
            return self.item(item)


def _give(call: Call, made: Made, hand: _Hand) -> None:
    # What nobody takes is not held: a hand that is not empty at the end is a table that was lowered wrong.
    if call.gives:
        assert isinstance(made, Tensor | Begun), _NOTHING.format(call.item)
        hand.give(call.item, made, call.gives)
    elif isinstance(made, Begun):
        hand.beside[call.item] = made


def _text(item: tuple[Call, ...] | Exchange) -> str:
    if isinstance(item, Exchange):
        return f"exchange {' '.join(map(str, item.messages))}"
    return f"pass {' '.join(str(call.item) for call in item)}"
