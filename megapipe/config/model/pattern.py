"""Layers without rotation or without a window, by a number or a list, as Megatron-LM says them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from megapipe.config.model.mla import HEADS, ROPE
from megapipe.config.model.moe import frequency_of
from megapipe.config.notes import MUST, of_no_layer
from megapipe.errors import ConfigError

WINDOWED = of_no_layer(
    lambda m: m.window_size is None, "no layer has a window, without --window-size"
)


@dataclass(frozen=True)
class PatternConfig:
    """Which layers have no rotary positions, or no attention window."""

    no_rope_freq: Annotated[str | None, MUST, ROPE, HEADS] = None
    """Layers without rotary positions. N: every N-th layer. A list: the layers with a 1, such as
    ([0]*3+[1])*8."""
    window_attn_skip_freq: Annotated[str | None, MUST, WINDOWED] = None
    """Layers that attend to all earlier tokens in spite of --window-size. N: every N-th layer. A
    list: the layers with a 0, such as ([1]*3+[0])*8."""

    @property
    def has_patterns(self) -> bool:
        """Return whether layers may differ by one of these flags."""
        return bool(self.no_rope_freq or self.window_attn_skip_freq)

    def patterns_of(self, layer: int) -> dict[str, Any]:
        """Return {field of ModelConfig: value} for fields that differ in the layer with an index.

        Raises: ConfigError for a value that is neither a number nor a list, and for a list that has
            not one entry for each layer.
        """
        found: dict[str, Any] = dict.fromkeys(PatternConfig.__dataclass_fields__)
        layers = self.num_layers  # type: ignore[attr-defined]
        unrotated = layers_of("--no-rope-freq", self.no_rope_freq, 1, layers)
        everywhere = layers_of("--window-attn-skip-freq", self.window_attn_skip_freq, 0, layers)
        if layer in unrotated:
            found["position_embedding_type"] = "none"
        if layer in everywhere:
            found["window_size"] = None
        return found


@cache
def layers_of(flag: str, text: str | None, meant: int, layers: int) -> frozenset[int]:
    """Return the indices, from 0, of the layers that a flag's value names.

    A number n names the layers n-1, 2n-1 and so on. A list has an entry 0 or 1 for each layer, and
    names the layers whose entry is `meant`.

    Args:
        flag: the flag's name, for errors.
        text: the value, a number or a list; None names no layer.
        meant: 0 or 1.
        layers: the number of layers of the model.
    Raises: ConfigError for a text that is neither, and for a list with too few or too many entries.
    """
    if text is None:
        return frozenset()
    try:
        frequency = frequency_of(text)
    except ValueError:
        raise ConfigError(
            f"{flag} {text}: an integer of at least 1, or a list with a 0 or 1 for each layer, "
            'such as "([0]*3+[1])*12" (in quotes)'
        ) from None
    if isinstance(frequency, int):
        return frozenset(range(frequency - 1, layers, frequency))
    if len(frequency) != layers:
        raise ConfigError(
            f"{flag} {text} says {len(frequency)} layers, and --num-layers {layers}. "
            "Make both agree."
        )
    return frozenset(n for n, entry in enumerate(frequency) if entry == meant)
