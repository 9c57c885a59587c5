"""Settings that differ between layers: lists in a config.json, --per-layer-overrides here."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megapipe.config import ModelConfig
from megapipe.config.layers import inline, layer_config, parse_overrides
from megapipe.config.model.pattern import PatternConfig
from megapipe.convert.huggingface.keys import LAYERS, Fields, Json, Meaning

FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"


def spread(layers: Sequence[Mapping[str, Any]]) -> Fields:
    """Return the fields of one ModelConfig for layers with different fields.

    A field gets the value that most layers have; among equally frequent values, the one of the last
    layer. Layers with other values are listed in per_layer_overrides, in one fixed form.

    Args:
        layers: for each layer, {field: value}. All layers have the same fields.
    """
    common: Fields = {}
    for name in layers[0]:
        # From the last layer on, as the first of equal counts wins.
        counts = Counter(layer[name] for layer in reversed(layers))
        common[name] = counts.most_common(1)[0][0]
    # Layers with equal differences share an entry, in the order of their first layers.
    others: dict[str, list[int]] = {}
    for number, layer in enumerate(layers):
        differs = {name: layer[name] for name in sorted(layer) if layer[name] != common[name]}
        if differs:
            others.setdefault(json.dumps(differs), []).append(number)
    if others:
        entries = {_ranges(numbers): json.loads(fields) for fields, numbers in others.items()}
        common[LAYERS] = json.dumps(entries)
    return common


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text with ranges: 0, 1, 2 and 4 give 0-2,4."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def canonical(model: ModelConfig) -> ModelConfig:
    """Return an equal configuration, in which differences between layers are written in one form.

    Models that differ only in how per_layer_overrides is written give the same result. Two models
    can then be compared field by field.
    """
    # A factor of 1 does nothing, and None is none.
    if model.moe_router_topk_scaling_factor == 1.0:
        model = replace(model, moe_router_topk_scaling_factor=None)
    model = inline(model)
    if model.per_layer_overrides is None and not model.has_patterns:
        return model
    # A text may say the same in many ways: in another order, or with values that change nothing.
    overrides = parse_overrides(model.per_layer_overrides or "{}", model.layers)
    names = {name for fields in overrides.values() for name in fields}
    if model.no_rope_freq:
        names.add("position_embedding_type")
    if model.window_attn_skip_freq:
        names.add("window_size")
    layers = [
        {name: getattr(layer_config(model, n), name) for name in names} for n in range(model.layers)
    ]
    patterns: dict[str, Any] = dict.fromkeys(PatternConfig.__dataclass_fields__)
    plain = replace(model, per_layer_overrides=None, **patterns)
    return replace(plain, **spread(layers)) if names else plain


def of_layers(model: ModelConfig, name: str) -> list[Any]:
    """Return a list with each layer's value of the field, or property, `name` of ModelConfig."""
    if model.per_layer_overrides is None and not model.has_patterns:
        return [getattr(model, name)] * model.layers
    return [getattr(layer_config(model, n), name) for n in range(model.layers)]


def window_of(n: int | None) -> str | None:
    """Return the value of --window-size for a window of n tokens; None for no window.

    Args:
        n: tokens that a query attends to, the query's own included; None for all earlier tokens.
    """
    return None if n is None else f"{n - 1},0"


@dataclass(frozen=True)
class Window(Meaning):
    """A config.json key with a sliding window for all layers; null is no window.

    The value counts tokens, the query's own included.

    Attributes:
        default: the value that transformers assumes in this family for a missing key.
    """

    default: int | None

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        return {"window_size": window_of(content[key])}

    def write(self, key: str, model: ModelConfig) -> Fields:
        return {key: None if model.window is None else model.window + 1}


@dataclass(frozen=True)
class SwitchedWindow(Meaning):
    """A config.json key with Qwen's sliding window, which use_sliding_window turns on.

    Attributes:
        default: the window that transformers assumes in this family for a missing key, in tokens.
        first: the value that transformers assumes there for a missing max_window_layers.
        typed: True: layer_types lists the layers with a window. If the list is missing, layers from
            max_window_layers on have one. False: all layers have one.
        stated: whether layer_types must be given if there is a window.
        switch: whether the family has the key use_sliding_window. If not, there is a window unless
            its own key is null.
    """

    default: int | None = 4096
    first: int = 28
    typed: bool = True
    stated: bool = False
    switch: bool = True

    def keys(self, key: str) -> Fields:
        more: Fields = {key: self.default, "max_window_layers": self.first, "layer_types": None}
        return more | {"use_sliding_window": False} if self.switch else more

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        width = content[key]
        # A file may keep a width while the window is off.
        if self.switch and not content["use_sliding_window"]:
            width = None
        if not self.typed or width is None:
            return {"window_size": window_of(width)}
        if self.stated and not content["layer_types"]:
            problems.append("use_sliding_window is True without layer_types to say in which layers")
        layers = content["num_hidden_layers"]
        first = min(content["max_window_layers"], layers)
        # layer_types wins over max_window_layers, as in transformers.
        kinds = content["layer_types"] or [FULL] * first + [SLIDING] * (layers - first)
        return {LAYERS: windows(kinds, width, layers, problems)}

    def write(self, key: str, model: ModelConfig) -> Fields:
        found = of_layers(model, "window")
        widths = [width for width in found if width is not None]
        # Layers with several widths are written as if they had one. Reading them again shows that.
        if not widths:
            return {"use_sliding_window": False} if self.switch else {key: None}
        first = next(layer for layer, width in enumerate(found) if width is not None)
        written = {key: widths[0] + 1, "max_window_layers": first}
        if self.switch:
            written["use_sliding_window"] = True
        if not self.typed:
            return written
        return written | {"layer_types": [kind_of(width) for width in found]}


@dataclass(frozen=True)
class LayerWindow(Meaning):
    """A config.json key with a sliding window, in the layers that layer_types names.

    Attributes:
        default: the window that transformers assumes in this family for a missing key, in tokens.
        missing: returns each layer's kind if layer_types is missing, given the whole config.json.
        more: further keys that `missing` reads, with their defaults.
        plain: True: if the model has a window, its layers without one do not rotate queries and
            keys.
    """

    default: int | None
    missing: Callable[[Json], list[str]]
    more: Mapping[str, Any] = field(default_factory=dict)
    plain: bool = False

    def keys(self, key: str) -> Fields:
        return {key: self.default, "layer_types": None, **self.more}

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        width = content[key]
        kinds = content["layer_types"] or self.missing(content)
        layers = windows(kinds, width, content["num_hidden_layers"], problems)
        if self.plain and width is not None:
            for layer in layers:
                is_full = layer["window_size"] is None
                layer["position_embedding_type"] = "none" if is_full else "rope"
        return {LAYERS: layers}

    def write(self, key: str, model: ModelConfig) -> Fields:
        found = of_layers(model, "window")
        widths = [width for width in found if width is not None]
        kinds = [kind_of(width) for width in found]
        written: Fields = {"layer_types": kinds}
        if widths:
            written[key] = widths[0] + 1
        elif self.plain and any(of_layers(model, "rotates")):
            written[key] = None
        return written


class AlwaysWindowed(LayerWindow):
    """A config.json key with a sliding window for some layers; the key may not be null."""

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        if content[key] is None:
            problems.append(f"{key} is null, with which transformers cannot compute it")
            return {}
        return super().read(key, content, problems)

    def write(self, key: str, model: ModelConfig) -> Fields:
        written = super().write(key, model)
        return {name: value for name, value in written.items() if value is not None}


class DeltaLayers(Meaning):
    """The key layer_types, with linear_attention for each layer with a gated delta net.

    If the list is missing, each n-th layer has full attention, and all others have a gated delta
    net. The key full_attention_interval gives n.
    """

    def keys(self, key: str) -> Fields:
        return {key: None, "full_attention_interval": 4}

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        layers = content["num_hidden_layers"]
        interval = content["full_attention_interval"]
        kinds = content[key]
        if kinds is None:
            kinds = [FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(layers)]
        if {*kinds} - {FULL, LINEAR} or len(kinds) != layers:
            problems.append(f"{key} is a list of {FULL} or {LINEAR} for {layers} layers")
        which = [int(kind == LINEAR) for kind in kinds]
        if not any(which):
            return {}
        return {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": _frequency(which),
        }

    def write(self, key: str, model: ModelConfig) -> Fields:
        which = map(model.has_delta_in, range(model.layers))
        return {key: [LINEAR if has else FULL for has in which]}


def _frequency(which: Sequence[int]) -> str:
    """Return the value of --linear-attention-freq for a list: [1, 1, 0, 1, 1, 0] gives "3".

    Other lists give the list as text.

    Args:
        which: 1 for each layer with a gated delta net.
    """
    for n in range(2, len(which) + 2):
        if all(has == ((layer + 1) % n != 0) for layer, has in enumerate(which)):
            return str(n)
    return str(list(which))


class RotatedLayers(Meaning):
    """A config.json key with a list: 1 for each layer that rotates queries and keys, 0 for others.

    The key's name, no_rope_layers, suggests the opposite. If the list is missing, every n-th layer
    does not rotate. The key no_rope_layer_interval gives n.
    """

    def keys(self, key: str) -> Fields:
        return {key: None, "no_rope_layer_interval": 4}

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        layers = content["num_hidden_layers"]
        interval = content["no_rope_layer_interval"]
        rotated = content[key]
        if rotated is None:
            rotated = [int((layer + 1) % interval != 0) for layer in range(layers)]
        if len(rotated) < layers or any(value not in (0, 1) for value in rotated):
            problems.append(f"{key} is a list of 0 or 1 for {layers} layers")
        kinds = ["rope" if has else "none" for has in rotated[:layers]]
        return {LAYERS: [{"position_embedding_type": kind} for kind in kinds]}

    def write(self, key: str, model: ModelConfig) -> Fields:
        rotated = [int(rotates) for rotates in of_layers(model, "rotates")]
        every = [
            n
            for n in range(1, model.layers + 1)
            if rotated == [int((layer + 1) % n != 0) for layer in range(model.layers)]
        ]
        return {key: rotated, "no_rope_layer_interval": every[0] if every else 4}


def by_pattern(content: Json) -> list[str]:
    """Return each layer's kind, as in layer_types, where every n-th layer has no window.

    Args:
        content: a config.json with n as sliding_window_pattern; null is no window in any layer.
    """
    layers = range(content["num_hidden_layers"])
    pattern = content["sliding_window_pattern"]
    if content["sliding_window"] is None or not pattern:
        return [FULL for _ in layers]
    return [FULL if (layer + 1) % pattern == 0 else SLIDING for layer in layers]


def windows(
    kinds: Sequence[Any], width: int | None, layers: int, problems: list[str]
) -> list[Fields]:
    """Return {"window_size": value} for each layer; the value is None for a layer without a window.

    Args:
        kinds: the list layer_types. Entries after the last layer are for multi-token prediction,
            and are left out.
        width: the window in tokens, the query's own included; None for no window in any layer.
        layers: the number of layers.
        problems: receives a text for each kind that is neither full nor sliding, and for too short
            a list.
    """
    others = {str(kind) for kind in kinds if kind not in (FULL, SLIDING)}
    for kind in sorted(others):
        problems.append(f"layer_types has {kind}; only {FULL} and {SLIDING} can be converted")
    if len(kinds) < layers:
        problems.append(f"layer_types has {len(kinds)} entries for {layers} layers")
    window = window_of(width)
    return [{"window_size": window if kind == SLIDING else None} for kind in kinds[:layers]]


def kind_of(window: int | None) -> str:
    """Return the entry of layer_types for a layer.

    Args:
        window: the layer's window in tokens; None for a layer without.
    """
    return FULL if window is None else SLIDING
