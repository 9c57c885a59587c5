"""Checks of a model: its shapes, window and gated delta nets; what to recompute or to offload."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from megapipe.checks.fp8 import fp8_problems
from megapipe.checks.inputs import ask
from megapipe.checks.layout import tensor_sizes, widths_of
from megapipe.checks.numbers import check_numbers, division, divisors, near
from megapipe.checks.refused import refusals
from megapipe.config import Config, ModelConfig
from megapipe.config.layers import layer_config
from megapipe.config.model.moe import layer_frequency
from megapipe.config.notes import either

_KEYS = "--linear-num-key-heads"
_FREQUENCY = "--linear-attention-freq"

# Nine digits: int() refuses more than 4300, with an error that names no flag.
_WINDOW = re.compile(r"\(?(\d{1,9}|-1), *(0|-1)\)?")


def shape_problems(config: Config) -> Iterator[str]:
    """Yield problems of widths, heads and positions that do not fit each other, ranks or FP8."""
    m = config.model
    tp = config.parallel.tensor_model_parallel_size
    length = config.batch.seq_length
    yield from _latent(m) if m.multi_latent_attention else _heads(m)
    heads = m.num_attention_heads
    if m.group_query_attention and heads and heads % m.num_query_groups:
        yield (
            f"--num-attention-heads {heads} is not divisible by --num-query-groups "
            f"{m.num_query_groups}: {division(heads, m.num_query_groups)}. "
            f"Use --num-query-groups {either(divisors(heads))}."
        )
    widths = widths_of(config)
    # The default of a gated MLP is two thirds of 4 h in steps of 64, which is 0 for a small h.
    if widths.get("--ffn-hidden-size") == 0:
        yield (
            f"--swiglu makes an MLP of width 0 from --hidden-size {m.hidden_size}. "
            "Give --ffn-hidden-size."
        )
    for name, width in widths.items():
        if width % tp:
            yield (
                f"{name} {width} is not divisible by --tensor-model-parallel-size {tp}: "
                f"{division(width, tp)}. "
                f"Use --tensor-model-parallel-size {either(tensor_sizes(config))}."
            )
    positions = m.max_position_embeddings
    # Beyond the table of learned positions a look-up would fail on the device, in the middle of a
    # step.
    if positions and length and length > positions:
        yield (
            f"--seq-length {length} is above --max-position-embeddings {positions}. "
            f"Use --max-position-embeddings {length}."
        )
    yield from fp8_problems(config)


def _heads(m: ModelConfig) -> Iterator[str]:
    """Yield the problem of the number of channels of a head, else problems of their rotation."""
    hidden = m.hidden_size
    heads = m.num_attention_heads
    if not hidden or not heads:
        return
    # Without a head's size there is no rotation to check.
    if m.kv_channels is None and hidden % heads:
        yield (
            f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}: "
            f"{division(hidden, heads)}. Use --hidden-size {near(hidden, heads)}, "
            "or give the size of a head with --kv-channels."
        )
        return
    if not m.rotates:
        return
    yield from _yarn(m)
    # Channels turn in pairs, so their number must be even.
    turned = int(m.head_dim * m.rotary_percent)
    if turned % 2:
        yield (
            f"--position-embedding-type {m.position_embedding_type} turns pairs, but "
            f"--rotary-percent {m.rotary_percent} of a head of {m.head_dim} is {turned}, "
            "an odd number."
        )
    elif turned == 0:
        yield (
            f"--rotary-percent {m.rotary_percent:g} of a head of {m.head_dim} turns no channel. "
            f"Use at least --rotary-percent {2 / m.head_dim:g}, "
            "or --position-embedding-type none."
        )
    elif m.position_embedding_type == "longrope":
        yield from _longrope(m, turned // 2)


def window_problems(config: Config) -> Iterator[str]:
    """Yield problems of a window that cannot be read, and of patterns of layers."""
    model = config.model
    if model.num_layers is not None and model.has_patterns:
        yield from ask(lambda: model.patterns_of(0))
    if model.window_size is not None and not _WINDOW.fullmatch(model.window_size):
        yield (
            f"--window-size {model.window_size}: two numbers LEFT,RIGHT, and a causal model has "
            "RIGHT 0. Use --window-size 127,0 for a window of 128 tokens."
        )


def _yarn(model: ModelConfig) -> Iterator[str]:
    """Yield the problem of a --rotary-base of at most 1, by whose logarithm yarn divides."""
    if model.position_embedding_type == "yarn" and model.rotary_base <= 1:
        yield (
            f"--rotary-base {model.rotary_base:g}: --position-embedding-type yarn divides by its "
            "logarithm, so that it must be above 1. Use --rotary-base 10000."
        )


def _longrope(model: ModelConfig, pairs: int) -> Iterator[str]:
    """Yield problems of the two lists of divisors, --longrope-short-factor and -long-factor.

    Args:
        pairs: the length that a list must have: half the rotated channels of a head. All numbers
            must be above 0.
    """
    for name in ("short", "long"):
        divisors = getattr(model, f"longrope_{name}_factor")
        if len(divisors) != pairs or not all(0 < number < math.inf for number in divisors):
            yield (
                f"--longrope-{name}-factor has {len(divisors)} numbers. "
                f"Give {pairs} above 0, one for each rotated pair of channels of a head."
            )


def _latent(model: ModelConfig) -> Iterator[str]:
    """Yield problems of rotary embedding in latent attention.

    Problems are an odd number of rotated channels or none, and a --rotary-base of at most 1 under
    YaRN.
    """
    latent = "--multi-latent-attention"
    dim = model.qk_pos_emb_head_dim
    # As in Megatron-LM, YaRN rotates all of these channels.
    share = model.rotary_percent if model.rope_type == "rope" else 1.0
    turned = int(dim * share)
    if turned % 2 or not turned:
        part = f" x --rotary-percent {share:g}" if share != 1 else ""
        yield (
            f"{latent} turns pairs, and --qk-pos-emb-head-dim {dim}{part} is {turned}. "
            "Use an even number above 0."
        )
    if model.rope_type != "rope" and model.rotary_base <= 1:
        yield (
            f"--rotary-base {model.rotary_base:g}: --rope-type yarn divides by its logarithm, "
            "so that it must be above 1. Use --rotary-base 10000, or --rope-type rope."
        )


def offload_problems(config: Config) -> Iterator[str]:
    """Yield problems of --offload-modules.

    A named module is a problem if the model lacks it, or if offloading it frees no memory.
    """
    model = config.model
    modules = config.parallel.offload_modules
    given = f"--offload-modules {' '.join(modules)}"
    of_experts = [name for name in ("expert_fc1", "moe_act") if name in modules]
    names = " and ".join(of_experts)
    if of_experts and not model.num_experts:
        yield f"{given}: {names} are of experts, and there are none. Leave them out."
    elif of_experts and model.recompute_moe:
        yield (
            f"{given}: --recompute-modules moe computes experts again, which keep nothing. "
            f"Leave moe out there, or {names} here."
        )
    # The input of attn_proj is the output of attention, and attention keeps it for its own backward
    # unless it is recomputed.
    if "attn_proj" in modules and "core_attn" not in modules and not model.recompute_mla_up_proj:
        yield (
            f"{given}: the input of attn_proj is kept by core_attn too, and stays for it. "
            "Add core_attn."
        )


def recompute_problems(config: Config) -> Iterator[str]:
    """Yield the problem of --recompute-modules if the model has no module that the flag names."""
    model = config.model
    modules = model.recompute_modules
    if model.recompute_granularity == "full" or not model.recompute_selective:
        return
    given = f"--recompute-modules {' '.join(modules)}"
    has_shared = bool(model.num_experts and model.moe_shared_expert_intermediate_size)
    there = {
        "mla_up_proj": model.multi_latent_attention,
        "shared_experts": has_shared,
        "moe": bool(model.num_experts),
        "moe_act": bool(model.num_experts),
    }
    if "mla_up_proj" in modules and not model.multi_latent_attention:
        yield (
            f"{given}: mla_up_proj is of --multi-latent-attention, which is not given. "
            "Leave mla_up_proj out."
        )
    # One part of the model in the list is enough to recompute something. Only a list of none is
    # refused.
    elif modules and not any(there.get(name, True) for name in modules):
        yield (
            f"{given}: the model has none of these parts, so nothing is computed again. "
            "Leave the flag out."
        )


def override_problems(config: Config) -> Iterator[str]:
    """Yield the problems of layers that --per-layer-overrides changes.

    If several equal layers have a problem, only the first of these layers is reported.
    """
    model = config.model
    if model.per_layer_overrides is None or model.num_layers is None:
        return
    if unreadable := ask(lambda: layer_config(model, 0)):
        yield from unreadable
        return
    # Problems of the whole model are reported already; a layer has only its own.
    known = {*check_numbers(config)[1], *_of_model(config)}
    first: dict[ModelConfig, int] = {}
    for layer in range(model.layers):
        # A model of 100 layers may have two kinds of them: each kind is checked once.
        first.setdefault(layer_config(model, layer), layer)
    for changed, layer in first.items():
        sound, problems = check_numbers(replace(config, model=changed))
        for line in [*problems, *_of_model(sound, of_layer=True)]:
            if line not in known:
                yield f"--per-layer-overrides, layer {layer}: {line}"


def _of_model(config: Config, *, of_layer: bool = False) -> list[str]:
    return [
        *shape_problems(config),
        *window_problems(config),
        *refusals(config, of_layer=of_layer),
    ]


def delta_problems(config: Config) -> Iterator[str]:
    """Yield problems of the flags of gated delta nets: layers, heads and context parallelism."""
    model = config.model
    if not model.has_delta:
        return
    yield from _delta_layers(model)
    keys = model.linear_num_key_heads
    values = model.linear_num_value_heads
    if values % keys:
        yield (
            f"--linear-num-value-heads {values} is not divisible by {_KEYS} {keys}: "
            f"{division(values, keys)}. Use --linear-num-value-heads {near(values, keys)}."
        )
    tp = config.parallel.tensor_model_parallel_size
    if keys % tp:
        yield (
            f"{_KEYS} {keys} is not divisible by --tensor-model-parallel-size {tp}: "
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
            f"--cp-comm-type a2a deals heads to ranks, and {_KEYS} {keys} is not divisible by "
            f"{tensor}--context-parallel-size {cp}. Use a smaller --context-parallel-size."
        )


def _delta_layers(model: ModelConfig) -> Iterator[str]:
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
