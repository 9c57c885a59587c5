"""Google's Gemma 4: the text models whose layers share nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megapipe.config import ModelConfig
from megapipe.convert.huggingface.keys import (
    LAYERS,
    NEEDED,
    Biases,
    Fields,
    Json,
    Meaning,
    Only,
    Same,
    Unread,
)
from megapipe.convert.huggingface.layers import FULL, SLIDING, AlwaysWindowed, of_layers
from megapipe.convert.huggingface.layouts import Layout
from megapipe.convert.huggingface.rotation import LayerRotation
from megapipe.convert.huggingface.tables.gemma import GEMMA2

_PROPORTIONAL = "proportional"
_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": _PROPORTIONAL, "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def _kinds(content: Json) -> list[str]:
    """Return each layer's kind if layer_types is missing: every sixth is full, and the last one."""
    layers = content["num_hidden_layers"]
    return [FULL if (n + 1) % 6 == 0 or n == layers - 1 else SLIDING for n in range(layers)]


class _Heads(Meaning):
    """The key head_dim, and other keys of heads, which full layers may have of their own.

    per_layer_config says them by the number of a layer. Older files say them once for all full
    layers, by global_head_dim and num_global_key_value_heads.
    """

    def keys(self, key: str) -> Fields:
        return {
            key: 256,
            "num_key_value_heads": 4,
            "per_layer_config": None,
            "global_head_dim": 512,
            "num_global_key_value_heads": None,
            "attention_k_eq_v": False,
        }

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        kinds = content["layer_types"] or _kinds(content)
        if len(kinds) < content["num_hidden_layers"]:
            problems.append("layer_types has fewer entries than there are layers")
            return {}
        if kinds[-1] != FULL:
            problems.append(f"the last layer's layer_types is {kinds[-1]}; only {FULL} is computed")
        shares = content["attention_k_eq_v"]
        of_full = {key: content["global_head_dim"]}
        if shares and content["num_global_key_value_heads"] is not None:
            of_full["num_key_value_heads"] = content["num_global_key_value_heads"]
        own = content["per_layer_config"]
        if own is None:
            own = {n: of_full for n, kind in enumerate(kinds) if kind == FULL}
        # Numbers are text in a file, with zeros before them.
        if not all(str(number).isdecimal() and type(said) is dict for number, said in own.items()):
            problems.append(f"per_layer_config is {own}; it has heads by the number of a layer")
            return {}
        own = {int(number): said for number, said in own.items()}
        heads = content["num_attention_heads"]
        layers = []
        for number in range(content["num_hidden_layers"]):
            said = {name: content[name] for name in (key, "num_key_value_heads")}
            said |= own.get(number, {})
            if len(said) > 2 or not all(type(n) is int and n > 0 for n in said.values()):
                problems.append(
                    f"per_layer_config.{number} is {said}; it has the two kinds of heads"
                )
                return {}
            groups = said["num_key_value_heads"]
            layers.append(
                {
                    "kv_channels": said[key],
                    "group_query_attention": groups != heads,
                    "num_query_groups": 1 if groups == heads else groups,
                    "keys_as_values": bool(shares and kinds[number] == FULL),
                }
            )
        return {LAYERS: layers}

    def write(self, key: str, model: ModelConfig) -> Fields:
        windows = of_layers(model, "window")
        widths = of_layers(model, "head_dim")
        groups = of_layers(model, "query_groups")
        # A layer with a window, if there is one, has the heads that are said for all.
        usual = next((n for n, window in enumerate(windows) if window is not None), 0)
        full = [number for number, window in enumerate(windows) if window is None]
        own: Fields = {}
        for number in full:
            # All numbers have the digits of the last one.
            heads = {key: widths[number]}
            if groups[number] != groups[usual]:
                heads["num_key_value_heads"] = groups[number]
            own[str(number).zfill(len(str(full[-1])))] = heads
        return {
            key: widths[usual],
            "num_key_value_heads": groups[usual],
            "per_layer_config": own,
            "attention_k_eq_v": any(of_layers(model, "keys_as_values")),
        }


@dataclass(frozen=True)
class _Rotation(LayerRotation):
    """The key rope_parameters. A proportional rotation leaves the slowest pairs of a head out."""

    def of_settings(self, rope: Json, problems: list[str]) -> Fields:
        if rope.get("rope_type") != _PROPORTIONAL:
            return super().of_settings(rope, problems)
        if rope.get("factor", 1.0) != 1.0:
            problems.append("rope_parameters.factor is given, and nothing here divides by it")
        share = float(rope.get("partial_rotary_factor", 1.0))
        fields = {"rotary_base": float(rope["rope_theta"]), "rotary_percent": share}
        return fields | {"rotary_proportional": share != 1}

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        # transformers reads no older keys in this family.
        newer = {**content, self.base_key: self.base, "rope_scaling": None}
        return super().read(key, newer, problems)

    def write(self, key: str, model: ModelConfig) -> Fields:
        return {key: super().write(key, model)[key]}

    def stretch(self, model: ModelConfig) -> Fields:
        if not model.rotary_proportional:
            return super().stretch(model)
        return {"rope_type": _PROPORTIONAL, "partial_rotary_factor": model.rotary_percent}


class _Lacking(Only):
    """A key whose other values ask for a feature that models here do not have.

    Args:
        value: the only value that can be converted.
        what: the feature, for the error.
        default: the value that transformers assumes for a missing key.
    """

    def __init__(self, value: Any, what: str, default: Any = NEEDED) -> None:
        super().__init__(value, default=default)
        self.what = what

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        if content[key] != self.values[0]:
            problems.append(f"{key} is {content[key]}, and there is nothing here for {self.what}")
        return {}


# 2026. Norms hold their whole weights again, and scores are not scaled. Full layers have heads of
# another width, whose values are their keys before norm and rotation.
_REMOVED = "num_key_value_heads attn_logit_softcapping query_pre_attn_scalar attention_bias"
_LARGE = GEMMA2.but(
    "",
    "",
    keys={
        **dict.fromkeys(_REMOVED.split()),
        "num_nextn_predict_layers": None,
        "head_dim": _Heads(),
        "rope_parameters": _Rotation(missing=_ROPE, missing_kinds=_kinds),
        "attention_bias": Biases(False),
        "final_logit_softcapping": Same("final_logit_softcapping", None),
        "sliding_window": AlwaysWindowed(512, _kinds),
        # Only pictures' tokens see later ones of the same picture.
        "use_bidirectional_attention": Only(None, "vision", silent=True),
        # Of E2B and E4B.
        "hidden_size_per_layer_input": _Lacking(0, "an input of each layer by itself", 256),
        "num_kv_shared_layers": _Lacking(0, "layers that share keys and values"),
        "use_double_wide_mlp": Only(False),
        "vocab_size_per_layer_input": Unread(262144),
    },
    always={
        "apply_layernorm_1p": None,
        "qk_layernorm": True,
        "v_l2_norm": True,
        "softmax_scale": 1.0,
        "layer_scalar": True,
    },
    names={"layer_scalar": Layout("layer_scalar")},
)

GEMMA4 = _LARGE.but(
    "Gemma4ForCausalLM",
    "the text model of 31B, of files of gemma4 too",
    keys={
        # Of 26B-A4B.
        "enable_moe_block": _Lacking(False, "MLP and experts in one layer, with own norms"),
        **dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size"), Unread()),
    },
)
