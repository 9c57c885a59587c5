"""Experts in Hugging Face's words: what config.json says of them, and the tensors of each expert by themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megapipe.config import ModelConfig
from megapipe.convert.huggingface.values import expected

Json = Mapping[str, Any]

_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "mixtral": {
        "router.weight": ("block_sparse_moe.gate.weight",),
        "experts.linear_fc1.weight": ("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
        "experts.linear_fc2.weight": ("block_sparse_moe.experts.{}.w2.weight",),
    },
    "": {
        "router.weight": ("mlp.gate.weight",),
        "router.expert_bias": ("mlp.gate.e_score_correction_bias",),
        "experts.linear_fc1.weight": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
        "experts.linear_fc2.weight": ("mlp.experts.{}.down_proj.weight",),
        "shared_experts.linear_fc1.weight": ("mlp.{s}.gate_proj.weight", "mlp.{s}.up_proj.weight"),
        "shared_experts.linear_fc2.weight": ("mlp.{s}.down_proj.weight",),
        "shared_experts.gate_weight": ("mlp.shared_expert_gate.weight",),
    },
}
_SHARED = {"qwen2_moe": "shared_expert"}
SPARSE = ("mixtral", "qwen2_moe", "qwen3_moe")
"""Families whose models have experts."""


def names_of(ours: str, family: str, num_experts: int) -> tuple[str, ...] | None:
    """The names of a layer's tensor `mlp....` of ours in a family's layer, expert by expert; None for no part of the
    experts."""
    patterns = _NAMES["mixtral" if family == "mixtral" else ""].get(ours.removeprefix("mlp."))
    if patterns is None:
        return None
    shared = _SHARED.get(family, "shared_experts")
    patterns = tuple(pattern.replace("{s}", shared) for pattern in patterns)
    each = range(num_experts) if ".experts." in f".{ours}" else range(1)
    return tuple(pattern.format(number) for number in each for pattern in patterns)


def joined(tensors: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Theirs in order -> ours."""
    return torch.stack(list(tensors)).view(shape) if len(shape) > 2 else tensors[0]


def parts(tensor: Tensor) -> Sequence[Tensor]:
    """Ours -> theirs in order: a matrix for each expert, and of a gated layer two."""
    return tensor.flatten(0, -3).unbind(0) if tensor.dim() > 2 else (tensor,)


Reader = Callable[[Json, list[str]], dict[str, Any]]
Writer = Callable[[ModelConfig], dict[str, Any]]


def sparse(
    read: Reader,
    write: Callable[[str, ModelConfig], dict[str, Any]],
    window: Callable[[Json, list[str]], str | None],
    write_window: Writer,
) -> dict[str, tuple[Reader, Writer]]:
    """The families with experts, by what they share with Llama and Qwen2: (reader, writer) of each.

    write: of an architecture's name and the model. window, write_window: of Qwen2's sliding window.
    """

    def mixtral(content: Json, problems: list[str]) -> dict[str, Any]:
        return read(content, problems) | _mixtral(content) | {"window_size": _all(content["sliding_window"])}

    def qwen2(content: Json, problems: list[str]) -> dict[str, Any]:
        problems += expected(content, {"qkv_bias": (True,)})
        if content["use_sliding_window"] and not content.get("layer_types"):
            problems.append("use_sliding_window is True without layer_types to say in which layers")
        more = {"add_qkv_bias": True, "window_size": window(content, problems)}
        return read(content, problems) | more | _qwen(content, problems, _shared(content))

    def qwen3(content: Json, problems: list[str]) -> dict[str, Any]:
        problems += expected(content, {"attention_bias": (False,)})
        width = content["sliding_window"] if content["use_sliding_window"] else None
        more = {"qk_layernorm": True, "window_size": _all(width)}
        return read(content, problems) | more | _qwen(content, problems, {})

    def write_qwen(name: str, model: ModelConfig) -> dict[str, Any]:
        return write(name, model) | _write_qwen(model) | write_window(model)

    return {
        "mixtral": (mixtral, lambda model: write("MixtralForCausalLM", model) | _write_mixtral(model)),
        "qwen2_moe": (qwen2, lambda model: write_qwen("Qwen2MoeForCausalLM", model)),
        "qwen3_moe": (qwen3, lambda model: write_qwen("Qwen3MoeForCausalLM", model)),
    }


def _all(width: int | None) -> str | None:
    return None if width is None else f"{width - 1},0"


def _mixtral(content: Json) -> dict[str, Any]:
    """The fields beside those of a Mistral."""
    return {
        "num_experts": content["num_local_experts"],
        "moe_router_topk": content["num_experts_per_tok"],
        "moe_ffn_hidden_size": content["intermediate_size"],
        "moe_router_pre_softmax": content["num_local_experts"] == 1,  # of one expert both are 1
        "moe_input_jitter_eps": content["router_jitter_noise"] or None,
    }


def _qwen(content: Json, problems: list[str], shared: dict[str, Any]) -> dict[str, Any]:
    """The fields beside those of a dense Qwen, none if no layer has experts. shared: those of the shared expert."""
    layers, step = content["num_hidden_layers"], content["decoder_sparse_step"]
    dense = content["mlp_only_layers"] or []
    if not all(type(layer) is int for layer in dense):
        problems.append(f"mlp_only_layers is a list of integers, got {dense}")
    sparse = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(layers)]
    if not any(sparse):
        return {}
    experts = content["num_experts"] if "num_experts" in content else content["num_local_experts"]
    return shared | {
        "num_experts": experts,
        "moe_router_topk": content["num_experts_per_tok"],
        "moe_ffn_hidden_size": content["moe_intermediate_size"],
        "moe_router_pre_softmax": experts == 1 or not content["norm_topk_prob"],
        "moe_layer_freq": "1" if all(sparse) else str(sparse),
    }


def _shared(content: Json) -> dict[str, Any]:
    """Qwen2's shared expert."""
    return {
        "moe_shared_expert_intermediate_size": content["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
    }


def _write_mixtral(model: ModelConfig) -> dict[str, Any]:
    """Fields of Mixtral; none for a model without experts, which is then another."""
    if not model.has_experts:
        return {}
    return {
        "num_local_experts": model.experts,
        "num_experts_per_tok": model.moe_router_topk,
        "intermediate_size": model.expert_ffn,
        "sliding_window": None if model.window is None else model.window + 1,
        "router_jitter_noise": model.moe_input_jitter_eps or 0.0,
        "output_router_logits": False,
    }


def _write_qwen(model: ModelConfig) -> dict[str, Any]:
    """Fields of Qwen's; none for a model without experts."""
    if not model.has_experts:
        return {}
    shared = model.moe_shared_expert_intermediate_size
    return {
        "num_experts": model.experts,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": model.expert_ffn,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(model.layers) if not model.has_experts_in(layer)],
        "output_router_logits": False,
        **({"shared_expert_intermediate_size": shared} if shared else {}),
    }
