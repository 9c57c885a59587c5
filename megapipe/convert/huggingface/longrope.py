"""Rotary positions of Phi-3 in a config.json: a divisor for each frequency (Ding et al. 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megapipe.config import ModelConfig
from megapipe.convert.huggingface.keys import Fields, Json
from megapipe.convert.huggingface.rotation import ORIGINAL_LENGTH, Rotation
from megapipe.models.attention.rope import YARN_ORIGINAL


@dataclass(frozen=True)
class LongRope(Rotation):
    """The config.json key rope_parameters of Phi-3: plain, or longrope's lists of divisors."""

    def keys(self, key: str) -> Fields:
        # The class's own length wins over the one in rope_parameters.
        return super().keys(key) | {ORIGINAL_LENGTH: YARN_ORIGINAL}

    def settings(self, content: Json) -> Fields:
        found = super().settings(content)
        factor = found.get("factor")
        if factor is None:
            factor = content["max_position_embeddings"] / found[ORIGINAL_LENGTH]
        return found | {"factor": factor}

    def stretched(self, kind: Any, rope: Json, problems: list[str]) -> Fields:
        if kind == "default":
            return {}
        # Both are older names of longrope in Phi-3's files.
        if kind not in ("longrope", "su", "yarn"):
            problems.append(f"rope_type {kind} is not default or longrope")
            return {}
        length = rope.get("attention_factor")
        if length is None:
            length = _longrope_growth(rope["factor"], rope[ORIGINAL_LENGTH])
        return {
            "position_embedding_type": "longrope",
            "longrope_short_factor": tuple(map(float, rope["short_factor"])),
            "longrope_long_factor": tuple(map(float, rope["long_factor"])),
            "longrope_original_max_position_embeddings": rope[ORIGINAL_LENGTH],
            "longrope_attention_factor": float(length),
        }

    def write(self, key: str, model: ModelConfig) -> Fields:
        original = model.longrope_original_max_position_embeddings
        return super().write(key, model) | {ORIGINAL_LENGTH: original}

    def stretch(self, model: ModelConfig) -> Fields:
        if model.position_embedding_type != "longrope":
            return {}
        original = model.longrope_original_max_position_embeddings
        found = {
            "rope_type": "longrope",
            "short_factor": list(model.longrope_short_factor),
            "long_factor": list(model.longrope_long_factor),
            ORIGINAL_LENGTH: original,
        }
        length = model.longrope_attention_factor
        longest = model.max_position_embeddings or original
        if not math.isclose(length, _longrope_growth(longest / original, original), rel_tol=1e-9):
            found["attention_factor"] = length
        return found


def _longrope_growth(factor: float, original: int) -> float:
    """Return longrope's default for attention_factor, which multiplies queries and keys.

    Args:
        factor: how many times longer the context has become.
        original: the length of the context before.
    """
    if factor <= 1 or original <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original))
