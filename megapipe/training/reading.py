"""The samples that a rank reads: its share of each step, if its stages look at tokens at all."""

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
"""(samples consumed) -> the microbatches of a step, none on a rank that looks at no tokens."""


@dataclass(frozen=True)
class Awaited(Sequence[Microbatch]):
    """The microbatches of a step, which may still be under way.

    Attributes:
        waiting: makes what is entered while one is waited for.
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
    """One rank's way to its samples.

    Attributes:
        also_read: stages that get batches beside those with embedding or loss.
    """

    config: Config
    mesh: ProcessMesh
    place: Placement
    also_read: Collection[int] = ()

    def training(self, dataset: TokenDataset | None, progress: Progress) -> BatchesAt:
        """Raises: DataError, on all ranks, if the run would come to the end of its data."""
        config = self.config
        if config.data.skip_train:
            return lambda consumed: ()
        steps = max(0, progress.last_iteration(config) - progress.iteration)
        until = config.batch_sizes.after(steps, progress.consumed_train_samples)
        if dataset is None:
            raise DataError(f"--split {config.data.split} leaves nothing to train on. Use --split 969,30,1")
        if config.data.dataloader_type == "single" and steps and len(dataset) < until:
            raise DataError(
                f"the training data ends at sample {len(dataset)}, but this run reads until sample {until}. "
                "Train shorter, or give a data set with more samples."
            )
        return self._batches(config, dataset, wraps=False)

    def evaluation(self, dataset: TokenDataset | None) -> BatchesAt | None:
        """Batches without an end: a run that evaluates more often than was planned begins again at the first sample."""
        return None if dataset is None else self._batches(self.config.evaluation, dataset, wraps=True)

    @property
    def looks(self) -> bool:
        """Do stages of this rank look at tokens? The ends of a chain do, depths behind it, those that ask, and all
        where documents are apart."""
        data, own = self.config.data, self.place.stages_on(self.mesh.pp.rank)
        apart = data.reset_attention_mask or data.reset_position_ids
        return apart or any(gets_batches(self.place, stage, self.also_read) for stage in own)

    def _batches(self, config: Config, dataset: TokenDataset, *, wraps: bool) -> BatchesAt:
        # Ranks between the ends of a pipeline read nothing, and start no threads.
        if not self.looks:
            return lambda consumed: ()
        dp, sizes = self.mesh.dp, config.batch_sizes
        kind, sharded = config.data.dataloader_type, not config.data.no_data_sharding
        return Batches(
            dataset,
            SampleOrder(len(dataset), config.batch.micro_batch, dp.rank, dp.size, kind, sharded, wraps),
            lambda consumed: sizes.at(consumed) // (config.batch.micro_batch * dp.size),
            num_workers=config.data.num_workers,
            pinned=self.mesh.device.type == "cuda",
        ).at
