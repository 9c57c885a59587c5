"""Parts of a model: a window or a rotation that is none, and names of parts that are not there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from megapipe.config import ModelConfig

_WINDOW = re.compile(r"\(?(\d{1,9}|-1), *(0|-1)\)?")


def variant_problems(model: ModelConfig) -> Iterator[str]:
    """Yield what is wrong with a window that is none."""
    if model.window_size is not None and not _WINDOW.fullmatch(model.window_size):
        yield (
            f"--window-size {model.window_size}: two numbers LEFT,RIGHT, and a causal model has RIGHT 0. "
            "Use --window-size 127,0 for a window of 128 tokens."
        )


def latent_problems(model: ModelConfig) -> Iterator[str]:
    """Yield what is wrong with the rotations of latents: of what is no pair, or by no base."""
    latent = "--multi-latent-attention"
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


def offload_problems(model: ModelConfig, modules: Sequence[str]) -> Iterator[str]:
    """Yield parts of a layer that are to be copied to the host, and are not there or keep nothing."""
    given = f"--offload-modules {' '.join(modules)}"
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
    """Yield names of parts that are to be computed again, and are not there."""
    modules = model.recompute_modules
    if model.recompute_granularity == "full" or not model.recompute_selective:
        return
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
