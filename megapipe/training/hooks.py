"""Let a program change more of a run than model, data and loss.

The changes are groups of parameters, a learning-rate curve, callbacks, and further stages that read
batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from megapipe.config import Config
from megapipe.optim.rule import Groups, usual_groups
from megapipe.partition.spans import LayerSpan
from megapipe.training.run import Run
from megapipe.training.steps.step import StepResult


class Callback:
    """Methods that every rank calls during a run; a subclass overrides the ones that it needs.

    `run` is this rank's part of the run: config, mesh, modules, optimizer and progress. A
    collective in a callback is a collective of all ranks. An exception ends the run. Under ZeRO-3
    the full weights are gathered for each overridden method.
    """

    def before_step(self, run: Run) -> None:
        """Act before a step. run.progress.iteration is the number of steps so far."""

    def after_step(self, run: Run, result: StepResult) -> None:
        """Act after a step. The weights are updated, unless result.skipped."""

    def on_evaluation(self, run: Run, where: str, losses: Mapping[str, float]) -> None:
        """Act after an evaluation.

        Args:
            run: this rank's part of the run.
            where: `iteration N`, with `on validation set` or `on test set` at the end of the run.
            losses: means over the evaluation, by the names that loss_func reports.
        """

    def on_save(self, run: Run, iteration: int) -> None:
        """Act after the checkpoint of this iteration is complete."""


@dataclass(frozen=True)
class Hooks:
    """Changes that the user's program makes to a run, besides model, data and loss.

    `call` calls a method of all callbacks. `reading_stages` applies `reads_on` to all stages.
    `lr_warning` returns a warning if a flag gives some parameters another rate than `lr`.

    Attributes:
        groups: selects parameters with a learning rate or weight decay of their own.
        lr: returns the learning rate after a number of samples, without samples of skipped
            iterations; None for --lr with the warm-up and decay that its flags give.
        callbacks: called in this order.
        reads_on: given the layers of a stage, returns whether it gets batches. Stages with
            embedding or loss always do. On all other stages the data_iterator of forward_step is
            None.
    """

    groups: Groups = usual_groups
    lr: Callable[[int], float] | None = None
    callbacks: tuple[Callback, ...] = ()
    reads_on: Callable[[LayerSpan], bool] = lambda span: False

    def reading_stages(self, spans: Sequence[LayerSpan]) -> frozenset[int]:
        """Return the indices of the stages whose data the user's hook `reads_on` asks for.

        spans: the layers of every stage.
        """
        return frozenset(stage for stage, span in enumerate(spans) if self.reads_on(span))

    def call(self, event: str, run: Run, *args: Any) -> None:
        """Call the method named `event` of every callback, with `run` and `args`."""
        # Weights are gathered only if a callback does something.
        inherited = getattr(Callback, event)
        methods = [getattr(callback, event) for callback in self.callbacks]
        overridden = [m for m in methods if getattr(m, "__func__", None) is not inherited]
        # Under ZeRO-3 the memory of a weight is released between steps: reading it would end the
        # process.
        with run.optimizer.gathers.whole() if overridden else nullcontext():
            for method in overridden:
                method(run, *args)

    def lr_warning(self, config: Config) -> str:
        """Return a warning if --decoupled-lr and `lr` are both given; else an empty string."""
        decoupled_lr = config.optimizer.decoupled_lr
        if self.lr is None or decoupled_lr is None:
            return ""
        return (
            f"WARNING: --decoupled-lr {decoupled_lr:g} follows the flags' curve for embedding and "
            "head; all other parameters have the program's rate (Hooks.lr)"
        )


NONE = Hooks()
"""No hooks: everything as the flags say."""
