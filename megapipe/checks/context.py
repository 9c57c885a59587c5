"""Checks of context parallelism, which asks something of sequences, heads and attention."""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.config import Config
from megapipe.config.layers import layer_config
from megapipe.errors import ConfigError

WAYS = ("p2p", "all_gather", "a2a", "a2a+p2p")


def context_problems(config: Config) -> Iterator[str]:
    """Sequences that do not divide, a way that there is not, or not for this attention."""
    c, ways = config.parallel.context_parallel_size, config.model.cp_comm_type
    if len(ways) != 1:
        yield f"--cp-comm-type {' '.join(ways)}: a way for each layer is not implemented. Use --cp-comm-type {ways[0]}."
    elif ways[0] not in WAYS:
        yield f"--cp-comm-type {ways[0]} is not implemented: p2p, all_gather and a2a are. Use --cp-comm-type p2p."
    if c == 1:
        return
    length, pieces = config.batch.seq_length, 2 * c
    if length and length % pieces:
        low = length - length % pieces
        yield (
            f"--seq-length {length} does not divide into 2 x --context-parallel-size {c} pieces: "
            f"{length} = {pieces} x {length // pieces} + {length % pieces}. "
            f"Use --seq-length {f'{low} or ' * (low > 0)}{low + pieces}."
        )
    if "a2a" in ways:
        yield from dict.fromkeys(_heads(config))


def _heads(config: Config) -> Iterator[str]:
    """Problems with the heads of every layer."""
    tp, c, model = config.parallel.tensor_model_parallel_size, config.parallel.context_parallel_size, config.model
    try:
        layers = [layer_config(model, layer) for layer in range(model.num_layers or 0)]
    except ConfigError:
        return  # _overrides tells
    for layer in layers:
        if layer.no_attention or layer.num_attention_heads is None:
            continue
        for name, heads in (("--num-attention-heads", layer.heads), ("--num-query-groups", layer.query_groups)):
            if heads % tp == 0 and heads % (tp * c):
                yield (
                    f"--cp-comm-type a2a deals heads to ranks, and {name} {heads} does not divide by "
                    f"{f'--tensor-model-parallel-size {tp} x ' * (tp > 1)}--context-parallel-size {c}. "
                    "Use --cp-comm-type p2p."
                )
                break
