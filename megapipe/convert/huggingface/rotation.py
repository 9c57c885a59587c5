"""Rotary positions in a config.json: base, rotated share of a head, and stretched frequencies.

transformers 5 has all in rope_parameters. Before, there were rope_theta and rope_scaling. All are
read, and both spellings are written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megapipe.config import ModelConfig
from megapipe.config.layers import layer_config
from megapipe.config.model.rotary import RotaryConfig
from megapipe.convert.huggingface.keys import LAYERS, Fields, Json, Meaning
from megapipe.convert.huggingface.layers import FULL, SLIDING
from megapipe.convert.huggingface.values import expected
from megapipe.models.attention.rope import (
    LOW,
    ORIGINAL,
    YARN_FAST,
    YARN_ORIGINAL,
    YARN_SLOW,
    growth,
)

ORIGINAL_LENGTH = "original_max_position_embeddings"
_SHARE = "partial_rotary_factor"
_STRETCHES = (
    "rotary_base",
    "rotary_percent",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rotary_scaling_factor",
    "mscale",
    "mscale_all_dim",
    *RotaryConfig.__dataclass_fields__,
)
"""Fields of ModelConfig that differ between layers with different rotations."""


@dataclass(frozen=True)
class Rotation(Meaning):
    """The config.json key rope_parameters: the rotation of queries and keys.

    The rotation is plain, or stretched for long sequences: as in Llama 3.1, by YaRN, or linearly.

    `settings` returns the settings in a config.json, and `of_settings` the fields that they mean.
    `stretched` returns the fields for stretched rotations, and `stretch` is its inverse.

    Attributes:
        base: the base that transformers assumes in this family for a missing key.
        share: the share of a head's channels that transformers rotates if no key gives it. None:
            this family has no such key, and only 1 can be converted.
        base_key: the key for the base in older files, outside of rope_parameters.
        share_key: the key for the share in older files, outside of rope_parameters.
        missing: the rope_parameters that transformers assumes if no key gives them.
        grows: whether the family's class reads llama_4_scaling_beta. With it, queries grow with
            their position.
    """

    base: float = 10000.0
    share: float | None = None
    base_key: str = "rope_theta"
    share_key: str = _SHARE
    missing: Any = None
    grows: bool = False

    def keys(self, key: str) -> Fields:
        older = {self.base_key: self.base, self.share_key: None, "rope_scaling": None}
        return {key: None, **older, ORIGINAL_LENGTH: None}

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        return self.of_settings(self.settings(content), problems)

    def of_settings(self, rope: Json, problems: list[str]) -> Fields:
        """Return the fields of ModelConfig that the rotation's settings mean.

        Args:
            rope: the settings, from `settings`.
            problems: receives a text for each setting that ModelConfig cannot express.
        """
        for name in (FULL, SLIDING):
            if name in rope:
                problems.append(
                    f"rope_parameters.{name} is an object: rotary positions are the same in all "
                    "layers here"
                )
                return {}
        fields = self._share(rope, problems)
        # transformers 4, reading a file of transformers 5, takes 10000 without a word.
        base: Any = rope["rope_theta"]
        if base is None:
            problems.append(
                f"{self.base_key} is null; it has to be the base of the rotation, as 10000"
            )
            return fields
        kind = rope.get("rope_type", rope.get("type", "default"))
        return fields | {"rotary_base": float(base)} | self.stretched(kind, rope, problems)

    def settings(self, content: Json) -> Fields:
        """Return {name in rope_parameters: value} of the rotation's settings.

        Args:
            content: the whole config.json, in which older keys count too.
        """
        # transformers 5 prefers the older rope_scaling where a file has both.
        rope = content["rope_scaling"] or content["rope_parameters"] or self.missing or {}
        found = {"rope_theta": content[self.base_key], **rope}
        if content[self.share_key] is not None:
            found.setdefault(_SHARE, content[self.share_key])
        found.setdefault(ORIGINAL_LENGTH, content["max_position_embeddings"])
        # Phi-3's key, outside of rope_parameters, wins in transformers.
        if content[ORIGINAL_LENGTH] is not None:
            found[ORIGINAL_LENGTH] = content[ORIGINAL_LENGTH]
        return found

    def _share(self, rope: Json, problems: list[str]) -> Fields:
        if self.share is None:
            problems += expected(rope, {_SHARE: (1.0, None)})
            return {}
        share = rope.get(_SHARE)
        return {"rotary_percent": float(self.share if share is None else share)}

    def stretched(self, kind: Any, rope: Json, problems: list[str]) -> Fields:
        """Return the fields of ModelConfig for stretched frequencies; {} for plain frequencies.

        Args:
            kind: the value of rope_type.
            rope: the rotation's settings, from `settings`.
            problems: receives a text for each setting that ModelConfig cannot express.
        """
        # Other rules, such as longrope or dynamic, choose by the length of a text.
        if kind == "default":
            return {}
        if kind == "linear":
            return {"rotary_seq_len_interpolation_factor": float(rope["factor"])}
        if kind == "yarn":
            # An export as another family would lose it without a word.
            if not self.grows:
                problems += expected(rope, {"llama_4_scaling_beta": (0.0, None)})
            return _yarn(rope, problems)
        if kind != "llama3":
            problems.append(f"rope_type {kind} is not default, llama3, yarn or linear")
            return {}
        expect = {"low_freq_factor": (LOW,), ORIGINAL_LENGTH: (ORIGINAL,)}
        # Indexed, not `get`: none of them may be left out.
        problems += expected({name: rope[name] for name in expect}, expect)
        return {
            "use_rope_scaling": True,
            "rope_scaling_factor": float(rope["factor"]),
            "rope_scaling_high_freq_factor": float(rope["high_freq_factor"]),
        }

    def write(self, key: str, model: ModelConfig) -> Fields:
        rope = {"rope_theta": model.rotary_base, "rope_type": "default", **self.stretch(model)}
        older: Fields = {self.base_key: model.rotary_base}
        # A class that rotates all channels by default need not say so.
        if self.share is not None and (self.share, model.rotary_percent) != (1.0, 1.0):
            rope[_SHARE] = model.rotary_percent
            older[self.share_key] = model.rotary_percent
        # DeepSeek's own program reads a factor of anything but null.
        scaled = rope["rope_type"] != "default"
        return {key: rope, **older, "rope_scaling": rope if scaled else None}

    def stretch(self, model: ModelConfig) -> Fields:
        """Return the entries of rope_parameters for stretched frequencies; {} for plain ones."""
        if model.position_embedding_type == "yarn":
            return _yarn_settings(model)
        if model.rotary_seq_len_interpolation_factor != 1:
            return {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
        if not model.use_rope_scaling:
            return {}
        return {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "low_freq_factor": LOW,
            "high_freq_factor": model.rope_scaling_high_freq_factor,
            ORIGINAL_LENGTH: ORIGINAL,
        }


@dataclass(frozen=True)
class LayerRotation(Rotation):
    """The config.json key rope_parameters with settings for each kind of layer, full or sliding.

    Attributes:
        missing_kinds: returns each layer's kind if layer_types is missing, given the config.json.
        sliding: the rotary base that transformers assumes for sliding layers; None: the base of
            full layers.
        sliding_key: the older key for that base.
    """

    missing_kinds: Callable[[Json], list[str]] | None = None
    sliding: float | None = None
    sliding_key: str = ""

    def keys(self, key: str) -> Fields:
        more = {self.sliding_key: self.sliding} if self.sliding_key else {}
        return super().keys(key) | more

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        rope = content[key] or self.missing or {}
        base = content[self.base_key]
        sliding_base = content[self.sliding_key] if self.sliding_key else base
        # The older form stretches full layers alone.
        full = {"rope_theta": base, **(rope.get(FULL) or {}), **(content["rope_scaling"] or {})}
        sliding = {"rope_theta": sliding_base, **(rope.get(SLIDING) or {})}
        for settings in (full, sliding):
            settings.setdefault(ORIGINAL_LENGTH, content["max_position_embeddings"])
        for name in rope:
            if name not in (FULL, SLIDING):
                problems.append(f"{key}.{name} is not one of {FULL} and {SLIDING}")
        assert self.missing_kinds is not None
        kinds = content["layer_types"] or self.missing_kinds(content)
        plain = {name: getattr(ModelConfig, name) for name in _STRETCHES}
        plain["position_embedding_type"] = "rope"
        by_kind = {
            FULL: plain | self.of_settings(full, problems),
            SLIDING: plain | self.of_settings(sliding, problems),
        }
        layers = [dict(by_kind.get(kind, plain)) for kind in kinds]
        return {LAYERS: layers[: content["num_hidden_layers"]]}

    def write(self, key: str, model: ModelConfig) -> Fields:
        layers = [layer_config(model, n) for n in range(model.layers)]
        full = next((x for x in layers if x.window is None), None)
        sliding = next((x for x in layers if x.window is not None), None)
        bases = (self.base, self.base if self.sliding is None else self.sliding)
        written: Fields = {key: {}}
        for kind, base, layer in zip((FULL, SLIDING), bases, (full, sliding), strict=True):
            settings: Fields = {"rope_theta": base, "rope_type": "default"}
            if layer is not None:
                settings = {**settings, "rope_theta": layer.rotary_base, **self.stretch(layer)}
            written[key][kind] = settings
        written[self.base_key] = written[key][FULL]["rope_theta"]
        if self.sliding_key:
            written[self.sliding_key] = written[key][SLIDING]["rope_theta"]
        scaled = written[key][FULL]["rope_type"] != "default"
        return written | {"rope_scaling": written[key][FULL] if scaled else None}


@dataclass(frozen=True)
class RotaryDim(Rotation):
    """The config.json key rope_parameters, with the key rotary_dim next to it.

    rotary_dim is the number of a head's rotated channels. Other families give the share of a head.
    """

    def keys(self, key: str) -> Fields:
        return super().keys(key) | {"rotary_dim": None}

    def settings(self, content: Json) -> Fields:
        found = super().settings(content)
        if content["rotary_dim"] is not None:
            head = content["head_dim"] or content["hidden_size"] // content["num_attention_heads"]
            found.setdefault(_SHARE, content["rotary_dim"] / head)
        return found

    def write(self, key: str, model: ModelConfig) -> Fields:
        channels = None
        if model.rotary_percent != 1:
            channels = int(model.head_dim * model.rotary_percent)
        return super().write(key, model) | {"rotary_dim": channels}


def _yarn(rope: Json, problems: list[str]) -> Fields:
    """Return the fields of ModelConfig that YaRN's settings mean, for plain attention.

    Latent attention has YaRN by other settings.

    Args:
        rope: the rotation's settings, by their names in rope_parameters.
        problems: receives a text for each setting that ModelConfig cannot express.
    """
    factor = rope["factor"]
    original = rope[ORIGINAL_LENGTH]
    if factor is None:
        problems.append("rope_parameters.factor is null; it has to be the factor of yarn")
        return {}
    every = rope.get("mscale_all_dim") or 0.0
    own = rope.get("mscale") or 0.0
    # transformers reads them only together.
    both = bool(every and own)
    said = rope.get("attention_factor")
    fields = {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": float(factor),
        "yarn_original_max_position_embeddings": original,
        "yarn_beta_fast": float(rope.get("beta_fast") or YARN_FAST),
        "yarn_beta_slow": float(rope.get("beta_slow") or YARN_SLOW),
        "no_yarn_correction_range_round_to_int": rope.get("truncate") is False,
        "mscale": float(own) if both else 1.0,
        "mscale_all_dim": float(every) if both else 0.0,
        "yarn_temperature_beta": float(rope.get("llama_4_scaling_beta") or 0.0),
    }
    # It wins over mscale there. The published ones are what follows from the factor.
    if said is not None and not math.isclose(said, growth(factor, 1.0), rel_tol=1e-6):
        problems.append(
            f"attention_factor is {said}; only 0.1 ln(factor) + 1 = {growth(factor, 1.0):g} "
            "can be converted"
        )
    if said is not None:
        fields |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    return fields


def _yarn_settings(model: ModelConfig) -> Fields:
    """Return the entries of rope_parameters for YaRN in plain attention."""
    found: Fields = {
        "rope_type": "yarn",
        "factor": model.rotary_scaling_factor,
        ORIGINAL_LENGTH: model.yarn_original_max_position_embeddings,
        "beta_fast": model.yarn_beta_fast,
        "beta_slow": model.yarn_beta_slow,
    }
    if model.no_yarn_correction_range_round_to_int:
        found["truncate"] = False
    if model.mscale_all_dim:
        found |= {"mscale": model.mscale, "mscale_all_dim": model.mscale_all_dim}
    if model.yarn_temperature_beta:
        found["llama_4_scaling_beta"] = model.yarn_temperature_beta
    return found


@dataclass(frozen=True)
class LatentRotation(Rotation):
    """The config.json key rope_parameters for DeepSeek's latent attention.

    The rotation is plain, or stretched for long sequences by YaRN.
    """

    def stretched(self, kind: Any, rope: Json, problems: list[str]) -> Fields:
        if kind == "default":
            return {"rope_type": "rope"}
        if kind != "yarn":
            problems.append(f"rope_type {kind} is not default or yarn")
            return {}
        expect = {
            ORIGINAL_LENGTH: (YARN_ORIGINAL,),
            "beta_fast": (YARN_FAST,),
            "beta_slow": (YARN_SLOW,),
            "truncate": (True,),
        }
        problems += expected(rope, expect)
        if rope.get("attention_factor") is not None:
            problems.append(
                "attention_factor is given; only mscale and mscale_all_dim can be converted"
            )
        every = rope.get("mscale_all_dim") or 0.0
        own = rope.get("mscale")
        if every and not own:
            problems.append("mscale_all_dim is given without mscale")
        # transformers leaves the softmax unscaled unless both are given.
        both = bool(every and own)
        return {
            "rope_type": "yarn",
            "rotary_scaling_factor": float(rope["factor"]),
            "mscale": float(own) if both else 1.0,  # type: ignore[arg-type]
            "mscale_all_dim": float(every) if both else 0.0,
        }

    def stretch(self, model: ModelConfig) -> Fields:
        if model.rope_type == "rope":
            return {}
        plain = {
            "rope_type": "yarn",
            "factor": model.rotary_scaling_factor,
            ORIGINAL_LENGTH: YARN_ORIGINAL,
            "beta_fast": YARN_FAST,
            "beta_slow": YARN_SLOW,
        }
        if not model.mscale_all_dim:
            return plain
        return plain | {"mscale": model.mscale, "mscale_all_dim": model.mscale_all_dim}
