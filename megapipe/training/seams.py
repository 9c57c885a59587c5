"""The seams of `pretrain` beside model, data and loss: groups of parameters, a learning-rate curve, callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from megapipe.config import Config
from megapipe.optim.rule import Groups, usual_groups
from megapipe.partition.spans import LayerSpan
from megapipe.training.run import Run
from megapipe.training.steps.step import StepResult


class Callback:
    """Called on every rank; override what you need. `run` has config, mesh, modules, optimizer and progress.

    A collective in it is one of all ranks. What it raises ends the run. The weights are whole, also where ranks have
    shares of them between steps: they are gathered for whoever overrides.
    """

    def before_step(self, run: Run) -> None:
        """run.progress.iteration steps are done."""

    def after_step(self, run: Run, result: StepResult) -> None:
        """The weights are updated, unless result.skipped."""

    def on_evaluation(self, run: Run, where: str, losses: Mapping[str, float]) -> None:
        """where: `iteration N`, with `on validation set` or `on test set` at the end."""

    def on_save(self, run: Run, iteration: int) -> None:
        """The checkpoint of this iteration is complete."""


@dataclass(frozen=True)
class Seams:
    """Attributes:
    groups: which parameters have a rate or decay of their own.
    lr: samples that the run has advanced by -> learning rate, in place of --lr and its curve.
    callbacks: in the order in which they are called.
    reads_on: which stages get batches beside those with embedding or loss; forward_step's data_iterator is None on
        the others.
    """

    groups: Groups = usual_groups
    lr: Callable[[int], float] | None = None
    callbacks: tuple[Callback, ...] = ()
    reads_on: Callable[[LayerSpan], bool] = lambda span: False

    def tell(self, event: str, run: Run, *what: Any) -> None:
        """Call a method of every callback."""
        usual = getattr(Callback, event)
        told = [one for one in self.callbacks if getattr(getattr(one, event), "__func__", None) is not usual]
        with run.optimizer.gathers.whole() if told else nullcontext():
            for callback in told:
                getattr(callback, event)(run, *what)

    def beside(self, config: Config) -> str:
        """A line on flags that go on to act beside a seam, as one would not think; empty for none."""
        if self.lr is None or config.optimizer.decoupled_lr is None:
            return ""
        also = "the flags' curve for embedding and head; all other parameters have the program's rate (Seams.lr)"
        return f"WARNING: --decoupled-lr {config.optimizer.decoupled_lr:g} follows {also}"


NONE = Seams()
