"""Rotary positions in a config.json: base, rotated share of a head, and stretched frequencies.

transformers 5 has all in rope_parameters. Before, there were rope_theta and rope_scaling. All are
read, and both spellings are written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megapipe.config import ModelConfig
from megapipe.convert.huggingface.keys import Fields, Json, Meaning
from megapipe.convert.huggingface.values import expected
from megapipe.models.attention.rope import (
    HIGH,
    LOW,
    ORIGINAL,
    YARN_FAST,
    YARN_ORIGINAL,
    YARN_SLOW,
)

_ORIGINAL = "original_max_position_embeddings"
_SHARE = "partial_rotary_factor"


@dataclass(frozen=True)
class Rotation(Meaning):
    """The meaning of rope_parameters: the rotation of queries and keys.

    It is plain, or stretched for long sequences as in Llama 3.1.

    Attributes:
        base: the base of a missing key in the family's class.
        share: the rotated share of a head's channels there, if no key gives it. None: the class has
            no such key, and only 1 can be converted.
        base_key: the older key for the base.
        share_key: the older key for the share.
        missing: the class's rope_parameters if no key gives them.
    """

    base: float = 10000.0
    share: float | None = None
    base_key: str = "rope_theta"
    share_key: str = _SHARE
    missing: Any = None

    def keys(self, key: str) -> Fields:
        older = {self.base_key: self.base, self.share_key: None, "rope_scaling": None}
        return {key: None, **older, _ORIGINAL: None}

    def read(self, key: str, content: Json, problems: list[str]) -> Fields:
        rope = self.settings(content)
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
        """Return the settings of the rotation by the names that rope_parameters has for them.

        Args:
            content: the whole config.json, whose older keys are considered.
        """
        # transformers 5 prefers the older rope_scaling where a file has both.
        rope = content["rope_scaling"] or content["rope_parameters"] or self.missing or {}
        found = {"rope_theta": content[self.base_key], **rope}
        if content[self.share_key] is not None:
            found.setdefault(_SHARE, content[self.share_key])
        found.setdefault(_ORIGINAL, content["max_position_embeddings"])
        # Phi-3's key, outside of rope_parameters, wins in transformers.
        if content[_ORIGINAL] is not None:
            found[_ORIGINAL] = content[_ORIGINAL]
        return found

    def _share(self, rope: Json, problems: list[str]) -> Fields:
        if self.share is None:
            problems += expected(rope, {_SHARE: (1.0, None)})
            return {}
        share = rope.get(_SHARE)
        return {"rotary_percent": float(self.share if share is None else share)}

    def stretched(self, kind: Any, rope: Json, problems: list[str]) -> Fields:
        """Return the fields of ModelConfig for stretched frequencies; none for plain ones.

        Args:
            kind: the value of rope_type.
            rope: the rotation's settings, from `settings`.
            problems: receives a text for each setting that ModelConfig cannot express.
        """
        # Other rules, such as longrope or dynamic, choose by the length of a text.
        if kind == "default":
            return {}
        if kind != "llama3":
            problems.append(f"rope_type {kind} is not default or llama3")
            return {}
        expect = {
            "low_freq_factor": (LOW,),
            "high_freq_factor": (HIGH,),
            _ORIGINAL: (ORIGINAL,),
        }
        # Indexed, not `get`: none of them may be left out.
        problems += expected({name: rope[name] for name in expect}, expect)
        return {
            "use_rope_scaling": True,
            "rope_scaling_factor": float(rope["factor"]),
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
        """Return the entries of rope_parameters for stretched frequencies; none for plain ones."""
        if not model.use_rope_scaling:
            return {}
        return {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "low_freq_factor": LOW,
            "high_freq_factor": HIGH,
            _ORIGINAL: ORIGINAL,
        }


@dataclass(frozen=True)
class LatentRotation(Rotation):
    """The meaning of rope_parameters for DeepSeek's latent attention.

    The rotation is plain, or stretched for long sequences by YaRN.
    """

    def stretched(self, kind: Any, rope: Json, problems: list[str]) -> Fields:
        if kind == "default":
            return {"rope_type": "rope"}
        if kind != "yarn":
            problems.append(f"rope_type {kind} is not default or yarn")
            return {}
        expect = {
            _ORIGINAL: (YARN_ORIGINAL,),
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
            _ORIGINAL: YARN_ORIGINAL,
            "beta_fast": YARN_FAST,
            "beta_slow": YARN_SLOW,
        }
        if not model.mscale_all_dim:
            return plain
        return plain | {"mscale": model.mscale, "mscale_all_dim": model.mscale_all_dim}
