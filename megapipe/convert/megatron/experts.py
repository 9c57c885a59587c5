"""Experts in Megatron-LM's checkpoints: each is a parameter of its own, and all of a layer's are one tensor of ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megapipe.config import ModelConfig
from megapipe.config.model.moe import MoEConfig

FIELDS = tuple(MoEConfig.__dataclass_fields__)
"""Fields of our configuration, which Megatron-LM calls the same."""
_SEQUENTIAL = re.compile(r"(.*mlp\.experts\.)local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))")
_GROUPED = re.compile(r"(.*mlp\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)")


def of_expert(name: str) -> tuple[str, int] | None:
    """The tensor of ours that an expert's own tensor is a part of, and its number on its rank; None for others."""
    if match := _SEQUENTIAL.fullmatch(name):
        return match[1] + match[3], int(match[2])
    match = _GROUPED.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))


def is_experts(name: str) -> bool:
    """Is it a tensor that has a part of each expert?"""
    return ".mlp.experts." in f".{name}"


def alike(model: ModelConfig) -> bool:
    """Are all layers of one kind? Then Megatron-LM keeps a tensor of all of them under one key."""
    return len({model.has_experts_in(layer) for layer in range(model.layers)}) < 2


def taken(args: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ours from arguments; what is left to its default there is to ours too."""
    if not args.get("num_experts"):
        return {}
    found = {name: args[name] for name in FIELDS if args.get(name) is not None}
    if "moe_layer_freq" in found:
        found["moe_layer_freq"] = str(found["moe_layer_freq"])
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):  # one of them is written without a list
        if name in found:
            value = found[name]
            found[name] = tuple(value) if isinstance(value, list | tuple) else (value,)
    return found


def given(model: ModelConfig) -> dict[str, Any]:
    """Arguments that say the same."""
    if not model.has_experts:
        return {"num_experts": None}
    found = {name: getattr(model, name) for name in FIELDS} | {"moe_ffn_hidden_size": model.expert_ffn}
    layers = [int(model.has_experts_in(layer)) for layer in range(model.layers)]
    found["moe_layer_freq"] = 1 if alike(model) else layers
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        value = found[name]
        found[name] = value[0] if len(value) == 1 else list(value)
    return found | {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1}
