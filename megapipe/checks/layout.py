"""Checks of the layout: the world size, and then the batch, the schedule and the layers."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from megapipe.checks.batch import batch_problems
from megapipe.checks.numbers import division, divisors, start_of
from megapipe.checks.pipeline import pipeline_problems
from megapipe.config import Config

_LARGEST = 128
"""Limit on the ranks of a pipeline whose table is made, in 2 s, before the world size fits."""


def layout_problems(config: Config) -> Iterator[str]:
    """Yield problems of world size, batch, schedule and layers.

    If the world size is wrong, the number of microbatches is unknown. Schedule and layers are then
    checked with 4p microbatches for p pipeline ranks.
    """
    par = config.parallel
    tp = par.tensor_model_parallel_size
    pp = par.pipeline_model_parallel_size
    cp = par.context_parallel_size
    world = config.world_size
    ranks = par.ranks_of_a_replica
    is_whole = world % ranks == 0 or config.lacks_a_rank
    if not is_whole:
        context = f"--context-parallel-size {cp} x " if cp > 1 else ""
        layouts = _layouts(config) if cp == 1 else ""
        yield (
            f"{world} processes are not --tensor-model-parallel-size {tp} x {context}"
            f"--pipeline-model-parallel-size {pp} x data-parallel ranks: "
            f"{division(world, ranks)}.\n"
            f"      {start_of(ranks, world)}{layouts}"
        )
    # The number of microbatches does not follow from such a world. The schedule is checked with
    # one that suits it, unless that takes long: the world size has to change anyway.
    if not is_whole or not config.batch.micro_batch_size:
        if pp <= _LARGEST:
            yield from pipeline_problems(config, None)
    else:
        yield from batch_problems(config)


def _layouts(config: Config) -> str:
    """Return the end of an error: ", or use tensor x pipeline 2 x 4, 4 x 2." and so on.

    Named are at most six sizes that divide the processes, widths and layers, largest first.
    """
    world = config.world_size
    layers = config.model.num_layers or 1
    sizes = [(t, p) for t in tensor_sizes(config) for p in divisors(gcd(world // t, layers))]
    sizes.sort(key=lambda size: (-size[0] * size[1], size))
    shown = ", ".join(f"{t} x {p}" for t, p in sizes[:6])
    return f", or use tensor x pipeline {shown}."


def widths_of(config: Config) -> dict[str, int]:
    """Return {flag: width} of the widths that tensor-parallel ranks split."""
    m = config.model
    widths = {
        # The projection of a depth of multi-token prediction is split by its rows.
        "--hidden-size": m.hidden_size if m.depths else None,
        "--num-attention-heads": m.num_attention_heads,
        "--num-query-groups": m.num_query_groups if m.group_query_attention else None,
        "--ffn-hidden-size": m.ffn if m.ffn_hidden_size or m.hidden_size else None,
    }
    return {name: width for name, width in widths.items() if width is not None}


def tensor_sizes(config: Config) -> list[int]:
    """Return the tensor-parallel sizes that divide all widths and the number of processes.

    Only sizes that suit the processes together with the pipeline's size are returned, if there are
    any.
    """
    widths = widths_of(config).values() or (1,)
    fits = divisors(gcd(config.world_size, *widths))
    pp = config.parallel.pipeline_model_parallel_size
    return [d for d in fits if config.world_size % (d * pp) == 0] or fits
