"""Run the two passes of a pair: in the stage's own way if it has one, else by turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megapipe.pipeline_parallel.calls import Call
from megapipe.pipeline_parallel.families import PASSES
from megapipe.pipeline_parallel.passes.begin import Made, sum_of
from megapipe.pipeline_parallel.shapes.pairs.together import Together, how
from megapipe.pipeline_parallel.stopwatch import Stopwatch


class Pairs:
    """A runner of overlapped pairs of passes, called by the executor.

    The second pass of a pair runs in a thread that lasts from step to step. `device` is the rank's
    device.
    """

    def __init__(self, device: torch.device) -> None:
        self._together = Together(device)

    def __call__(
        self,
        calls: Sequence[Call],
        stages: Mapping[int, Any],
        given: Sequence[list[Tensor]],
        watch: Stopwatch,
    ) -> tuple[Made, Made]:
        """Run both passes of a pair and return their two results.

        Args:
            calls: the two passes, in the order of the table.
            stages: this rank's stages by number.
            given: the inputs of each pass.
            watch: takes the times at which a pass waits and no other one runs.
        """
        one, other = calls
        f = one.item
        b = other.item
        stage = stages[f.stage]
        back = stages[b.stage]
        # DeepSeek's modules overlap the two inside one call, see `contracts.deepseek`.
        overlaps = hasattr(stage, "overlapped_forward_backward")
        if overlaps and f.kind.is_forward and b.kind.is_backward:
            x, grad = map(sum_of, given)
            made: tuple[Made, Made] = stage.overlapped_forward_backward(
                one.number, x, back, other.number, grad, weights=not b.kind.is_split
            )
            return made
        run = partial(PASSES[f.kind], stage, one.number, given[0])
        run_other = partial(PASSES[b.kind], back, other.number, given[1])
        way = how(
            f,
            b,
            lambda: back.same_waits(one.number, other.number),
            synchronises=any(getattr(x, "synchronises", False) for x in (stage, back)),
        )
        return self._together.run(run, run_other, way, watch)
