"""Enumerate what a search of plans compares: layouts, their recomputation, their schedules.

A layout is (tp, cp, pp, micro batch, ep, etp). A cell is a layout with its recomputation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

from megapipe.checks.run import flag_problems
from megapipe.checks.vocabulary import vocabulary_problems
from megapipe.config import Config, ModelConfig, ParallelConfig
from megapipe.partition.layout import layout_string
from megapipe.partition.spans import nearly_even
from megapipe.plan.seconds.step import Layout
from megapipe.schedule import SCHEDULES
from megapipe.schedule.catalogue import PLAIN

# A cell's recomputation of activations: of all, of some modules, or of none.
Recompute = Literal["full", "selective"] | None
RECOMPUTE: tuple[Recompute, ...] = (None, "selective", "full")
UNITS = ("breadth-first", "hanayo")
"""Schedules of sharded weights on one pipeline rank.

Breadth-first runs all microbatches of a chunk at once, and gathers each weight twice a step. The
other runs chunk after chunk for each microbatch, and holds the activations of one alone.
"""
UNITS_OF_RANKS = ("breadth-first", "interleaved")
"""The same on several pipeline ranks."""
# Stages per rank to try: where a schedule leaves a choice, and with sharded weights. More stages
# gather fewer weights at a time.
_CHUNKS = (2, 4)
_UNITS = (2, 4, 8, 16, 32)
# The same on one rank, where each stage is reduced and gathered once a step.
_REDUCED = (4, 8)
WITHOUT_BARRIER = ("enable_optimizer_post_validation", "post_validation_after")
"""Fields of updates that do not wait for other ranks."""


def cell_of(
    config: Config,
    gpus: int,
    layout: Layout,
    recompute: Recompute,
    vocab: int,
    *,
    shards: bool = False,
) -> Config:
    """Return the configuration of a cell, a choice of parallel sizes and recomputation.

    The schedule in it is 1F1B; a candidate of the search replaces it.

    Args:
        config: the user's configuration, whose parallel sizes and recomputation are replaced. Its
            overlap of data-parallel communication and its --enable-optimizer-post-validation stay
            if gradients are not sharded.
        gpus: the number of processes.
        layout: (tp, cp, pp, micro batch size, ep, etp).
        recompute: the value of --recompute-granularity; None for no recomputation.
        vocab: the size of the tokenizer.
        shards: shard weights and gradients over data parallel too.
    """
    tp, cp, pp, micro, ep, etp = layout
    # The default is tp, and a flag at its default need not be pasted.
    own_etp = None if etp == tp else etp
    # A run refuses --enable-optimizer-post-validation with sharded gradients.
    given = with_barrier(config).parallel if shards else config.parallel
    zero_1 = gpus > tp * pp and not shards
    reduces = zero_1 and given.overlap_grad_reduce
    # 1F1B stands for any schedule here; a candidate of the search replaces it.
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=own_etp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=pp,
        pipeline_schedule=PLAIN,
        pipeline_model_parallel_layout=_split(config, PLAIN, pp, None),
        # It needs less memory and sends less, so it is never worse.
        use_distributed_optimizer=zero_1,
        use_megatron_fsdp=shards,
        overlap_grad_reduce=reduces,
        overlap_param_gather=reduces and given.overlap_param_gather,
        ddp_bucket_size=given.ddp_bucket_size if reduces else None,
        ddp_num_buckets=given.ddp_num_buckets if reduces else None,
        **{name: getattr(given, name) for name in WITHOUT_BARRIER},
    )
    model = config.model
    partial = None
    if recompute:
        partial = model.num_microbatches_with_partial_activation_checkpoints
    # A run refuses these fields without the recomputation that they are for.
    modules = ModelConfig.recompute_modules
    if recompute == "selective":
        modules = model.recompute_modules
    method = None
    layers = None
    if recompute == "full":
        method = model.recompute_method
        layers = model.recompute_num_layers
    # All-gather sends each token to all ranks of experts, all-to-all to the ranks of its top k.
    dispatcher: Literal["alltoall", "allgather"] = "allgather"
    if model.moe_router_topk < ep:
        dispatcher = "alltoall"
    model = replace(
        model,
        recompute_granularity=recompute,
        recompute_activations=False,
        recompute_modules=modules,
        recompute_method=method,
        recompute_num_layers=layers,
        num_microbatches_with_partial_activation_checkpoints=partial,
        sequence_parallel=tp > 1,
        tp_comm_overlap=model.tp_comm_overlap and tp > 1,
        padded_vocab_size=model.padded_vocab(vocab),
        moe_token_dispatcher_type=dispatcher,
    )
    config = config.with_fields(micro_batch_size=micro)
    return replace(config, parallel=parallel, model=model, world_size=gpus)


def with_barrier(config: Config) -> Config:
    """Return the configuration without --enable-optimizer-post-validation."""
    default = ParallelConfig()
    return config.with_fields(**{name: getattr(default, name) for name in WITHOUT_BARRIER})


def expert_grids(
    config: Config, tp: int, ranks: int, widths: Collection[int]
) -> list[tuple[int, int]]:
    """Return each pair (ep, etp) to try for the experts of a stage.

    ep is the size of expert parallelism, and etp the number of ranks that split each expert. The
    first pair is (1, tp), as for an MLP. Then come pairs with ep > 1 and etp = 1, or with each etp
    in `widths`.

    Args:
        tp: the tensor-parallel size of the other layers.
        ranks: the number of ranks of the stage.
        widths: values of etp that the user asks for; they are tried with each ep.
    """
    if not config.model.has_experts:
        return [(1, tp)]
    # Whole experts: each rank has some of them, and ep must divide their number.
    grids = [(1, tp)]
    for etp in widths or (1,):
        if config.model.expert_ffn % etp:
            continue
        grids += [(ep, etp) for ep in divisors(config.model.experts) if ranks % (ep * etp) == 0]
    return list(dict.fromkeys(grids))


def is_refused(cell: Config, vocab: int) -> bool:
    """Return whether a run refuses the configuration of a cell.

    Args:
        vocab: the size of the tokenizer.
    """
    # A short batch has the same problems, and a small table is checked sooner.
    return any(vocabulary_problems(cell, vocab)) or bool(flag_problems(short(cell, 1)))


def schedules_of(cell: Config) -> list[tuple[str, int | None]]:
    """Return each (schedule, chunks) that may be the best for a cell, such as ("interleaved", 2).

    A cell is a choice of parallel sizes and recomputation.

    chunks is the number of stages on each rank; None if the schedule prescribes it, as 1f1b does.
    """
    ranks = cell.parallel.pipeline_model_parallel_size
    if cell.parallel.use_megatron_fsdp:
        names = UNITS
        if ranks > 1:
            names = UNITS_OF_RANKS
        return [(name, n) for name in names for n in _units(cell.model.layers, ranks)]
    found: list[tuple[str, int | None]] = []
    # On one rank there is no bubble, and every schedule takes the same time, unless stages reduce
    # and gather while others compute.
    if ranks == 1:
        if cell.parallel.overlap_grad_reduce:
            found = [(UNITS[1], n) for n in _REDUCED if cell.model.layers % n == 0]
        return [(PLAIN, None), *found]
    for name, entry in SCHEDULES.items():
        # A searched table takes seconds, so zb-auto is tried for the best layouts alone. A
        # dominated schedule is never better than another one of the catalogue.
        if entry.searched or entry.dominated:
            continue
        if entry.chunks:
            found.append((name, None))
        else:
            found += [(name, chunks) for chunks in _CHUNKS]
    return found


def _units(layers: int, ranks: int) -> list[int]:
    """Return the numbers of stages on each rank to try with sharded weights, ascending.

    On one pipeline rank the last is the largest one up to the last of _UNITS, such as 28 for as
    many layers. On several ranks such tables take a search too long.

    Args:
        layers: the number of layers of the model.
        ranks: the number of pipeline ranks.
    """
    fine = [n for n in range(2, _UNITS[-1] + 1) if layers % (ranks * n) == 0]
    finest = fine[-1:] if ranks == 1 else []
    return [n for n in fine if n in _UNITS or n in finest]


def is_movable(cell: Config) -> bool:
    """Return whether a search may offload or recompute single activations under a cell's schedule.

    The schedule must have one copy of the model, more than one stage, and no overlapped pairs of
    passes.

    Args:
        cell: a configuration with its schedule.
    """
    par = cell.parallel
    entry = SCHEDULES[par.pipeline_schedule or PLAIN]
    chunks = par.num_virtual_stages_per_pipeline_rank or 1
    return entry.copies == 1 and not entry.pairs and par.pipeline_model_parallel_size * chunks > 1


def under(cell: Config, name: str, chunks: int | None) -> Config:
    """Return the configuration of a cell under another schedule, with layers divided evenly.

    Args:
        name: the schedule's name.
        chunks: stages on each rank; None if the schedule prescribes it.
    """
    ranks = cell.parallel.pipeline_model_parallel_size
    par = replace(
        cell.parallel,
        pipeline_schedule=name,
        num_virtual_stages_per_pipeline_rank=chunks,
        pipeline_model_parallel_layout=_split(cell, name, ranks, chunks),
    )
    return replace(cell, parallel=par)


def split_as(config: Config, counts: Sequence[int]) -> Config:
    """Return the configuration with a number of layers for each stage.

    Args:
        counts: layers of each stage.
    """
    return config.with_fields(pipeline_model_parallel_layout=_layout(config, counts))


def _split(config: Config, name: str, ranks: int, chunks: int | None) -> str | None:
    """Return a --pipeline-model-parallel-layout that divides layers as evenly as possible.

    Returns None if all stages get equally many layers, as a run then needs no layout. Without a
    layout a run refuses other numbers of layers, such as DeepSeek-V3's 61.

    Args:
        name: the schedule's name.
        ranks: the number of pipeline ranks.
        chunks: stages on each rank; None for the schedule's own number.
    """
    entry = SCHEDULES[name]
    stages = ranks * (chunks or entry.chunks or 1) // entry.copies
    layers = config.model.layers
    if layers % stages == 0 or layers < stages:
        return None
    return _layout(config, nearly_even(layers, stages))


def _layout(config: Config, counts: Sequence[int]) -> str:
    """Return a --pipeline-model-parallel-layout.

    Args:
        counts: layers of each stage. Depths of multi-token prediction go to the stage of the loss.
    """
    depths = [len(counts) - 1] * (config.model.mtp_num_layers or 0)
    return layout_string(counts, depths)


def short(config: Config, turns: int) -> Config:
    """Return the configuration with a smaller batch, whose step is simulated sooner.

    m microbatches become 2p x `turns` + m % 2p, for p pipeline ranks, if m is above 2p x `turns`.
    The remainder stays, as some schedules need a multiple of 2p.
    """
    share = config.batch.micro_batch * config.data_parallel_size
    twice = 2 * config.parallel.pipeline_model_parallel_size
    count = config.num_microbatches
    fewer = count if count <= twice * turns else twice * turns + count % twice
    return config.with_batch(fewer * share)


def divisors(n: int) -> list[int]:
    """Return the divisors of n in ascending order."""
    return [d for d in range(1, n + 1) if n % d == 0]
