"""Report during a stage's last backward, or its W, that a layer's gradients are complete.

Their sum over data parallelism may then begin before G, while earlier layers still compute.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from megapipe.pipeline_parallel.families.family import OfStage, Setting


class Reporting(OfStage):
    """A stage whose layers report in the last microbatch that their gradients are complete.

    They report during its backward or, if W is a pass of its own, during W.

    The module has a method `between_layers(cut)`, which returns a context for a forward. In this
    context the module calls x = cut(x) with the hidden states before each layer. `saving` returns
    this context for the forward of that microbatch, and an empty context for all others.

    Args:
        done: called as (layer, number of layers) when the gradients of the layer's weights and of
            all later layers' weights are complete. Layers that are recomputed together count as
            one. Not called for a layer whose input needs no gradient.
        last: number of the last microbatch or slice that adds to gradients. Only this one reports.
    """

    def __init__(self, done: Callable[[int, int], None], last: int) -> None:
        self._done = done
        self._last = last

    def saving(self, stage: Any, microbatch: int) -> AbstractContextManager[None]:
        if microbatch != self._last:
            return nullcontext()
        context: AbstractContextManager[None] = stage.module.between_layers(self._cut(stage))
        return context

    def _cut(self, stage: Any) -> Callable[[Tensor], Tensor]:
        """Return the function `cut` that the module calls before each layer.

        `cut` returns x unchanged. When the backward (or else W) comes to this point, `done` is
        called for the layer that follows.
        """
        seen: list[None] = []

        def report(layer: int) -> None:
            # By now `seen` has all layers.
            self._done(layer, len(seen))

        def at(x: Tensor) -> Tensor:
            if x.requires_grad:
                # As a job of weight gradients: deferred products of these layers run before it.
                job = partial(report, len(seen))
                x.register_hook(lambda _: stage.weight_grads.submit(job))  # type: ignore[no-untyped-call]
            seen.append(None)
            return x

        return at


def stages_of(setting: Setting) -> dict[int, Reporting]:
    """Return {stage: its `Reporting`} for the stages whose layers report.

    These are the stages for which the trainer gives `Weights.layer_done`, if the module has
    `between_layers`.

    Args:
        setting: the step of this rank.
    """
    table, chunks, step, _ = setting
    if step.forward_only or not step.weights:
        return {}
    stages = {}
    for (number, (module, _)), weights in zip(chunks.items(), step.weights, strict=True):
        done = weights.layer_done
        if done is not None and hasattr(module, "between_layers"):
            stages[number] = Reporting(done, table.last[number].weights)
    return stages
