"""Say what a step asks of a rank's stages."""

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
from megapipe.tensor_parallel.rng import MicrobatchContext


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of one step: Megatron's for forward_backward_func, and ours.

    In shapes s is a sequence length, b a microbatch size and h a hidden size. There are c
    context-parallel and t tensor-parallel ranks.

    Attributes:
        forward_step_func: (data_iterator, model) -> (output, loss_func).
        data_iterator, model: one, or a list with one for each chunk of this rank in ascending stage
            order. A stage with neither embedding nor loss may have None as its iterator.
        num_microbatches: microbatches of the step, for each data-parallel rank.
        seq_length, micro_batch_size: s and b. Hidden states are [s/c, b, h]. A model whose
            config.sequence_parallel is on takes and gives [s/(c t), b, h]. A pipeline of one rank
            reads only s, and only if the table cuts microbatches into slices.
        schedule: the step's table; None for the engine's.
        costs: times of passes and messages, which decide where messages are posted.
        decoder_seq_length: s of the decoder, if it differs; else None.
        forward_only: an evaluation: the same order of forwards, without gradients.
        collect_non_loss_data: call loss_func with non_loss_data=True and collect its results.
        calculate_per_token_loss: do not divide losses in (sum, tokens) form by their tokens.
        averaged_over_cp: gradients will be averaged over context-parallel ranks, not summed. See
            `Loss.share`.
        loss_scale: returns the loss scale, the factor on every loss before backward.
        stream: takes a microbatch and returns its stream of random numbers.
        variable_seq_lengths: microbatches of this step differ in length.
        documents: takes a microbatch and returns its documents. If the table cuts microbatches
            into slices of their sequences, cuts are near ends of documents. None to cut all
            microbatches at the same tokens.
        around_last_backward: returns a context for the last backward of the stage with this number.
        on_stage_done: called with a stage's number when its last pass of any microbatch is over.
        read: called with each pass before its time is measured, to wait for the training samples of
            the pass.
        weights: for each chunk, functions that reduce, gather, update and check its weights.
            Passes of the table call them, such as U; None if the table has no such pass.
        on_loss: called with the loss of every microbatch in order, on ranks with a loss; or None.
        stopwatch: measures the time of every pass; None if no caller asks for the times.
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
    stream: Callable[[int], MicrobatchContext] = lambda microbatch: MicrobatchContext(0, microbatch)
    variable_seq_lengths: bool = False
    documents: Callable[[int], Documents | None] | None = None
    around_last_backward: Callable[[int], AbstractContextManager[None]] | None = None
    on_stage_done: Callable[[int], None] | None = None
    read: Callable[[Pass], None] | None = None
    weights: Sequence[Weights] | None = None
    on_loss: Callable[[Loss], None] | None = None
    stopwatch: Stopwatch | None = None
