"""Checks of context parallelism, which constrains sequences, heads and attention."""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.checks.numbers import division
from megapipe.config import Config
from megapipe.config.layers import layer_config
from megapipe.errors import ConfigError

WAYS = ("p2p", "all_gather", "a2a", "a2a+p2p")


def context_problems(config: Config) -> Iterator[str]:
    """Yield problems of context parallelism.

    The sequence length must be divisible by twice the number of ranks. There must be one value of
    --cp-comm-type, a known one. With a2a the numbers of heads must be divisible by tp x cp.
    """
    c = config.parallel.context_parallel_size
    ways = config.model.cp_comm_type
    if len(ways) != 1:
        yield (
            f"--cp-comm-type {' '.join(ways)}: a way for each layer is not implemented. "
            f"Use --cp-comm-type {ways[0]}."
        )
    elif ways[0] not in WAYS:
        yield (
            f"--cp-comm-type {ways[0]} is not implemented: p2p, all_gather and a2a are. "
            "Use --cp-comm-type p2p."
        )
    if c == 1:
        return
    length = config.batch.seq_length
    # A causal sequence is cut in 2c pieces. Each rank has one from the front and one from the back,
    # so that all have the same work.
    pieces = 2 * c
    if length and length % pieces:
        low = length - length % pieces
        fitting = f"{low} or {low + pieces}" if low else str(pieces)
        yield (
            f"--seq-length {length} is not divisible by 2 x --context-parallel-size {c}: "
            f"{division(length, pieces)}. Use --seq-length {fitting}."
        )
    # Only this way gives a rank all tokens of some heads.
    if "a2a" in ways:
        yield from dict.fromkeys(_heads(config))


def _heads(config: Config) -> Iterator[str]:
    """Yield problems of each layer's heads, which --cp-comm-type a2a divides among ranks."""
    tp = config.parallel.tensor_model_parallel_size
    c = config.parallel.context_parallel_size
    model = config.model
    try:
        layers = [layer_config(model, layer) for layer in range(model.num_layers or 0)]
    except ConfigError:
        return  # another check reports overrides that cannot be read
    for layer in layers:
        if layer.no_attention or layer.has_delta or layer.num_attention_heads is None:
            continue
        counts = {"--num-attention-heads": layer.heads, "--num-query-groups": layer.query_groups}
        for name, heads in counts.items():
            # Heads that are not divisible by tp have a line already.
            if heads % tp == 0 and heads % (tp * c):
                tensor = f"--tensor-model-parallel-size {tp} x " if tp > 1 else ""
                yield (
                    f"--cp-comm-type a2a deals heads to ranks, and {name} {heads} is not divisible "
                    f"by {tensor}--context-parallel-size {c}. Use --cp-comm-type p2p."
                )
                break
