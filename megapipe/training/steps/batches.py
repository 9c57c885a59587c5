"""The microbatches that a rank's stages read in a step, each stage in the order of its passes."""

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
from megapipe.pipeline_parallel.slices import Slices, lengths_of
from megapipe.schedule import Kind, Pass, Placement, Schedule
from megapipe.schedule.shapes.slices.cuts import DOCUMENTS


def documents_of(config: Config, eod: int, microbatches: Sequence[Microbatch], i: int) -> Documents | None:
    """Return the borders of a microbatch's documents, which some flags need on every stage, ends or not."""
    isolate, restart = config.data.reset_attention_mask, config.data.reset_position_ids
    if not (isolate or restart):
        return None
    return find_documents(tokens_of(microbatches[i])[:, :-1], eod, isolate=isolate, restart=restart)


def gets_batches(place: Placement, stage: int, also_read: Collection[int]) -> bool:
    """Return whether a stage has an end of the model, shares the vocabulary, or asked."""
    return place.reads(stage) or stage in also_read or stage in place.shares(stage)


@dataclass(frozen=True)
class StepReading:
    """What a rank's stages read of one step.

    Attributes:
        eod: end-of-document id of the tokenizer.
        also_read: stages that get batches in addition to those with embedding or loss.
        microbatches: of this data-parallel rank; read only where a stage needs them.
        documents: of a microbatch.
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
        """The documents, if slices end with them."""
        return self.documents if self.config.parallel.pipeline_slice_cuts == DOCUMENTS else None

    def wait(self, item: Pass) -> None:
        """Wait until the samples of a pass have been read."""
        data = self.config.data
        looks = gets_batches(self.table.placement, item.stage, self.also_read)
        looks = looks or data.reset_attention_mask or data.reset_position_ids
        if item.kind in (Kind.F, Kind.E) and looks:
            self.microbatches[item.microbatch]

    def batches(self, stage: int) -> Rewinding[Batch] | None:
        """Return a stage's microbatches in its order, None where it gets none."""
        config, mesh, table, place = self.config, self.mesh, self.table, self.table.placement
        if not gets_batches(place, stage, self.also_read):
            return None
        reads = Kind.E if stage in place.shares(stage) else Kind.F
        steps = table.ranks[mesh.pp.rank]
        order = [table.number(p) for step in steps for p in step if p.kind is reads and p.stage == stage]
        depth, per_token = place.depth(stage), config.batch.calculate_per_token_loss
        ends = self.eod if config.model.mtp_within_documents else None
        slices = Slices(lengths_of(table, config.batch.seq_length, mesh, config.model, self.borders))

        @lru_cache(maxsize=1)  # slices of a microbatch follow each other
        def whole(i: int) -> Batch:
            read = self.microbatches[i]
            named = {"tokens": read} if isinstance(read, Tensor) else read
            here = {name: x.to(mesh.device, non_blocking=True) for name, x in named.items()}
            tokens = here.pop("tokens")
            usual = make_batch(tokens, self.eod, config.data.eod_mask_loss, config.data.reset_position_ids)
            return replace(usual, more=here).ahead(depth, weighs=per_token, ends=ends)

        def batch(number: int) -> Batch:
            return whole(slices.microbatch(number)).cut(Cut(mesh.cp.rank, mesh.cp.size, *slices.tokens(number)))

        return Rewinding(batch, order)
