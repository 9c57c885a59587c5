"""Kinds of a model's parts: of which there can be one, and settings of a part that is not there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from megapipe.config import ModelConfig
from megapipe.config.notes import flag

_WINDOW = re.compile(r"\(?(\d{1,9}|-1), *(0|-1)\)?")


def variant_problems(model: ModelConfig) -> Iterator[str]:
    """Activations that exclude each other, rotary settings without rotary positions, a window that is none."""
    chosen = [flag(name) for name in ("swiglu", "quick_geglu", "squared_relu") if getattr(model, name)]
    if len(chosen) > 1:
        yield f"{' and '.join(chosen)} are different activations of one MLP. Leave {' or '.join(chosen)} out."
    if model.rope_scaling_factor != ModelConfig.rope_scaling_factor and not model.use_rope_scaling:
        yield f"--rope-scaling-factor {model.rope_scaling_factor:g} has no effect without --use-rope-scaling. Add it."
    if model.window_size is not None and not _WINDOW.fullmatch(model.window_size):
        yield (
            f"--window-size {model.window_size}: two numbers LEFT,RIGHT, and a causal model has RIGHT 0. "
            "Use --window-size 127,0 for a window of 128 tokens."
        )


def latent_problems(model: ModelConfig) -> Iterator[str]:
    """Heads of another kind beside latents, and rotations of what is no pair."""
    latent = "--multi-latent-attention"
    if model.group_query_attention:
        yield f"{latent} has a key and a value for each head. Leave --group-query-attention out."
    dim = model.qk_pos_emb_head_dim
    share = model.rotary_percent if model.rope_type == "rope" else 1.0
    turned = int(dim * share)
    if turned % 2 or not turned:
        part = f" x --rotary-percent {share:g}" if share != 1 else ""
        yield f"{latent} turns pairs, and --qk-pos-emb-head-dim {dim}{part} is {turned}. Use an even number above 0."
    if model.rope_type != "rope" and model.rotary_base <= 1:
        yield (
            f"--rotary-base {model.rotary_base:g}: --rope-type yarn divides by its logarithm, so that it must be above "
            "1. Use --rotary-base 10000, or --rope-type rope."
        )


def offload_problems(model: ModelConfig, modules: Sequence[str], *, compiled: bool) -> Iterator[str]:
    """Parts of a layer that are to be copied to the host, and are not there or keep nothing. compiled: by --compile."""
    given = f"--offload-modules {' '.join(modules)}"
    if modules and compiled:
        yield f"{given} names parts of a layer, and --compile makes one of several. Leave one of the two flags out."
    of_experts = [name for name in ("expert_fc1", "moe_act") if name in modules]
    if of_experts and not model.num_experts:
        yield f"{given}: {' and '.join(of_experts)} are of experts, and there are none. Leave them out."
    elif of_experts and model.recompute_moe:
        yield (
            f"{given}: --recompute-modules moe computes experts again, which keep nothing. Leave moe out there, or "
            f"{' and '.join(of_experts)} here."
        )
    # What attn_proj keeps is what attention has made, and attention keeps it too, unless it is computed again.
    if "attn_proj" in modules and "core_attn" not in modules and not model.recompute_mla_up_proj:
        yield f"{given}: the input of attn_proj is kept by core_attn too, and stays for it. Add core_attn."


def recompute_problems(model: ModelConfig) -> Iterator[str]:
    """Two answers to what is recomputed, or how without what."""
    modules = model.recompute_modules
    if modules != ModelConfig.recompute_modules and not model.recompute_selective:
        yield (
            f"--recompute-modules {' '.join(modules)} has no effect without --recompute-granularity selective. Add it."
        )
    partial = model.num_microbatches_with_partial_activation_checkpoints
    if partial is not None and not (model.recompute_selective or model.recompute_granularity):
        yield (
            f"--num-microbatches-with-partial-activation-checkpoints {partial} has no effect where nothing is computed "
            "again. Add --recompute-granularity full."
        )
    if model.recompute_granularity == "full":
        if model.recompute_activations:
            yield "--recompute-activations means --recompute-granularity selective, but full is given. Leave one out."
        return
    if not model.recompute_selective:
        return  # Megatron ignores the two then, and so do we: flags.idle
    given = f"--recompute-modules {' '.join(modules)}"
    there = {
        "mla_up_proj": model.multi_latent_attention,
        "shared_experts": bool(model.num_experts and model.moe_shared_expert_intermediate_size),
        **dict.fromkeys(("moe", "moe_act"), bool(model.num_experts)),
    }
    if "mla_up_proj" in modules and not model.multi_latent_attention:
        yield f"{given}: mla_up_proj is of --multi-latent-attention, which is not given. Leave mla_up_proj out."
    elif modules and not any(there.get(name, True) for name in modules):
        yield f"{given}: the model has none of these parts, so nothing is computed again. Leave the flag out."
    for name in ("recompute_method", "recompute_num_layers"):
        if (value := getattr(model, name)) is not None:
            yield f"{flag(name)} {value} has no effect without --recompute-granularity full. Add it."
