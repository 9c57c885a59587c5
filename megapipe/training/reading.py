"""Read a rank's samples: its part of each step, or nothing if its stages need no tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import overload

from megapipe.config import Config
from megapipe.data.gpt_dataset import TokenDataset
from megapipe.data.loader import Batches, Microbatch, SampleOrder
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import DataError
from megapipe.schedule import Placement
from megapipe.training.progress import Progress
from megapipe.training.steps.batches import gets_batches

BatchesAt = Callable[[int], Sequence[Microbatch]]
"""(samples consumed) -> the microbatches of a step; none on a rank that needs no tokens."""


@dataclass(frozen=True)
class Awaited(Sequence[Microbatch]):
    """The microbatches of a step; indexing waits until other threads have read one.

    Attributes:
        step: the microbatches.
        waiting: returns a context that is entered during each wait.
    """

    step: Sequence[Microbatch]
    waiting: Callable[[], AbstractContextManager[None]]

    def __len__(self) -> int:
        return len(self.step)

    @overload
    def __getitem__(self, index: int) -> Microbatch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Microbatch]: ...
    def __getitem__(self, index: int | slice) -> Microbatch | Sequence[Microbatch]:
        with self.waiting():
            return self.step[index]


@dataclass(frozen=True)
class Reading:
    """Reads this rank's samples, and none if its stages need no tokens.

    `training` and `evaluation` return functions that read a step. `looks` says whether a stage of
    this rank needs tokens.

    Attributes:
        config: the run's configuration.
        mesh: this rank's mesh.
        place: the placement of stages on ranks.
        also_read: stages that get batches in addition to those with embedding or loss.
    """

    config: Config
    mesh: ProcessMesh
    place: Placement
    also_read: Collection[int] = ()

    def training(self, dataset: TokenDataset | None, progress: Progress) -> BatchesAt:
        """Return a function: (samples consumed before a step) -> the microbatches of the step.

        Args:
            dataset: the training samples; None if the split leaves none.
            progress: where the run begins.
        Returns: the function. With --skip-train it returns no microbatches.
        Raises: DataError, on all ranks, if there are no training samples, or if the run would reach
            their end. A cyclic order has no end.
        """
        config = self.config
        if config.data.skip_train:
            return lambda consumed: ()
        # Asked before the first step, so that no run ends after days for lack of data.
        steps = max(0, progress.last_iteration(config) - progress.iteration)
        until = config.batch_sizes.after(steps, progress.consumed_train_samples)
        if dataset is None:
            raise DataError(
                f"--split {config.data.split} leaves nothing to train on. Use --split 969,30,1"
            )
        # A cyclic order begins again instead.
        if config.data.dataloader_type == "single" and steps and len(dataset) < until:
            raise DataError(
                f"the training data ends at sample {len(dataset)}, but this run reads until sample "
                f"{until}. Train shorter, or give a data set with more samples."
            )
        return self._batches(config, dataset, wraps=False)

    def evaluation(self, dataset: TokenDataset | None) -> BatchesAt | None:
        """Return a function: (samples consumed before a step) -> the microbatches of the step.

        Evaluations past the last sample begin again at the first one. Returns None without a
        dataset.
        """
        if dataset is None:
            return None
        return self._batches(self.config.evaluation, dataset, wraps=True)

    @property
    def looks(self) -> bool:
        """Return whether a stage of this rank needs tokens.

        Stages with embedding, loss or a module of multi-token prediction do, and stages in
        `also_read`. All stages do if attention stays within documents or positions begin anew in
        each.
        """
        data = self.config.data
        if data.reset_attention_mask or data.reset_position_ids:
            return True
        own = self.place.stages_on(self.mesh.pp.rank)
        return any(gets_batches(self.place, stage, self.also_read) for stage in own)

    def _batches(self, config: Config, dataset: TokenDataset, *, wraps: bool) -> BatchesAt:
        """Return a function: (samples consumed before a step) -> the microbatches of the step.

        Args:
            config: has the batch size.
            dataset: the samples.
            wraps: start the data over when it ends. False: it ends.
        """
        # Ranks between the ends of a pipeline read nothing and start no threads.
        if not self.looks:
            return lambda consumed: ()
        dp = self.mesh.dp
        b = config.batch.micro_batch
        kind = config.data.dataloader_type
        sharded = not config.data.no_data_sharding
        return Batches(
            dataset,
            SampleOrder(len(dataset), b, dp.rank, dp.size, kind, sharded, wraps),
            lambda consumed: config.batch_sizes.at(consumed) // (b * dp.size),
            num_workers=config.data.num_workers,
            # From page-locked memory a copy to the GPU does not hold the host up.
            pinned=self.mesh.device.type == "cuda",
        ).at
