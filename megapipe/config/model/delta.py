"""Layers with a gated delta net in place of attention (Yang et al. 2024, arXiv 2412.06464).

Its state is a matrix for each head, so that memory and time grow with the sequence's length, and
not with its square.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from megapipe.config.model.moe import frequency_of
from megapipe.config.notes import FROM_1, MUST, needs

DELTA = needs("experimental_attention_variant", "all layers have attention")


@dataclass(frozen=True)
class DeltaConfig:
    """The gated delta net. Without --experimental-attention-variant these flags do nothing."""

    experimental_attention_variant: Annotated[Literal["gated_delta_net", "gdn"] | None, MUST] = None
    """Give the layers of --linear-attention-freq a gated delta net in place of attention, as
    Qwen3-Next. gdn is another name of gated_delta_net."""
    linear_attention_freq: Annotated[str | None, MUST, DELTA] = None
    """Which layers have a gated delta net. N: all but every N-th. A list: the layers with a 1, such
    as ([1]*3+[0])*12."""
    linear_conv_kernel_dim: Annotated[int, FROM_1, MUST, DELTA] = 4
    """Tokens that the convolution before the gated delta net sees, the token's own included."""
    linear_key_head_dim: Annotated[int, FROM_1, MUST, DELTA] = 128
    """Channels of each query and key head of a gated delta net."""
    linear_value_head_dim: Annotated[int, FROM_1, MUST, DELTA] = 128
    """Channels of each value head of a gated delta net."""
    linear_num_key_heads: Annotated[int, FROM_1, MUST, DELTA] = 16
    """Query and key heads of a gated delta net."""
    linear_num_value_heads: Annotated[int, FROM_1, MUST, DELTA] = 32
    """Value heads of a gated delta net, a multiple of --linear-num-key-heads. Each has a state."""

    @property
    def has_delta(self) -> bool:
        """Return whether any layer has a gated delta net.

        In a single layer's configuration, from `layer_config`: whether this layer has one.
        """
        return self.experimental_attention_variant is not None

    def has_delta_in(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has a gated delta net.

        Raises: ValueError if --linear-attention-freq is missing or cannot be read, IndexError if
            its list is too short.
        """
        if not self.has_delta:
            return False
        frequency = frequency_of(self.linear_attention_freq or "")
        if isinstance(frequency, int):
            return (layer + 1) % frequency != 0
        return frequency[layer] == 1

    def delta_settings(self, layers: int) -> dict[str, Any]:
        """Return {field of this class: value}; {} if no layer has a gated delta net.

        Equal models give equal dicts: the variant is always gated_delta_net, never gdn, and the
        frequency always a list of 0 and 1.

        Args:
            layers: number of layers of the model.
        """
        which = [int(self.has_delta_in(layer)) for layer in range(layers)]
        if not any(which):
            return {}
        found = {name: getattr(self, name) for name in DeltaConfig.__dataclass_fields__}
        # The variant has two names, and a frequency may be given as a number or as a list.
        names = ("experimental_attention_variant", "linear_attention_freq")
        return found | dict(zip(names, ("gated_delta_net", which), strict=True))

    @property
    def delta_values(self) -> int:
        """Return the number of channels of all value heads of a gated delta net."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def delta_mixed(self) -> int:
        """Return the number of channels of all queries, keys and values of a gated delta net."""
        return 2 * self.linear_num_key_heads * self.linear_key_head_dim + self.delta_values

    @property
    def delta_rows(self) -> int:
        """Return the number of rows of a gated delta net's projection from the hidden state.

        The rows make queries, keys and values, the gates of the output, and two gates for each
        value head.
        """
        return self.delta_mixed + self.delta_values + 2 * self.linear_num_value_heads
