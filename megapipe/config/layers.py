"""Layers that differ from the rest: other widths, other attention, or a half layer.

The overrides are text, a JSON object from layers to changed fields of ModelConfig. A configuration
thus stays one frozen value, which ranks compare and a checkpoint keeps:

    {"0-2,5": {"ffn_hidden_size": 512}, "7": {"no_mlp": true}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from megapipe.config import KINDS, ModelConfig
from megapipe.config.model.mla import MLAConfig
from megapipe.config.model.rotary import RotaryConfig
from megapipe.config.typed import unfit
from megapipe.errors import ConfigError

FLAG = "--per-layer-overrides"
_NAMES = (
    "ffn_hidden_size swiglu quick_geglu geglu squared_relu xielu activation_func_clamp_value "
    "glu_linear_offset num_attention_heads kv_channels "
    "group_query_attention num_query_groups qk_layernorm position_embedding_type rotary_base "
    "rotary_percent rotary_interleaved use_rope_scaling rope_scaling_factor window_size "
    "normalization norm_epsilon apply_layernorm_1p disable_bias_linear add_qkv_bias "
    "attention_dropout hidden_dropout parallel_attention_mlp no_norm_bias no_attention no_mlp "
    "norm_placement softmax_scale attn_logit_softcapping qk_layernorm_all_heads qk_l2_norm "
    "softmax_type attention_output_gate attention_chunk_size v_l2_norm "
    "keys_as_values layer_scalar"
)
FIELDS = [*_NAMES.split(), *MLAConfig.__dataclass_fields__, *RotaryConfig.__dataclass_fields__]
"""Fields that a layer may change. The hidden state's width is the same for all layers."""
# Nine digits: int() refuses more than 4300 in words of its own.
_LAYERS = re.compile(r"\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*")

Overrides = Mapping[int, Mapping[str, Any]]


def inline(model: ModelConfig) -> ModelConfig:
    """Return the model with the text of --per-layer-overrides in place of a file's name.

    Raises: ConfigError if the file cannot be read.
    """
    given = model.per_layer_overrides
    # The text of a JSON object begins so, and no sensible file name does.
    if given is None or given.lstrip().startswith("{"):
        return model
    try:
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{FLAG} {given}: {error}. Give a JSON file, or the object itself, such as "
            """'{"0-3": {"ffn_hidden_size": 512}}'"""
        ) from None
    return replace(model, per_layer_overrides=text)


def layer_config(model: ModelConfig, layer: int) -> ModelConfig:
    """Return the configuration that a layer is built from.

    Args:
        layer: the layer's index in the whole model, from 0. An index of num_layers or more is a
            module of multi-token prediction, and gives the configuration of the last layer.

    Raises: ConfigError with every problem of the overrides.
    """
    layer = min(layer, model.layers - 1)
    # The layer's configuration answers all questions about it, so that nobody has to ask for its
    # number again.
    if model.has_experts and not model.has_experts_in(layer):
        model = replace(model, num_experts=None)
    if model.has_delta and not model.has_delta_in(layer):
        model = replace(model, experimental_attention_variant=None)
    if model.fp8_format and not model.has_fp8_in(layer, model.layers):
        model = replace(model, fp8_format=None)
    if model.has_patterns:
        model = replace(model, **model.patterns_of(layer))
    if model.per_layer_overrides is None:
        return model
    text = inline(model).per_layer_overrides
    assert text is not None
    return replace(model, **parse_overrides(text, model.layers).get(layer, {}))


# Asked for every layer, in checks, plan and model.
@lru_cache(maxsize=8)
def parse_overrides(text: str, num_layers: int) -> Overrides:
    """Return, for each layer's index, {field: value} as --per-layer-overrides gives them.

    The entry "0-3,7": {"ffn_hidden_size": 512} is for layers 0 to 3 and 7. If several entries list
    a layer, the last one with a field gives its value.

    Args:
        text: the flag's value, or the content of its file.
        num_layers: layers of the whole model.
    Raises: ConfigError with every problem.
    """
    try:
        entries = json.loads(text)
    # json recurses, so thousands of brackets end in a RecursionError.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{FLAG} is not JSON: {error}") from None
    if not isinstance(entries, dict) or not all(isinstance(x, dict) for x in entries.values()):
        raise ConfigError(
            f'{FLAG} is an object of objects: {{"0-3,7": {{"ffn_hidden_size": 512}}}}'
        )
    problems: list[str] = []
    found: dict[int, dict[str, Any]] = {}
    for where, fields in entries.items():
        layers = _layers(where, num_layers)
        if layers is None:
            shown = where if len(where) <= 40 else f"{where[:40]}..."
            problems.append(f'{FLAG} "{shown}": layers are 0 to {num_layers - 1}, such as "0-3,7"')
        for name, value in fields.items():
            if line := _problem(name, value):
                problems.append(f'{FLAG} "{where}": {line}')
        for layer in layers or ():
            found[layer] = found.get(layer, {}) | fields
    if problems:
        raise ConfigError(problems)
    return found


def _layers(text: str, num_layers: int) -> list[int] | None:
    """Return the layers that a text such as "0-3,7" lists; None if it is no such list.

    Args:
        text: the text.
        num_layers: the number of layers; their numbers are 0 to num_layers - 1.
    """
    text = text.replace(" ", "")
    if not _LAYERS.fullmatch(text):
        return None
    found: list[int] = []
    for part in text.split(","):
        ends = [int(n) for n in part.split("-")]
        if ends[-1] >= num_layers or ends[0] > ends[-1]:
            return None
        found += range(ends[0], ends[-1] + 1)
    return found


def _problem(name: str, value: object) -> str | None:
    """Return the error for a value of a field in --per-layer-overrides, None if it is right."""
    if name not in FIELDS:
        return f"{name} is not a field that one layer can change. There are {', '.join(FIELDS)}"
    return next(unfit(KINDS, {name: value}), None)
