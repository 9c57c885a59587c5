"""config.json and ModelConfig: what each says in the other's words, and what neither can say.

A family can express a model if config.json read back means the same; so nothing is ever dropped in silence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from megapipe.checkpoint.resume import resume_problems
from megapipe.config import Config, ModelConfig
from megapipe.config.typed import shown
from megapipe.convert.huggingface.deepseek import deepseek
from megapipe.convert.huggingface.defaults import filled, rotation
from megapipe.convert.huggingface.experts import sparse
from megapipe.convert.huggingface.values import expected, unfit
from megapipe.errors import CheckpointError
from megapipe.models.attention.rope import HIGH, LOW, ORIGINAL

Json = Mapping[str, Any]


def from_huggingface(content: Json) -> ModelConfig:
    """The architecture that a config.json describes; the vocabulary is not padded.

    Raises: CheckpointError naming every key whose value we cannot express.
    """
    family = content.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise CheckpointError(f"config.json: model_type {shown(family)} is none of {', '.join(FAMILIES)}")
    read, _ = FAMILIES[family]
    content = filled(family, content)
    problems = list(unfit(content))
    if content.get("quantization_config") is not None:
        problems.append(
            "quantization_config is given, and quantised weights cannot be converted. Dequantise the model, and leave "
            "that key out"
        )
    if problems:
        raise CheckpointError([f"config.json: {problem}" for problem in problems])
    try:
        fields, _ = read(content, problems), content["vocab_size"]
    except KeyError as error:
        raise CheckpointError(f"config.json of a {family} lacks {error}") from None
    if problems:
        raise CheckpointError([f"config.json: {problem}" for problem in problems])
    return ModelConfig(**fields)


def to_huggingface(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """A config.json for this model, of the first family that can express it.

    Raises: CheckpointError with what stands in the way of the family that comes nearest.
    """
    if unsaid := _unsaid(model):
        raise CheckpointError(unsaid)
    nearest: list[str] = []
    for family, (_, write) in FAMILIES.items():
        content = write(model) | {
            "model_type": family,
            "vocab_size": vocab_size,
            "tie_word_embeddings": model.tied,
        }
        differences = differing(model, content, family)
        if not differences:
            return content
        if not nearest or len(differences) < len(nearest):
            nearest = differences
    raise CheckpointError(["no family of Hugging Face models is like this one; nearest:", *nearest])


def differing(model: ModelConfig, content: Json, name: str) -> list[str]:
    """One text for each setting in which a config.json means another model than this."""
    try:
        there = dataclasses.replace(from_huggingface(content), mtp_num_layers=model.mtp_num_layers)
    except CheckpointError as error:
        return list(error.problems)
    return [*_unsaid(model), *resume_problems(dataclasses.asdict(there), None, Config(model=model), name)]


def _unsaid(model: ModelConfig) -> list[str]:
    """Settings of a training that change what a layer computes, and that no config.json can say."""
    if not (model.has_experts and model.by_sinkhorn):
        return []
    return [
        "--moe-router-load-balancing-type sinkhorn has a rule of its own for the weights of experts; no config.json of "
        "Hugging Face can say so"
    ]


def _gpt2(content: Json, problems: list[str]) -> dict[str, Any]:
    expect = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    }
    problems += expected(content, expect)
    embedding, dropout = content["embd_pdrop"], content["resid_pdrop"]
    if embedding != dropout:
        problems.append(f"embd_pdrop {embedding} with resid_pdrop {dropout}: --hidden-dropout is both")
    return {
        "no_bias_gelu_fusion": content["activation_function"] == "gelu",
        "num_layers": content["n_layer"],
        "hidden_size": content["n_embd"],
        "num_attention_heads": content["n_head"],
        "ffn_hidden_size": content["n_inner"] or 4 * content["n_embd"],
        "max_position_embeddings": content["n_positions"],
        "norm_epsilon": content["layer_norm_epsilon"],
        "untie_embeddings_and_output_weights": not content["tie_word_embeddings"],
        "attention_dropout": content["attn_pdrop"],
        "hidden_dropout": dropout,
    }


def _write_gpt2(model: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": model.layers,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_inner": model.ffn,
        "n_positions": model.max_position_embeddings,
        "activation_function": "gelu" if model.erf_gelu else "gelu_new",
        "layer_norm_epsilon": model.norm_epsilon,
        "attn_pdrop": model.attention_dropout,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
    }


def _rotary(content: Json, problems: list[str]) -> dict[str, Any]:
    """Fields that Llama, Qwen2, Qwen3 and Mistral share."""
    problems += expected(content, {"hidden_act": ("silu",), "partial_rotary_factor": (1.0, None)})
    heads = content["num_attention_heads"]
    groups = content["num_key_value_heads"] or heads
    return {
        "num_layers": content["num_hidden_layers"],
        "hidden_size": content["hidden_size"],
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else 1,
        "kv_channels": content["head_dim"] or content["hidden_size"] // heads,
        "ffn_hidden_size": content["intermediate_size"],
        "max_position_embeddings": content["max_position_embeddings"],
        "norm_epsilon": content["rms_norm_eps"],
        "untie_embeddings_and_output_weights": not content["tie_word_embeddings"],
        "attention_dropout": content["attention_dropout"],
        "hidden_dropout": 0.0,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
        **_rope(content, problems),
    }


def _rope(content: Json, problems: list[str]) -> dict[str, Any]:
    rope = rotation(content)
    problems += expected(rope, {"partial_rotary_factor": (1.0, None)})
    base: Any = rope["rope_theta"]
    if base is None:
        problems.append("rope_theta is null; it has to be the base of the rotation, as 10000")
        return {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rotary_base": float(base)}
    if kind != "llama3":
        problems.append(f"rope_type {kind} is not default or llama3")
        return {}
    expect = {
        "low_freq_factor": (LOW,),
        "high_freq_factor": (HIGH,),
        "original_max_position_embeddings": (ORIGINAL,),
    }
    problems += expected({name: rope[name] for name in expect}, expect)
    return {
        "rotary_base": float(base),
        "use_rope_scaling": True,
        "rope_scaling_factor": float(rope["factor"]),
    }


def _write_rotary(architecture: str, model: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": model.rotary_base, "rope_type": "default"}
    if model.use_rope_scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "low_freq_factor": LOW,
            "high_freq_factor": HIGH,
            "original_max_position_embeddings": ORIGINAL,
        }
    return {
        "architectures": [architecture],
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.query_groups,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_epsilon,
        "attention_dropout": model.attention_dropout,
        "hidden_act": "silu",
        "rope_parameters": rope,
        "rope_theta": model.rotary_base,  # the older spelling, for transformers 4
        "rope_scaling": rope if model.use_rope_scaling else None,
    }


def _llama(content: Json, problems: list[str]) -> dict[str, Any]:
    attention, mlp = content["attention_bias"], content["mlp_bias"]
    if attention != mlp:
        problems.append(f"attention_bias {attention} with mlp_bias {mlp}: there is one switch, --disable-bias-linear")
    return _rotary(content, problems) | {"disable_bias_linear": not mlp}


def _write_llama(model: ModelConfig) -> dict[str, Any]:
    return _write_rotary("LlamaForCausalLM", model) | {"attention_bias": model.bias, "mlp_bias": model.bias}


def _window(content: Json, problems: list[str]) -> str | None:
    """Qwen's sliding window, if all layers have it."""
    layers, width = content["num_hidden_layers"], content["sliding_window"]
    if not content["use_sliding_window"] or width is None:
        return None
    first = min(content["max_window_layers"], layers)
    kinds = content.get("layer_types") or ["full_attention"] * first + ["sliding_attention"] * (layers - first)
    sliding = sum(kind == "sliding_attention" for kind in kinds[:layers])
    if 0 < sliding < layers:
        problems.append(f"a sliding window in {sliding} of {layers} layers: --window-size is for all or none")
    return f"{width - 1},0" if sliding else None


def _write_window(model: ModelConfig) -> dict[str, Any]:
    if model.window is None:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "sliding_window": model.window + 1, "max_window_layers": 0}


def _qwen2(content: Json, problems: list[str]) -> dict[str, Any]:
    return _rotary(content, problems) | {"add_qkv_bias": True, "window_size": _window(content, problems)}


def _write_qwen2(model: ModelConfig) -> dict[str, Any]:
    return _write_rotary("Qwen2ForCausalLM", model) | _write_window(model)


def _qwen3(content: Json, problems: list[str]) -> dict[str, Any]:
    problems += expected(content, {"attention_bias": (False,)})
    return _rotary(content, problems) | {"qk_layernorm": True, "window_size": _window(content, problems)}


def _write_qwen3(model: ModelConfig) -> dict[str, Any]:
    return _write_rotary("Qwen3ForCausalLM", model) | _write_window(model)


def _mistral(content: Json, problems: list[str]) -> dict[str, Any]:
    width = content["sliding_window"]
    return _rotary(content, problems) | {"window_size": None if width is None else f"{width - 1},0"}


def _write_mistral(model: ModelConfig) -> dict[str, Any]:
    width = None if model.window is None else model.window + 1
    return _write_rotary("MistralForCausalLM", model) | {"sliding_window": width}


Reader = Callable[[Json, list[str]], dict[str, Any]]
FAMILIES: dict[str, tuple[Reader, Callable[[ModelConfig], dict[str, Any]]]] = {
    "gpt2": (_gpt2, _write_gpt2),
    "llama": (_llama, _write_llama),
    "qwen2": (_qwen2, _write_qwen2),
    "qwen3": (_qwen3, _write_qwen3),
    "mistral": (_mistral, _write_mistral),
    **sparse(_rotary, _write_rotary, _window, _write_window),
    **deepseek(_rotary, _write_rotary),
}
