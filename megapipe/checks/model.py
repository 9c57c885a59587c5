"""Checks of a model's attention window and rotation, and of parts to recompute or to offload."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from megapipe.config import ModelConfig

# Nine digits: int() refuses more than 4300, with an error that names no flag.
_WINDOW = re.compile(r"\(?(\d{1,9}|-1), *(0|-1)\)?")


def variant_problems(model: ModelConfig) -> Iterator[str]:
    """Yield the problem of a --window-size that cannot be read."""
    if model.window_size is not None and not _WINDOW.fullmatch(model.window_size):
        yield (
            f"--window-size {model.window_size}: two numbers LEFT,RIGHT, and a causal model has "
            "RIGHT 0. Use --window-size 127,0 for a window of 128 tokens."
        )


def yarn_problems(model: ModelConfig) -> Iterator[str]:
    """Yield the problem of a base of rotary frequencies whose logarithm yarn cannot divide by."""
    if model.position_embedding_type == "yarn" and model.rotary_base <= 1:
        yield (
            f"--rotary-base {model.rotary_base:g}: --position-embedding-type yarn divides by its "
            "logarithm, so that it must be above 1. Use --rotary-base 10000."
        )


def latent_problems(model: ModelConfig) -> Iterator[str]:
    """Yield problems of rotary positions in multi-latent attention: an odd width, or its base."""
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


def offload_problems(model: ModelConfig, modules: Sequence[str]) -> Iterator[str]:
    """Yield problems of --offload-modules: parts that the model lacks, or that keep nothing.

    Args:
        modules: the value of the flag.
    """
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


def recompute_problems(model: ModelConfig) -> Iterator[str]:
    """Yield the problem of --recompute-modules with parts that the model does not have."""
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
