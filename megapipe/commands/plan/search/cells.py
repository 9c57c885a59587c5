"""Cells of a search of plans: layouts (tp, cp, pp, micro batch, ep, etp), their recomputation, their schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from megapipe.checks.run import flag_problems, vocabulary_problems
from megapipe.config import Config, ModelConfig, ParallelConfig
from megapipe.schedule import SCHEDULES
from megapipe.schedule.catalogue import PLAIN

Recompute = Literal["full", "selective"] | None
RECOMPUTE: tuple[Recompute, ...] = (None, "selective", "full")
Layout = tuple[int, ...]
UNITS, UNITS_OF_RANKS = ("breadth-first", "hanayo"), ("breadth-first", "interleaved")
"""Schedules of shares of weights: all microbatches of a chunk at once, whose weights are then gathered twice a step, or
chunk after chunk for each microbatch, whose activations alone are held; on one rank, and on several."""
_CHUNKS, _UNITS = (2, 4), (2, 4, 8, 16, 32)


def cell_of(
    config: Config, gpus: int, layout: Layout, recompute: Recompute, vocab: int, *, shards: bool = False
) -> Config:
    """The configuration of a layout. shards: of weights and gradients too, over data parallel."""
    tp, cp, pp, micro, ep, etp = layout
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=None if etp == tp else etp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=pp,
        pipeline_schedule=PLAIN,
        use_distributed_optimizer=gpus > tp * pp and not shards,  # less memory and less to send: never worse
        use_megatron_fsdp=shards,
    )
    model, rows = config.model, config.model.padded_vocab(vocab)
    partial = model.num_microbatches_with_partial_activation_checkpoints
    model = replace(
        model,
        recompute_granularity=recompute,
        recompute_activations=False,
        # Without what they act on these two are refused.
        recompute_modules=model.recompute_modules if recompute == "selective" else ModelConfig.recompute_modules,
        num_microbatches_with_partial_activation_checkpoints=partial if recompute else None,
        sequence_parallel=tp > 1,
        padded_vocab_size=rows,
        moe_token_dispatcher_type="alltoall" if config.model.moe_router_topk < ep else "allgather",  # what sends less
    )
    config = config.with_fields(micro_batch_size=micro)
    return replace(config, parallel=parallel, model=model, world_size=gpus)


def expert_grids(config: Config, tp: int, ranks: int) -> list[tuple[int, int]]:
    """Sizes of expert and expert tensor parallelism over so many ranks of a stage: split as an MLP, or whole."""
    if not config.model.has_experts:
        return [(1, tp)]
    whole = [(ep, 1) for ep in divisors(config.model.experts) if ranks % ep == 0]
    return list(dict.fromkeys([(1, tp), *whole]))


def is_refused(cell: Config, vocab: int) -> bool:
    """Is there no such run?"""
    return any(vocabulary_problems(cell, vocab)) or bool(flag_problems(short(cell, 1)))


def schedules_of(cell: Config) -> list[Config]:
    """The layout under each schedule of the catalogue that may be best; with shares of weights under those for it."""
    if cell.parallel.use_megatron_fsdp:
        ranks = cell.parallel.pipeline_model_parallel_size
        ways = UNITS if ranks == 1 else UNITS_OF_RANKS
        return [under(cell, name, n) for name in ways for n in _UNITS if cell.model.layers % (ranks * n) == 0]
    if cell.parallel.pipeline_model_parallel_size == 1:
        return [cell]
    names = [(name, e.chunks) for name, e in SCHEDULES.items() if not (e.searched or e.dominated)]
    pairs = [(name, None if chunks else n) for name, chunks in names for n in ((1,) if chunks else _CHUNKS)]
    return [under(cell, name, chunks) for name, chunks in pairs]


def is_movable(cell: Config) -> bool:
    """Is a table of this schedule one whose activations a search moves: of one copy of the model, and more stages than
    one?"""
    par = cell.parallel
    entry, chunks = SCHEDULES[par.pipeline_schedule or PLAIN], par.num_virtual_stages_per_pipeline_rank or 1
    return entry.copies == 1 and not entry.pairs and par.pipeline_model_parallel_size * chunks > 1


def under(cell: Config, name: str, chunks: int | None) -> Config:
    """The layout under a schedule, in so many chunks where that is to say."""
    par = replace(cell.parallel, pipeline_schedule=name, num_virtual_stages_per_pipeline_rank=chunks)
    return replace(cell, parallel=par)


def short(config: Config, turns: int) -> Config:
    """A configuration with a batch of 2 `turns` p microbatches or a little more, if schedules need it as its own."""
    share, twice = (
        config.batch.micro_batch * config.data_parallel_size,
        2 * config.parallel.pipeline_model_parallel_size,
    )
    count = config.num_microbatches
    fewer = count if count <= twice * turns else twice * turns + count % twice
    return config.with_batch(fewer * share)


def layout_of(config: Config) -> Layout:
    """tp, cp, pp, micro batch, ep and etp."""
    par = config.parallel
    sizes = par.tensor_model_parallel_size, par.context_parallel_size, par.pipeline_model_parallel_size
    return (*sizes, config.batch.micro_batch, par.expert_model_parallel_size, par.etp)


def divisors(n: int) -> list[int]:
    """Numbers that divide it, in order."""
    return [d for d in range(1, n + 1) if n % d == 0]
