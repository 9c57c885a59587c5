"""Experts in Megatron-LM's checkpoints.

Megatron-LM saves each expert's parameters separately. megapipe has one tensor for all experts of a
layer, whose first dimension counts them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megapipe.config import ModelConfig
from megapipe.config.model.moe import MoEConfig

FIELDS = tuple(MoEConfig.__dataclass_fields__)
"""The configuration's fields of experts, which have the same names in Megatron-LM."""
_LISTS = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
"""Fields with a list of values. Megatron-LM saves a single value without a list."""

# Megatron-LM's own experts are a list of modules. Transformer Engine's grouped product is one
# module, whose parameters are numbered: weight0, weight1.
_SEQUENTIAL = re.compile(
    r"(.*mlp\.experts\.)local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))"
)
_GROUPED = re.compile(r"(.*mlp\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)")


def of_expert(name: str) -> tuple[str, int] | None:
    """Return (tensor of all experts, expert's index) of a parameter that belongs to one expert.

    Args:
        name: Megatron-LM's name of the parameter.
    Returns: megapipe's name of the tensor, and the expert's number on its rank; None if the
        parameter is not of a single expert.
    """
    if match := _SEQUENTIAL.fullmatch(name):
        return match[1] + match[3], int(match[2])
    if match := _GROUPED.fullmatch(name):
        return match[1], int(match[2])
    return None


def is_experts(name: str) -> bool:
    """Return whether a tensor has a part for each expert of a layer.

    Args:
        name: megapipe's name of the tensor.
    """
    # A name within a layer begins with mlp; a shared expert's begins with mlp.shared_experts.
    return ".mlp.experts." in f".{name}"


def is_uniform(model: ModelConfig) -> bool:
    """Return whether all layers have experts, or none has.

    Megatron-LM then saves each parameter of all layers as one tensor, stacked by layer.
    """
    kinds = {model.has_experts_in(layer) for layer in range(model.layers)}
    return len(kinds) < 2


def fields_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return {field of ModelConfig: value} on experts, from Megatron-LM's arguments.

    The dict is empty for a model without experts. Arguments that are None are left out.
    """
    if not args.get("num_experts"):
        return {}
    found = {name: args[name] for name in FIELDS if args.get(name) is not None}
    # A number or a list there, the text of it here.
    if "moe_layer_freq" in found:
        found["moe_layer_freq"] = str(found["moe_layer_freq"])
    for name in _LISTS:
        if name in found:
            value = found[name]
            found[name] = tuple(value) if isinstance(value, list | tuple) else (value,)
    return found


def args_of(model: ModelConfig) -> dict[str, Any]:
    """Return {Megatron-LM's argument: value} on experts; {"num_experts": None} without any."""
    if not model.has_experts:
        return {"num_experts": None}
    found = {name: getattr(model, name) for name in FIELDS}
    found["moe_ffn_hidden_size"] = model.expert_ffn
    # Megatron-LM reads a list as one flag for each layer.
    found["moe_layer_freq"] = 1
    if not is_uniform(model):
        found["moe_layer_freq"] = [int(model.has_experts_in(n)) for n in range(model.layers)]
    for name in _LISTS:
        value = found[name]
        found[name] = value[0] if len(value) == 1 else list(value)
    return found | {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1}
