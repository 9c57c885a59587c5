"""The one engine: walks a program, item by item. A pass calls a stage, an exchange calls the communicator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor
from torch.profiler import record_function

from megapipe.pipeline_parallel.p2p import P2PCommunicator, Received
from megapipe.schedule import Exchange, Kind, Pass, Placement, Program


class Stage(Protocol):
    """What a program can do to a stage."""

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        """Input (None at the embedding) -> output (None at the loss)."""

    def backward(self, microbatch: int, grad: Tensor | None, *, weights: bool) -> Tensor | None:
        """Gradient of the output (None at the loss) -> of the input (None at the embedding); with or without W."""

    def weight(self, microbatch: int) -> None:
        """The weight gradients that a backward without weights left out."""


def execute(
    program: Program,
    placement: Placement,
    stages: Mapping[int, Stage],
    comm: P2PCommunicator,
    *,
    on_stage_done: Callable[[int], None] | None = None,
) -> None:
    """Run one rank's program from first to last item.

    Args:
        program: this rank's part of `schedule.lower`.
        stages: this rank's stages by number.
        comm: moves tensors between ranks; a message is waited for when a pass uses it.
        on_stage_done: called with a stage's number when its last pass is over.
    Raises: whatever a pass raises, with the pass named in a note; AssertionError if a tensor is never used.
    """
    passes_left = Counter(p.stage for item in program if not isinstance(item, Exchange) for p in item)
    inbox: dict[tuple[bool, int, int], Tensor | Received] = {}
    outbox: dict[Pass, Tensor] = {}

    def deliver(made_by: Pass, tensor: Tensor | Received) -> None:
        consumer = placement.consumer(made_by)
        assert consumer is not None
        inbox[made_by.kind is Kind.F, consumer, made_by.microbatch] = tensor

    def take(forward: bool, stage: int, microbatch: int) -> Tensor:
        item = inbox.pop((forward, stage, microbatch))
        return item.wait() if isinstance(item, Received) else item

    def run(p: Pass) -> None:
        stage = stages[p.stage]
        if p.kind is Kind.W:
            stage.weight(p.microbatch)
            return
        source = placement.prev(p.stage) if p.kind is Kind.F else placement.next(p.stage)
        given = None if source is None else take(p.kind is Kind.F, p.stage, p.microbatch)
        if p.kind is Kind.F:
            made = stage.forward(p.microbatch, given)
        else:
            made = stage.backward(p.microbatch, given, weights=p.kind is Kind.BW)
        consumer = placement.consumer(p)
        if consumer is None:
            return
        assert made is not None, f"{p} made nothing for stage {consumer}"
        if consumer in stages:
            deliver(p, made)
        else:
            outbox[p] = made

    for item in program:
        if isinstance(item, Exchange):
            for made_by, tensor in comm.exchange(item.messages, outbox.pop).items():
                deliver(made_by, tensor)
            continue
        for p in item:
            try:
                with record_function(str(p)):
                    run(p)
            except Exception as error:
                error.add_note(f"in pass {p} of pipeline rank {comm.pp.rank}")
                raise
            passes_left[p.stage] -= 1
            if on_stage_done is not None and not passes_left[p.stage]:
                on_stage_done(p.stage)
    comm.finish()
    left = [*inbox, *map(str, outbox)]
    assert not left, f"never used: {left}"
