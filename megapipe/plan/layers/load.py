"""The load of a layer: a microbatch's tokens on one rank, and the ranks that share the layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from megapipe.config import ModelConfig


class Gathers(NamedTuple):
    """The numbers of data-parallel ranks that gather weights from each other in eight bits.

    Attributes:
        dense: ranks with shards of a dense layer's weights; 1 if each has them all.
        experts: ranks with shards of an expert's weights; 1 if each has them all.
        drops: gathered weights are freed each time that consecutive passes have used them.
    """

    dense: int = 1
    experts: int = 1
    drops: bool = False


NOT_GATHERED = Gathers()


@dataclass(frozen=True)
class Load:
    """A microbatch's tokens on one rank, and the ranks that split a layer.

    The methods turn numbers of channels into FLOPs and bytes.

    Attributes:
        seq: tokens of a whole sequence.
        tokens: tokens of the microbatch on this context-parallel rank.
        tp: tensor-parallel ranks.
        shared: ranks that split the hidden states between linear layers; 1 without sequence
            parallelism.
        element: bytes of an element of an activation.
        meets: attention goes block by block, because keys arrive from context-parallel ranks.
        ep: ranks of expert parallelism.
        etp: ranks that split each expert.
        modules: names of modules whose activations may be copied to the host.
        gathers: ranks that gather weights in eight bits.
    """

    seq: int
    tokens: int
    tp: int
    shared: int
    element: int
    meets: bool
    ep: int = 1
    etp: int = 1
    modules: tuple[str, ...] = ()
    gathers: Gathers = NOT_GATHERED

    def scores(self, channels: int, window: int | None) -> float:
        """Return the FLOPs of one matrix product of causal attention.

        Attention has two: queries with keys, and probabilities with values.

        Args:
            channels: the number of channels of all heads together.
            window: tokens before itself that a token attends to; None for all.
        """
        reach = self.seq
        if window is not None:
            reach = min(self.seq, window + 1)
        # A token early in the sequence has fewer than `reach` tokens before it: the area of a
        # triangle is missing.
        return 2.0 * self.tokens * channels * (reach - reach * reach / 2 / self.seq)

    def sliced(
        self, scores: float, again: float, channels: int, window: int | None
    ) -> dict[str, Any]:
        """Return the fields scores_f, scores_b and keys of Work: they make later slices dearer.

        A slice is a part of a microbatch's sequences. Later slices attend to more tokens.

        Args:
            scores: FLOPs of attention's products in forward.
            again: the FLOPs of attention's products in backward, as a multiple of `scores`.
            channels: the number of channels of all keys and values together.
            window: tokens before itself that a token attends to; None for all.
        """
        growing = scores
        # Within a window all tokens attend to equally many, so later slices cost no more.
        if window is not None and window < self.seq - 1:
            growing = 0.0
        return {
            "scores_f": growing,
            "scores_b": again * growing,
            "keys": self.bytes(0, channels),
        }

    def saved(self, *parts: tuple[float, str]) -> dict[str, Any]:
        """Return the fields `held` and `copied` of Work: bytes of activations until backward.

        Args:
            parts: (bytes, names of the modules that save them, separated by spaces).
        """
        held = sum(size for size, _ in parts)
        chosen = set(self.modules)
        copied = sum(size for size, names in parts if not chosen.isdisjoint(names.split()))
        return {"held": held, "copied": copied}

    def bytes(self, between: float, inside: float, masked: float = 0) -> float:
        """Return the bytes of activations on a rank.

        Args:
            between: features between linear layers, which sequence parallelism splits.
            inside: features within linear layers and heads, which tensor parallelism splits.
            masked: features between linear layers that also have a dropout mask, a byte each.
        """
        outside = (self.element * between + masked) / self.shared
        return self.tokens * (outside + self.element * inside / self.tp)


def norms_of_half(model: ModelConfig) -> int:
    """Return the number of norms around attention, and around an MLP: 1 or 2."""
    return model.has_pre_norm + model.has_post_norm


def norm_size(model: ModelConfig, size: int) -> int:
    """Return the number of parameters of a norm over `size` features."""
    # LayerNorm has a bias in addition to its weight; RMSNorm has none.
    has_bias = model.normalization == "LayerNorm" and not model.no_norm_bias
    return size * (1 + has_bias)
