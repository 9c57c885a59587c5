"""When each pass of a rank ran: two reads of the clock around it, in a step that is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.device import synchronize
from megapipe.pipeline_parallel.stage import PipelineStage
from megapipe.schedule import Kind, Pass
from megapipe.schedule.measured import Ran


@dataclass(frozen=True)
class Stopwatch:
    """The passes of one step as they were timed, in their order.

    On a GPU each read waits for the device, so a measured step is slower than others. Overlapped pairs are not timed.
    """

    device: torch.device
    ran: list[Ran] = field(default_factory=list)

    def now(self) -> float:
        """Seconds."""
        synchronize(self.device)
        return time.perf_counter()

    def of_all(self, pp: Axis) -> list[list[Ran]]:
        """What every rank of the pipeline has timed."""
        rows = pp.gather_json([(kind.value, s, i, *x[1:]) for x in self.ran for kind, s, i in [x.item]])
        return [[Ran(Pass(Kind(kind), s, i), begin, end) for kind, s, i, begin, end in row] for row in rows]


@dataclass(frozen=True)
class Timed:
    """A stage whose passes are timed, from the moment when their input is there."""

    watch: Stopwatch
    number: int
    stage: PipelineStage

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        begin = self.watch.now()
        made = self.stage.forward(microbatch, x)
        self._note(Kind.F, microbatch, begin)
        return made

    def backward(self, microbatch: int, grad: Tensor | None, *, weights: bool) -> Tensor | None:
        begin = self.watch.now()
        made = self.stage.backward(microbatch, grad, weights=weights)
        self._note(Kind.BW if weights else Kind.B, microbatch, begin)
        return made

    def weight(self, microbatch: int) -> None:
        begin = self.watch.now()
        self.stage.weight(microbatch)
        self._note(Kind.W, microbatch, begin)

    def forget(self) -> None:
        self.stage.forget()

    def overlapped_forward_backward(
        self, microbatch: int, x: Tensor | None, backward_stage: Timed, *rest: object, **named: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        pair = cast("Callable[..., tuple[Tensor | None, Tensor | None]]", self.stage.overlapped_forward_backward)
        return pair(microbatch, x, backward_stage.stage, *rest, **named)

    def _note(self, kind: Kind, microbatch: int, begin: float) -> None:
        self.watch.ran.append(Ran(Pass(kind, self.number, microbatch), begin, self.watch.now()))
