"""The one engine: walks a program, item by item. A pass begins on its stage, an exchange calls the communicator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from time import monotonic
from typing import Protocol, cast

from torch import Tensor
from torch.autograd import profiler
from torch.profiler import record_function

from megapipe.distributed.meeting.position import Position
from megapipe.pipeline_parallel.calls import Call, looked_up
from megapipe.pipeline_parallel.messages.messenger import Messenger
from megapipe.pipeline_parallel.messages.transport import InFlight
from megapipe.pipeline_parallel.passes.begin import AGAIN, PASSES, Begun, Made, sum_of
from megapipe.pipeline_parallel.stopwatch import Stopwatch
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
    position: Position | None = None,
    watch: Stopwatch | None = None,
) -> None:
    """Run one rank's program from first to last item.

    A pass begins as `PASSES` says. On the compute lane it is waited for at once, on others where it is first needed, or
    at the end. A message is waited for when a pass uses it; an output lives here until it is sent and nowhere longer.
    While a profiler records, every pass is labelled `1F0`, every message `send 1F0 ->2` and `recv 0F1 <-0` (the wait
    for it), and the wait for a pass of another lane `wait 1G0`.

    Args:
        program: this rank's part of `schedule.lower`.
        stages: this rank's stages by number, with what `PASSES` calls; those with pairs in the program are
            `OverlappedStage`s.
        comm: moves tensors between ranks.
        on_stage_done: called with a stage's number when its last pass is over.
        position: kept up to date, for `pipeline_parallel.watch`.
        watch: takes the time of every pass.
    Raises: whatever a pass or message raises, with its place in a note; AssertionError if a tensor is never used.
    """
    hand = _Hand()
    watch = watch or Stopwatch(comm.pp.device)
    step = _run_labelled if profiler._is_profiler_enabled else _run
    item: tuple[Call, ...] | Exchange = ()
    position = position or Position()
    plan = looked_up(program, placement, comm.pp.rank, comm.receives_ahead)
    position.comm, position.hand, position.plan = comm, hand, plan  # in this order: `watch` reads them meanwhile
    at = 0
    try:
        # A counter in place of `for`: after a wrong guess V sends the program back to its first item.
        while at < len(plan):
            item = plan[at]
            position.at = item, monotonic()
            watch.ask()
            if step(item, stages, hand, comm, watch):
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
    assert not hand, f"never used: {', '.join(map(str, hand))}"


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


def _run(
    item: tuple[Call, ...] | Exchange, stages: Mapping[int, Stage], hand: _Hand, comm: Messenger, watch: Stopwatch
) -> bool:
    """Returns: is the program to begin again?"""
    if isinstance(item, Exchange):
        hand.update(comm.exchange(item.messages, hand.take))
        return False
    for call in item:
        if call.awaits:
            hand.end(call.awaits)
    if len(item) == 2:
        _run_pair(item, stages, hand, watch)
        return False
    call = item[0]
    # Inputs are waited for before the mark: the stopwatch tells waiting from computing by it.
    kind, stage, *_ = call.item
    given = [hand.take(taken) for taken, _ in call.takes]
    begin = watch.mark()
    made = PASSES[kind](stages[stage], call.number, given)
    if not call.beside:
        made = made.wait() if isinstance(made, Begun) else made
        watch.note(begin)
        if made is AGAIN:
            return True
    _give(call, made, hand)
    return False


def _run_pair(pair: tuple[Call, ...], stages: Mapping[int, Stage], hand: _Hand, watch: Stopwatch) -> None:
    f, b = pair
    forward = cast(OverlappedStage, stages[f.item.stage])
    x, grad = (sum_of([hand.take(taken) for taken, _ in call.takes]) for call in pair)
    begin = watch.mark()
    # The stage decides how the two overlap: layer by layer, while one of them waits for a collective.
    made = forward.overlapped_forward_backward(
        f.number, x, stages[b.item.stage], b.number, grad, weights=not b.item.kind.is_split
    )
    watch.note(begin, passes=2)
    for call, tensor in zip(pair, made, strict=True):
        _give(call, tensor, hand)


def _give(call: Call, made: Made, hand: _Hand) -> None:
    # What nobody takes is not held: a hand that is not empty at the end is a table that was lowered wrong.
    if call.gives:
        assert isinstance(made, Tensor | Begun), _NOTHING.format(call.item)
        hand.give(call.item, made, call.gives)
    elif isinstance(made, Begun):
        hand.beside[call.item] = made


def _run_labelled(
    item: tuple[Call, ...] | Exchange, stages: Mapping[int, Stage], hand: _Hand, comm: Messenger, watch: Stopwatch
) -> bool:
    if isinstance(item, Exchange):
        names = [f"send {m.made_by} ->{m.dst}" for m in item.messages if m.src == comm.pp.rank]
    else:
        for call in item:
            hand.end(call.awaits)
            for taken, source in call.takes:
                # Here, ahead of `_run`: the wait for a message gets a label of its own in a trace, apart from the
                # pass's.
                if isinstance(held := hand[taken], InFlight):
                    with record_function(f"recv {taken} <-{source}"):
                        hand[taken] = held.wait()
        names = [str(call.item) for call in item]
    with ExitStack() as labels:
        for name in names:
            labels.enter_context(record_function(name))
        return _run(item, stages, hand, comm, watch)


def _text(item: tuple[Call, ...] | Exchange) -> str:
    if isinstance(item, Exchange):
        return f"exchange {' '.join(map(str, item.messages))}"
    return f"pass {' '.join(str(call.item) for call in item)}"
