"""Checks of gated delta nets: which layers have one, and heads that do not divide."""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.checks.numbers import division, divisors, near
from megapipe.config import Config, ModelConfig
from megapipe.config.model.moe import layer_frequency
from megapipe.config.notes import either

_KEYS = "--linear-num-key-heads"
_FREQUENCY = "--linear-attention-freq"


def delta_problems(config: Config) -> Iterator[str]:
    """Yield all problems of the flags of gated delta nets."""
    model = config.model
    if not model.has_delta:
        return
    yield from _layers(model)
    keys = model.linear_num_key_heads
    values = model.linear_num_value_heads
    if values % keys:
        yield (
            f"--linear-num-value-heads {values} does not divide by {_KEYS} {keys}: "
            f"{division(values, keys)}. Use --linear-num-value-heads {near(values, keys)}."
        )
    tp = config.parallel.tensor_model_parallel_size
    if keys % tp:
        yield (
            f"{_KEYS} {keys} does not divide by --tensor-model-parallel-size {tp}: "
            f"{division(keys, tp)}. Use --tensor-model-parallel-size {either(divisors(keys))}."
        )
        return
    cp = config.parallel.context_parallel_size
    if cp == 1:
        return
    if model.cp_comm_type != ("a2a",):
        yield (
            f"--cp-comm-type {' '.join(model.cp_comm_type)} brings keys to queries, and a gated "
            "delta net has a state that goes through the whole sequence. Use --cp-comm-type a2a."
        )
    elif keys % (tp * cp):
        tensor = f"--tensor-model-parallel-size {tp} x " if tp > 1 else ""
        yield (
            f"--cp-comm-type a2a deals heads to ranks, and {_KEYS} {keys} does not divide by "
            f"{tensor}--context-parallel-size {cp}. Use a smaller --context-parallel-size."
        )


def _layers(model: ModelConfig) -> Iterator[str]:
    """Yield the problem of a --linear-attention-freq that is missing or does not fit the layers."""
    variant = f"--experimental-attention-variant {model.experimental_attention_variant}"
    text = model.linear_attention_freq
    if text is None:
        yield f"{variant} in which layers? Give {_FREQUENCY}, for example {_FREQUENCY} 4."
        return
    try:
        frequency = layer_frequency(text)
    except ValueError:
        yield (
            f"{_FREQUENCY} {text}: an integer of at least 1, or a list with a 0 or 1 for each "
            'layer, such as "([1]*3+[0])*12" (in quotes)'
        )
        return
    layers = model.num_layers
    if layers is None:
        return
    if isinstance(frequency, int):
        frequency = [int((layer + 1) % frequency != 0) for layer in range(layers)]
    if len(frequency) != layers:
        yield (
            f"{_FREQUENCY} {text} says {len(frequency)} layers, and --num-layers {layers}. "
            "Make both agree."
        )
    elif not any(frequency):
        yield f"{_FREQUENCY} {text} leaves no layer for {variant}. Leave one of them out."
