"""What a step asks of a rank's stages: Megatron's keywords, and ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn

from megapipe.distributed.tokens import Documents
from megapipe.pipeline_parallel.loss import ForwardStep, Loss
from megapipe.pipeline_parallel.passes.begin import Weights
from megapipe.pipeline_parallel.stopwatch import Stopwatch
from megapipe.schedule import Costs, Pass, Schedule
from megapipe.schedule.costs import UNIT
from megapipe.tensor_parallel.rng import Stream


@dataclass(frozen=True, kw_only=True)
class Request:
    """A step: Megatron's keywords, and ours.

    Attributes:
        forward_step_func: (data_iterator, model) -> (output, loss_func).
        data_iterator, model: one, or a list of one per chunk of this rank in ascending stage order. A stage with
            neither embedding nor loss may have None as its iterator.
        num_microbatches: per step and data-parallel rank.
        seq_length, micro_batch_size: s and b of the hidden states [s/c, b, h] on c context-parallel ranks, of which a
            model whose config.sequence_parallel is on takes and gives [s/(c t), b, h]. One pipeline rank reads neither.
        schedule: the step's table, in place of the engine's.
        costs: what the stages take; messages are posted in the order that these give.
        decoder_seq_length: seq_length of the decoder where it differs.
        forward_only: evaluation; the same order of forwards, no gradients.
        collect_non_loss_data: call loss_func with non_loss_data=True and collect what it returns.
        calculate_per_token_loss: do not divide losses in (sum, tokens) form by their tokens.
        averaged_over_cp: whoever synchronises gradients averages them over context-parallel ranks, see `Loss.share`.
        loss_scale: gives the factor on every loss before backward, see optim.loss_scale.
        stream: the randomness of a microbatch.
        variable_seq_lengths: for this step, as for all of an engine.
        documents: of a microbatch, with which its slices end where one is near a cut.
        around_last_backward: given a stage's number, what is entered while the last of its backwards runs.
        on_stage_done: called with a stage's number when its last pass is over.
        read: called with each pass before its time is taken; waits for the samples that it needs.
        weights: what the table's passes of a stage as a whole do, of each chunk; None if it has none.
        on_loss: called with what loss_func returned, of every microbatch in order, where the loss is.
        stopwatch: takes the time of every pass.
    """

    forward_step_func: ForwardStep
    data_iterator: Any
    model: nn.Module | Sequence[nn.Module]
    num_microbatches: int
    seq_length: int | None
    micro_batch_size: int | None
    schedule: Schedule | None = None
    costs: Costs = UNIT
    decoder_seq_length: int | None = None
    forward_only: bool = False
    collect_non_loss_data: bool = False
    calculate_per_token_loss: bool = False
    averaged_over_cp: bool = False
    loss_scale: Callable[[], float] = lambda: 1.0
    stream: Callable[[int], Stream] = lambda microbatch: Stream(0, microbatch)
    variable_seq_lengths: bool = False
    documents: Callable[[int], Documents | None] | None = None
    around_last_backward: Callable[[int], AbstractContextManager[None]] | None = None
    on_stage_done: Callable[[int], None] | None = None
    read: Callable[[Pass], None] | None = None
    weights: Sequence[Weights] | None = None
    on_loss: Callable[[Loss], None] | None = None
    stopwatch: Stopwatch | None = None
