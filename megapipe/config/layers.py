"""Layers that differ from the rest: other widths, another kind of attention, half a layer or none of it.

The overrides are text, a JSON object from layers to changed fields of ModelConfig, so that a configuration stays one
frozen value that ranks compare and a checkpoint keeps:  {"0-2,5": {"ffn_hidden_size": 512}, "7": {"no_mlp": true}}
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
from megapipe.config.mla import MLAConfig
from megapipe.config.typed import unfit
from megapipe.errors import ConfigError

FLAG = "--per-layer-overrides"
_NAMES = (
    "ffn_hidden_size swiglu quick_geglu squared_relu num_attention_heads kv_channels group_query_attention "
    "num_query_groups qk_layernorm position_embedding_type rotary_base rotary_percent rotary_interleaved "
    "use_rope_scaling rope_scaling_factor window_size normalization norm_epsilon apply_layernorm_1p "
    "disable_bias_linear add_qkv_bias attention_dropout hidden_dropout no_attention no_mlp"
)
FIELDS = [*_NAMES.split(), *MLAConfig.__dataclass_fields__]
"""Fields that one layer may decide for itself: the residual stream between layers keeps its width."""
_LAYERS = re.compile(r"\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*")

Overrides = Mapping[int, Mapping[str, Any]]


def inline(model: ModelConfig) -> ModelConfig:
    """The model with the text of its overrides in place of the file's name.

    Raises: ConfigError if the file cannot be read.
    """
    given = model.per_layer_overrides
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
    """The model that a layer is built from.

    layer: its number in the whole model, from 0; depths of multi-token prediction go on counting, and are as the last.

    Raises: ConfigError with every problem of the overrides.
    """
    layer = min(layer, model.layers - 1)
    if model.has_experts and not model.has_experts_in(layer):
        model = replace(model, num_experts=None)
    if model.fp8_format and not model.has_fp8_in(layer, model.layers):
        model = replace(model, fp8_format=None)
    if model.per_layer_overrides is None:
        return model
    text = inline(model).per_layer_overrides
    assert text is not None
    return replace(model, **parse_overrides(text, model.layers).get(layer, {}))


@lru_cache(maxsize=8)
def parse_overrides(text: str, num_layers: int) -> Overrides:
    """Changed fields of each layer that has any; where two entries name a layer, the later one's fields win.

    Raises: ConfigError with every problem.
    """
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{FLAG} is not JSON: {error}") from None
    if not isinstance(entries, dict) or not all(isinstance(fields, dict) for fields in entries.values()):
        raise ConfigError(f'{FLAG} is an object of objects: {{"0-3,7": {{"ffn_hidden_size": 512}}}}')
    problems: list[str] = []
    found: dict[int, dict[str, Any]] = {}
    for where, fields in entries.items():
        layers = _layers(where, num_layers)
        if layers is None:
            shown = where if len(where) <= 40 else f"{where[:40]}..."
            problems.append(f'{FLAG} "{shown}": layers are 0 to {num_layers - 1}, such as "0-3,7"')
        problems += [f'{FLAG} "{where}": {line}' for name, value in fields.items() if (line := _problem(name, value))]
        for layer in layers or ():
            found[layer] = found.get(layer, {}) | fields
    if problems:
        raise ConfigError(problems)
    return found


def _layers(text: str, num_layers: int) -> list[int] | None:
    """The layers of "0-3,7"; None if that is no list of layers of this model."""
    if not _LAYERS.fullmatch(text.replace(" ", "")):
        return None
    spans = [[int(n) for n in part.split("-")] for part in text.replace(" ", "").split(",")]
    if any(span[-1] >= num_layers or span[0] > span[-1] for span in spans):
        return None
    return [layer for span in spans for layer in range(span[0], span[-1] + 1)]


def _problem(name: str, value: object) -> str | None:
    if name not in FIELDS:
        return f"{name} is not a field that one layer can change. There are {', '.join(FIELDS)}"
    return next(unfit(KINDS, {name: value}), None)
