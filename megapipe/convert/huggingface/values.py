"""The values of a config.json: the type of each key's value, how large it may be, and those that a family must have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megapipe.config.typed import fits, shown, words

_KINDS: dict[Any, str] = {
    int: "vocab_size n_layer n_embd n_head n_positions max_window_layers num_hidden_layers hidden_size "
    "num_attention_heads intermediate_size max_position_embeddings num_local_experts num_experts num_experts_per_tok "
    "moe_intermediate_size shared_expert_intermediate_size decoder_sparse_step n_routed_experts kv_lora_rank "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim first_k_dense_replace",
    int
    | None: "q_lora_rank n_group topk_group n_inner num_key_value_heads head_dim sliding_window "
    "n_shared_experts original_max_position_embeddings",
    float: "layer_norm_epsilon rms_norm_eps attn_pdrop resid_pdrop embd_pdrop attention_dropout factor "
    "router_jitter_noise routed_scaling_factor",
    bool: "tie_word_embeddings attention_bias mlp_bias use_sliding_window norm_topk_prob qkv_bias",
    float | None: "rope_theta mscale mscale_all_dim",
    dict | None: "rope_parameters rope_scaling",
    list | None: "layer_types mlp_only_layers",
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}
_LENGTHS = (
    "vocab_size",
    "n_positions",
    "max_position_embeddings",
    "sliding_window",
    "max_window_layers",
)
_MAY_BE_0 = ("max_window_layers", "first_k_dense_replace", "n_shared_experts")
_LONGEST, _WIDEST = 2**31 - 1, 2**19


def unfit(content: Mapping[str, Any]) -> Iterator[str]:
    """A text for each value of another type, or of a size that no tensor has."""
    nested = ((key, content[key]) for key in ("rope_parameters", "rope_scaling") if key in content)
    inside = {
        f"{key}.{name}": x
        for key, held in nested
        if isinstance(held, dict)
        for name, x in held.items()
    }
    for key, value in {**content, **inside}.items():
        name = key.rpartition(".")[2]
        kind = _KIND_OF.get(name)
        unused = (
            name == "sliding_window" and content.get("use_sliding_window") is False
        )  # Qwen2-MoE writes 0 then
        least = int(name not in _MAY_BE_0 and not unused)
        most = _LONGEST if name in _LENGTHS else _WIDEST
        if kind is not None and not fits(value, kind):
            yield f"{key} is {words(kind)}, got {shown(value)}"
        elif kind in (int, int | None) and value is not None and not least <= value <= most:
            yield f"{key} is an integer from {least} to {most}, got {shown(value)}"
        elif key in inside and isinstance(value, dict):
            yield f"{key} is an object: rotary positions are the same in all layers here"


def expected(content: Mapping[str, Any], expect: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    """A text for each key whose value is none of those that can be converted. A key that is left out passes."""
    for key, allowed in expect.items():
        if key in content and content[key] not in allowed:
            yield f"{key} is {content[key]}; only {allowed[0]} can be converted"
