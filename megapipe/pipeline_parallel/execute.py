"""Run one rank's program item by item: a pass begins on its stage, an exchange on the messenger."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from time import monotonic
from typing import Any, NamedTuple, Protocol

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
from megapipe.pipeline_parallel.passes.begin import AGAIN, Begun, Made
from megapipe.pipeline_parallel.shapes import together_on
from megapipe.pipeline_parallel.stopwatch import Stopwatch
from megapipe.schedule import Exchange, Pass, Placement, Program


class Stage(Protocol):
    """The methods of a stage that the executor calls.

    `forward`, `backward` and `weight` run F, B (or BW) and W of a microbatch. `forget` lets a step
    begin again, and `same_waits` says which backwards may run together. `microbatch` is the number
    of the microbatch or, if microbatches are cut, of the slice.
    """

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        """Return the output [s, b, h] as a tensor that the stage does not keep.

        None is returned if the stage computes a loss and no stage follows.

        x: the input [s, b, h]; None at the embedding.
        """

    def backward(self, microbatch: int, grad: Tensor | None, *, weights: bool) -> Tensor | None:
        """Return the gradient of the input; None at the embedding.

        Args:
            microbatch: number of the microbatch.
            grad: gradient of the output; None at the loss.
            weights: also compute the gradients of weights. Otherwise a later call of `weight` does.
        """

    def weight(self, microbatch: int) -> None:
        """Compute the weight gradients that a backward with weights=False has left out."""

    def forget(self) -> None:
        """Drop the tensors that forwards have saved, because all forwards will run again."""

    def same_waits(self, microbatch: int, other: int) -> bool:
        """Return whether two backwards wait for the same collectives in the same order.

        Only then may they run together.
        """


RunTogether = Callable[
    [Sequence[Call], Mapping[int, Any], Sequence[list[Tensor]], Stopwatch], Sequence[Made]
]
"""A function that runs the passes of one step of a table together, if it has more than one.

It takes the passes in the order of the table, this rank's stages by number, the inputs of each
pass, and a stopwatch for the times at which a pass waits and no other one runs. It returns the
results of the passes in their order.
"""

_NOTHING = "{} made nothing for the next stage"


class _Hand(dict[Pass, Tensor | InFlight | Begun]):
    """The results that a rank holds between passes, by the pass that produced them.

    A result may still be on its way (`InFlight`) or in computation on another stream (`Begun`).
    `give` adds a result, `taken` and `take` return results for use, and `end` waits for passes.

    Attributes:
        uses: {pass: how often its result will still be used}. A result without an entry, such as a
            received one, will be used once.
        running: passes on other streams that have begun and whose result no other pass uses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[Pass, int] = {}
        self.running: dict[Pass, Begun] = {}

    def give(self, made_by: Pass, made: Tensor | Begun, uses: int) -> None:
        """Hold `made`, the result of the pass `made_by`, until it has been used `uses` times."""
        self[made_by] = made
        self.uses[made_by] = uses

    def taken(self, call: Call) -> list[Tensor]:
        """Return the inputs of the pass `call`, after waiting for each that is under way."""
        given = []
        # In the order of the table, because sums of floats depend on their order.
        for made_by, _ in call.takes:
            given.append(self.take(made_by))
            if made_by in call.leaves:
                self[made_by] = given[-1]
        return given

    def take(self, made_by: Pass) -> Tensor:
        """Return the result of the pass `made_by`, after waiting for it, and count one use."""
        # It stays in hand while it is waited for: a diagnosis of a hang looks for it here.
        held = self[made_by]
        tensor = held if isinstance(held, Tensor) else held.wait()
        assert tensor is not None, _NOTHING.format(made_by)
        left = self.uses.pop(made_by, 1) - 1
        if left:
            self.give(made_by, tensor, left)
        else:
            del self[made_by]
        return tensor

    def end(self, passes: Iterable[Pass]) -> None:
        """Wait for the end of each of these passes that has begun and was not waited for."""
        for one in passes:
            begun = self.running.pop(one, None) or self.get(one)
            if not isinstance(begun, Begun):
                continue
            label: AbstractContextManager[Any] = nullcontext()
            if profiler._is_profiler_enabled:
                label = record_function(f"wait {one}")
            with label:
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
    together: RunTogether | None = None,
) -> None:
    """Run one rank's program from its first to its last item.

    For each pass, the function in `PASSES` for its kind begins it. A pass on the compute stream is
    over when its function returns. A pass on another stream is waited for when it is first needed,
    before `on_stage_done`, or at the end. A message is waited for when a pass uses it. A result is
    held until its last use by a pass or send, and no longer.

    While a profiler records, every pass has a label such as `1F0`: the forward of microbatch 0 on
    stage 1. A send of its result to rank 2 has `send 1F0 ->2`. A wait for a result of rank 0 has
    `recv 0F1 <-0`, and a wait for a pass of another stream `wait 1G0` (G reduces
    gradients).

    Args:
        program: this rank's part of `schedule.lower`.
        placement: the rank of each stage.
        stages: this rank's stages by number, with the methods that `PASSES` calls.
        comm: sends and receives tensors.
        on_stage_done: called with a stage's number when its last pass of any microbatch is over.
            Passes on weights, such as G and U, may follow.
        read: called with each pass before its time is measured. The function waits for the training
            samples of the pass.
        position: updated with the item that runs, so that a watchdog can name it; None for no such
            record.
        watch: measures the time of every pass and of every wait for a collective; None for a new
            one.
        together: runs the two passes of a pair together. The object may keep a thread from step to
            step. None for the device's usual one.
    Raises: the error of a pass or message, with its place in a note. AssertionError if a tensor is
        never used.
    """
    hand = _Hand()
    watch = watch or Stopwatch(comm.pp.device)
    runs = _Runs(stages, hand, comm, watch, together or together_on(comm.pp.device))
    position = position or Position()
    plan = looked_up(program, placement, comm.pp.rank, comm.receives_ahead)
    # In this order, because the thread of `watch` may read them at any moment, from the plan on.
    position.comm = comm
    position.hand = hand
    position.plan = plan
    # Backwards run in this thread on a GPU too. Autograd has one thread for a device, and two
    # backwards together need two.
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
    """Run the items of a plan, and wait at the end for everything that is under way.

    Args:
        plan: the program, with a `Call` for each pass.
        runs: runs one item.
        position: updated with the item that runs.
        on_stage_done: called with a stage's number when its last pass of any microbatch is over.
        read: called with each pass before it runs, to wait for training samples; or None.
    """
    stages, hand, comm, watch, _ = runs
    # Labels cost time in each pass, so they are there only while a profiler records.
    step = runs.labelled if profiler._is_profiler_enabled else runs.item
    item: tuple[Call, ...] | Exchange = ()
    at = 0
    try:
        # A counter in place of `for`: after a wrong guess V sends the program back to its first
        # item.
        while at < len(plan):
            item = plan[at]
            # Before the item begins: if it hangs, this says where.
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
                    # Overlapping passes too: the stage's gradients are complete from here on.
                    if call.ends:
                        hand.end([x for x in hand.running if x.stage == call.item.stage])
                        on_stage_done(call.item.stage)
        position.at = "the end of the passes", monotonic()
        hand.end(list(hand.running))
        comm.finish()
    except Exception as error:
        error.add_note(f"in {_text(item)} of pipeline rank {comm.pp.rank}")
        raise


def _forget(stages: Mapping[int, Stage], hand: _Hand) -> None:
    """Drop the results in `hand` and all that forwards saved, so that the program can begin again.

    Messages that are under way are dropped too: other ranks begin again, and send them again.
    """
    hand.end(list(hand.running))
    # A receive that is posted cannot be taken back. Its tensor is dropped, and will come again.
    for held in hand.values():
        if not isinstance(held, Tensor):
            held.wait()
    hand.clear()
    for stage in stages.values():
        stage.forget()


class _Runs(NamedTuple):
    """The objects with which a rank runs the items of its program: passes and exchanges.

    `item` runs one item with `single` or `several`, and `labelled` does so with labels for a
    profiler. Both return whether the program must begin again, because pass V (validation) found
    that the last update was wrong.

    Attributes:
        stages: {number of a stage: the stage}.
        hand: the results that the rank holds.
        comm: sends and receives messages.
        watch: measures times.
        together: runs the passes of a pair.
    """

    stages: Mapping[int, Stage]
    hand: _Hand
    comm: Messenger
    watch: Stopwatch
    together: RunTogether

    def item(self, item: tuple[Call, ...] | Exchange) -> bool:
        hand = self.hand
        if isinstance(item, Exchange):
            hand.update(self.comm.exchange(item.messages, hand.take))
            return False
        for call in item:
            if call.awaits:
                hand.end(call.awaits)
            for do in call.before:
                do(self.stages[call.item.stage])
        again = self.single(item[0]) if len(item) == 1 else self.several(item)
        for call in item:
            for do in call.after:
                do(self.stages[call.item.stage])
        return again

    def single(self, call: Call) -> bool:
        """Run one pass. Return True if the program must begin again, as V (validation) may say."""
        hand = self.hand
        watch = self.watch
        kind, stage, *_ = call.item
        # Inputs are waited for before the mark, by which the stopwatch tells waiting from
        # computing.
        given = hand.taken(call)
        begin = watch.mark()
        # Only waits of layers count as exposed communication.
        at_waits.watch = None if call.overlaps or kind.traits.per_stage else watch
        made = PASSES[kind](self.stages[stage], call.number, given)
        at_waits.watch = None
        if not call.overlaps:
            if isinstance(made, Begun):
                made = made.wait()
            watch.note(begin)
            if made is AGAIN:
                return True
        elif isinstance(made, Begun) and made.span:
            made = watch.copying(call.item, begin, made)
        _give(call, made, hand)
        return False

    def several(self, calls: Sequence[Call]) -> bool:
        """Run the passes of a pair together.

        Returns: False, which says that the rank's program need not begin again. Only a pass V
            may ask for that, and a pair has none.
        """
        given = [self.hand.taken(call) for call in calls]
        begin = self.watch.mark()
        made = self.together(calls, self.stages, given, self.watch)
        self.watch.note(begin, passes=len(calls))
        for call, one in zip(calls, made, strict=True):
            _give(call, one, self.hand)
        return False

    def labelled(self, item: tuple[Call, ...] | Exchange) -> bool:
        if isinstance(item, Exchange):
            sent = [m for m in item.messages if m.src == self.comm.pp.rank]
            names = [f"send {m.made_by} ->{m.dst}" for m in sent]
        else:
            for call in item:
                self.hand.end(call.awaits)
                for taken, source in call.takes:
                    # Before `item`, so that the wait for a message has its own label in a trace,
                    # outside of the pass's.
                    held = self.hand[taken]
                    if isinstance(held, InFlight):
                        with record_function(f"recv {taken} <-{source}"):
                            self.hand[taken] = held.wait()
            names = [str(call.item) for call in item]
        with ExitStack() as labels:
            for name in names:
                labels.enter_context(record_function(name))
            return self.item(item)


def _give(call: Call, made: Made, hand: _Hand) -> None:
    """Put `made`, the result of a pass, into `hand` if another pass or a message takes it."""
    # Other results are not held: a hand that is not empty at the end shows a table that was lowered
    # wrongly.
    if call.gives:
        assert isinstance(made, Tensor | Begun), _NOTHING.format(call.item)
        hand.give(call.item, made, call.gives)
    elif isinstance(made, Begun):
        hand.running[call.item] = made


def _text(item: tuple[Call, ...] | Exchange) -> str:
    if isinstance(item, Exchange):
        return f"exchange {' '.join(map(str, item.messages))}"
    return f"pass {' '.join(str(call.item) for call in item)}"
