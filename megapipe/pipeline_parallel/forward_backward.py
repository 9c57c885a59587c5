"""`get_forward_backward_func`: Megatron's way to ask for a schedule, over the one executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.execute import execute
from megapipe.pipeline_parallel.loss import Loss
from megapipe.pipeline_parallel.messenger import Messenger
from megapipe.pipeline_parallel.stage import ForwardStep, PipelineStage
from megapipe.pipeline_parallel.transport import Transport
from megapipe.schedule import (
    Placement,
    Program,
    Schedule,
    build,
    forward_only,
    share_of_window,
    unpaired,
    verify,
)
from megapipe.schedule.lower import lower_timed, most_in_flight
from megapipe.schedule.simulate import run_clock
from megapipe.tensor_parallel.rng import Stream

SLACK = 2
"""Sends that a rank may be ahead of the schedule's clock before it waits for the rank that is behind."""

ForwardBackward = Callable[..., list[dict[str, Any]]]


@lru_cache(maxsize=16)
def _programs(schedule: Schedule, evaluate: bool, overlap: bool) -> tuple[tuple[Program, ...], tuple[int, ...]]:
    """Of each rank, and how many of its messages are under way at most."""
    verify(schedule)
    schedule = schedule if overlap else unpaired(schedule)
    schedule = forward_only(schedule) if evaluate else schedule
    clock = run_clock(schedule)
    return lower_timed(schedule, clock), most_in_flight(schedule, clock)


@lru_cache(maxsize=16)
def _kept(schedule: Schedule, n: int) -> tuple[frozenset[int], ...]:
    return share_of_window(schedule, n)


def get_forward_backward_func(
    pp_size: int | None = None,
    vp_size: int | None = None,
    *,
    mesh: ProcessMesh,
    schedule: Schedule | str | None = None,
    p2p_mode: str = "plain",
    variable_seq_lengths: bool = False,
) -> ForwardBackward:
    """The function that runs one step's forward and backward passes under a schedule.

    Args:
        pp_size, vp_size: as Megatron's; default to the mesh's pipeline size and to one chunk.
        mesh: who this rank is.
        schedule: a table, or a name that `schedule.build` knows; default 1f1b, interleaved with several chunks.
        p2p_mode: how messages are posted, a `transport.P2PMode`.
        variable_seq_lengths: microbatches differ in length, so the shape of each message is sent before it.
    Returns: a function with Megatron's keywords, see `forward_backward` below.
    """
    pp_size = pp_size or mesh.pp.size
    assert pp_size == mesh.pp.size, f"pp_size {pp_size}, but the mesh has {mesh.pp.size} pipeline ranks"
    dtype: torch.dtype | None = None
    overlap: bool | None = None
    opened: set[Placement] = set()
    name = schedule or ("interleaved" if vp_size and vp_size > 1 else "1f1b")

    def forward_backward(
        *,
        forward_step_func: ForwardStep,
        data_iterator: Iterator[Any] | Sequence[Iterator[Any] | None] | None,
        model: nn.Module | Sequence[nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        calculate_per_token_loss: bool = False,
        loss_scale: float = 1.0,
        stream: Callable[[int], Stream] = lambda microbatch: Stream(0, microbatch),
        on_stage_done: Callable[[int], None] | None = None,
        on_loss: Callable[[Loss], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Run every microbatch through this rank's stages.

        Args:
            forward_step_func: (data_iterator, model) -> (output, loss_func).
            data_iterator, model: one, or one per chunk of this rank in ascending stage order. A stage with neither
                embedding nor loss may have None as its iterator.
            num_microbatches: per step and data-parallel rank.
            seq_length, micro_batch_size: s and b of the hidden states [s, b, h], of which a model whose
                config.sequence_parallel is on takes and gives [s/t, b, h].
            decoder_seq_length: seq_length of the decoder where it differs.
            forward_only: evaluation; the same order of forwards, no gradients.
            collect_non_loss_data: call loss_func with non_loss_data=True and collect what it returns.
            calculate_per_token_loss: do not divide losses in (sum, tokens) form by their tokens.
            loss_scale: factor on every loss before backward, see optim.loss_scale.
            stream: the randomness of a microbatch.
            on_stage_done: called with a stage's number when its last pass is over.
            on_loss: called with what loss_func returned, of every microbatch in order, where the loss is.
        Returns: loss_func's dict of every microbatch in order, on ranks whose stages hold the loss; else [].
        """
        table = build(name, pp_size, num_microbatches, chunks=vp_size) if isinstance(name, str) else name
        assert table.num_microbatches == num_microbatches, "the schedule is for another number of microbatches"
        own = table.placement.stages_on(mesh.pp.rank)
        modules = list(model) if isinstance(model, Sequence) else [model]
        iterators = list(data_iterator) if isinstance(data_iterator, Sequence) else [data_iterator] * len(modules)
        assert len(modules) == len(iterators) == len(own), f"stages {own} need as many model chunks and iterators"
        config: Any = modules[0].config
        # Megatron's name for how many of the microbatches in flight keep their activations under recomputation.
        kept = _kept(table, getattr(config, "num_microbatches_with_partial_activation_checkpoints", None) or 0)

        def stream_of(stage: int, microbatch: int) -> Stream:
            drawn = stream(microbatch)
            return replace(drawn, recomputes=False) if microbatch in kept[stage] else drawn

        nonlocal dtype, overlap
        if overlap is None:  # of all ranks, whose programs must fit one another
            overlap = all(mesh.pp.gather_json(all(hasattr(m, "overlapped_forward_backward") for m in modules)))
        paired = {p.stage for row in table.ranks for step in row if len(step) > 1 for p in step}
        stages = {
            number: PipelineStage(
                module,
                forward_step_func,
                iterator,
                holds_loss=table.placement.is_last(number),
                loss_divisor=num_microbatches,
                loss_scale=loss_scale,
                per_token=calculate_per_token_loss,
                collect_non_loss_data=collect_non_loss_data,
                stream=partial(stream_of, number),
                overlaps=overlap and number in paired,
            )
            for number, module, iterator in zip(own, modules, iterators, strict=True)
        }
        shared = mesh.tp.size if config.sequence_parallel else 1
        shape = ((decoder_seq_length or seq_length) // shared, micro_batch_size, config.hidden_size)
        dtype = dtype or _message_dtype(modules, mesh.pp)
        transport = Transport(mesh.pp, p2p_mode)
        programs, in_flight = _programs(table, forward_only, overlap)
        comm = Messenger(
            mesh.pp,
            shape,
            dtype,
            transport=transport,
            variable_seq_lengths=variable_seq_lengths,
            sends_in_flight=in_flight[mesh.pp.rank] + SLACK,
        )
        if table.placement not in opened:
            comm.open_links(table.placement)
            opened.add(table.placement)
        with torch.set_grad_enabled(not forward_only):
            execute(
                programs[mesh.pp.rank],
                table.placement,
                stages,
                comm,
                on_stage_done=on_stage_done,
                position=mesh.position,
            )
        for stage in stages.values():
            stage.finish()
        losses = {mb: loss for stage in stages.values() for mb, loss in stage.losses.items()}
        if on_loss is not None:
            for mb in sorted(losses):
                on_loss(losses[mb])
        results = {mb: loss.reported for mb, loss in losses.items()}
        results |= {mb: result for stage in stages.values() for mb, result in stage.results.items()}
        return [results[mb] for mb in sorted(results)]

    return forward_backward


def _message_dtype(modules: Sequence[nn.Module], pp: Axis) -> torch.dtype:
    """That of the parameters, asked of all ranks: a rank's stages may have none."""
    mine = sorted({str(p.dtype).removeprefix("torch.") for module in modules for p in module.parameters()})
    everyone = {dtype for rank in pp.gather_json(mine) for dtype in rank}
    assert len(everyone) == 1, f"one dtype for all stages, got {sorted(everyone)}"
    return getattr(torch, *everyone)  # type: ignore[no-any-return]
