"""Lower bounds of a step: what no schedule of a cell can be faster than.

They need the work of a model's layers alone, no table and no split. So a search makes a table only
for cells that may still be among the best.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megapipe.config import Config
from megapipe.plan import ModelWork, pieces_of
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.late import is_late
from megapipe.plan.seconds.messages import of_layer
from megapipe.plan.seconds.replicas import OfRank, sent
from megapipe.plan.state import bytes_of_parameter
from megapipe.schedule import SCHEDULES


class Least(NamedTuple):
    """Lower bounds of the step time of a cell, a choice of parallel sizes and recomputation.

    `work` returns the bound under a schedule.

    Attributes:
        step: seconds of a rank's passes for all microbatches, and of its gradient reduction.
        paired: the same, if two passes may run together, so that each hides the other's
            communication.
        forward, backward, weights: seconds of one microbatch in the whole model: of the forward,
            the backward of inputs, and the backward of weights.
        overlaps: whether a rank begins the next step while others end this one, so that none waits
            for the pipeline to fill.
        state: bytes of weights, gradients and optimizer state that a rank keeps at least, as a mean
            over the ranks; 0 if it is not counted, for sharded gradients.
    """

    step: float
    paired: float
    forward: float
    backward: float
    weights: float
    overlaps: bool
    state: float

    def work(self, name: str) -> float:
        """Return a lower bound of a step under a schedule, in seconds.

        The time to fill and drain the pipeline is left out.

        Args:
            name: the schedule's name.
        """
        if SCHEDULES[name].pairs:
            return self.paired
        return self.step


@dataclass
class Counted:
    """Counts the FLOPs and bytes of a model's layers, once for all cells with equal counts.

    A cell is a choice of parallel sizes and recomputation, without a schedule.

    `pieces` returns the work of a cell's layers, `least` a lower bound of its step time.

    Attributes:
        known: the counts so far, by the settings on which they depend.
    """

    known: dict[Any, ModelWork] = field(default_factory=dict)

    def pieces(self, cell: Config) -> ModelWork:
        """Return the work of embedding, layers and head of a cell."""
        par = cell.parallel
        key: tuple[Any, ...] = (
            cell.model.recompute_granularity,
            cell.batch.micro_batch,
            par.tensor_model_parallel_size,
            par.context_parallel_size,
            par.expert_model_parallel_size,
            par.etp,
        )
        if cell.gathers_fp8:
            key += (cell.weight_replicas, cell.expert_replicas, par.shards_weights)
        if key not in self.known:
            self.known[key] = pieces_of(cell, cell.model)
        # The overhead of a pass is a share of a rank's work.
        return self.known[key].on(par.pipeline_model_parallel_size)

    def least(self, cell: Config, device: Device) -> Least:
        """Return a lower bound of the time of a cell on a device."""
        work = self.pieces(cell)
        par = cell.parallel
        ranks = par.pipeline_model_parallel_size
        tp = par.tensor_model_parallel_size
        chain = [work.embedding, *work.layers, work.head]
        rate = 1 / (tp * device.flops)
        layers = len(work.layers)
        means = (
            rate * sum(piece.f for piece in chain) / layers,
            rate * sum(piece.b for piece in chain) / layers,
        )
        forward, backward = of_layer(means, cell, device)
        everything = [*chain, *work.depths]
        computed = rate * sum(piece.f + piece.b + piece.w for piece in everything)
        waits = layers + len(work.depths)
        f = rate * sum(piece.f for piece in everything) + waits * forward
        b = rate * sum(piece.b for piece in everything) + waits * backward
        w = rate * sum(piece.w for piece in everything)
        # Each microbatch has at least two passes, F and BW, on each rank; a pair counts as one.
        m = cell.num_microbatches
        step = ((f + b + w) / ranks + 2 * device.overhead) * m
        paired = (computed / ranks + device.overhead) * m
        parameters = sum(piece.parameters for piece in everything)
        experts = sum(piece.experts for piece in everything)
        if cell.model.tied:
            parameters -= cell.model.hidden * (cell.model.padded_vocab_size or 0)
        mean = OfRank(
            (parameters - experts) / tp / ranks,
            experts / (par.expert_model_parallel_size * par.etp) / ranks,
            sum(piece.lighter for piece in everything) / ranks,
        )
        # Where passes may hide communication, the bound leaves it out.
        reduce, gather = sent(mean, cell, device)
        at_end = 0.0
        late = is_late(cell)
        if not (par.overlap_grad_reduce or late):
            at_end += reduce
        if not (cell.gathers_later or late):
            at_end += gather
        state = 0.0
        if not par.shards_grads:
            state += mean.dense * bytes_of_parameter(cell, ())[0]
            state += mean.experts * bytes_of_parameter(cell, (), experts=True)[0]
        return Least(step + at_end, paired + at_end, f, b, w, late, state)


def fill(least: Least, ranks: int, name: str, chunks: int | None) -> float:
    """Return the seconds in which a rank waits while the pipeline fills and drains.

    At the start later ranks wait for their first microbatch, at the end for the last gradients.

    Args:
        least: the times of one microbatch.
        ranks: the number of pipeline ranks.
        name: the schedule's name.
        chunks: stages on each rank; None for the schedule's own number.
    """
    if least.overlaps:
        return 0.0
    entry = SCHEDULES[name]
    if entry.copies > 1:
        # Two copies of the model fill the pipeline from both ends.
        before: float = (ranks - 1) // 2
    else:
        before = (ranks - 1) / (chunks or entry.chunks or 1)
    waited = least.forward
    if not entry.split:
        waited += least.backward + least.weights
    return before / ranks * waited
