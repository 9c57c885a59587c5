"""Give this rank's stages their microbatches of a step, each in the order of its passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from torch import Tensor

from megapipe.config import Config
from megapipe.data.loader import Batch, Microbatch, make_batch, tokens_of
from megapipe.distributed.mesh import ProcessMesh
from megapipe.distributed.tokens import Cut, Documents, find_documents
from megapipe.pipeline_parallel.again import Rewinding
from megapipe.pipeline_parallel.shapes import microbatches_of
from megapipe.schedule import Pass, Placement, Schedule


def documents_of(
    config: Config, eod: int, microbatches: Sequence[Microbatch], i: int
) -> Documents | None:
    """Return the documents of microbatch i, which the attention of every stage needs.

    Returns None if neither --reset-attention-mask nor --reset-position-ids is given.

    Args:
        config: the run's configuration.
        eod: end-of-document id of the tokenizer.
        microbatches: the step's microbatches on this data-parallel rank.
        i: index of the microbatch.
    """
    isolate = config.data.reset_attention_mask
    restart = config.data.reset_position_ids
    if not (isolate or restart):
        return None
    inputs = tokens_of(microbatches[i])[:, :-1]
    return find_documents(inputs, eod, isolate=isolate, restart=restart)


def gets_batches(place: Placement, stage: int, also_read: Collection[int]) -> bool:
    """Return whether a stage gets microbatches.

    Stages with embedding, loss, multi-token prediction or a share of the vocabulary get them.

    Args:
        place: the placement of stages on ranks.
        stage: number of the stage.
        also_read: further stages that get them.
    """
    return place.reads(stage) or stage in also_read or stage in place.shares(stage)


@dataclass(frozen=True)
class StepReading:
    """Reads one step's microbatches for the stages of this rank.

    `wait` waits for the data of a pass. `batches` returns the iterator that a stage gets.

    `borders` returns `documents` if slices must end where documents end.

    Attributes:
        config: the run's configuration, with the batch size of this step.
        table: the schedule of this step.
        mesh: this rank's mesh.
        eod: end-of-document id of the tokenizer.
        also_read: stages that get batches in addition to those with embedding or loss.
        microbatches: of this data-parallel rank; an item is read only if a stage needs it.
        documents: returns the documents of the microbatch with an index; None if attention and
            positions ignore documents.
    """

    config: Config
    table: Schedule
    mesh: ProcessMesh
    eod: int
    also_read: Collection[int]
    microbatches: Sequence[Microbatch]
    documents: Callable[[int], Documents | None]

    @property
    def borders(self) -> Callable[[int], Documents | None] | None:
        """Return `documents` if microbatches are cut into slices where documents end, else None."""
        if self.config.parallel.cuts_at_documents:
            return self.documents
        return None

    def wait(self, item: Pass) -> None:
        """Wait until the samples of a pass have been read.

        Args:
            item: the pass.
        """
        data = self.config.data
        needs = gets_batches(self.table.placement, item.stage, self.also_read)
        # Attention masks and positions of documents are needed on every stage.
        needs = needs or data.reset_attention_mask or data.reset_position_ids
        if item.kind.traits.reads and needs:
            # Indexing waits for the threads that read ahead.
            self.microbatches[item.microbatch]

    def batches(self, stage: int) -> Rewinding[Batch] | None:
        """Return an iterator over a stage's microbatches, or slices, in the order of its forwards.

        Returns None if the stage needs no batches.
        """
        config = self.config
        mesh = self.mesh
        place = self.table.placement
        if not gets_batches(place, stage, self.also_read):
            return None
        # Iterators are read in the order of the table, which may take microbatches out of order.
        row = [item for step in self.table.ranks[mesh.pp.rank] for item in step]
        reads = [item for item in row if item.kind.traits.reads and item.stage == stage]
        # A stage may have two passes that read a microbatch; the second is given the same batch.
        order = list(dict.fromkeys(self.table.number(item) for item in reads))
        depth = place.depth(stage)
        per_token = config.batch.calculate_per_token_loss
        ends = self.eod if config.model.mtp_within_documents else None
        length = config.batch.seq_length
        parts = microbatches_of(self.table, length, mesh, config.model, self.borders)()

        # Slices of one microbatch follow each other, so that one entry is enough.
        @lru_cache(maxsize=1)
        def microbatch(i: int) -> Batch:
            read = self.microbatches[i]
            named = {"tokens": read} if isinstance(read, Tensor) else read
            # From page-locked memory the copy runs while the host goes on.
            here = {name: x.to(mesh.device, non_blocking=True) for name, x in named.items()}
            tokens = here.pop("tokens")
            # Labels and mask are computed here, from the ids, and not read.
            data = config.data
            made = make_batch(tokens, self.eod, data.eod_mask_loss, data.reset_position_ids)
            return replace(made, more=here).ahead(depth, weighs=per_token, ends=ends)

        def batch(number: int) -> Batch:
            cut = Cut(mesh.cp.rank, mesh.cp.size, *parts.tokens(number))
            return microbatch(parts.microbatch(number)).cut(cut)

        # After a wrong guess the step's first forwards run again, and read the same batches.
        return Rewinding(batch, order)
