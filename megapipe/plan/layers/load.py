"""The load of a layer: a microbatch's tokens on one rank, and the ranks that share the layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from megapipe.config import ModelConfig


class Gathers(NamedTuple):
    """The data-parallel ranks that gather weights from each other in eight bits.

    Attributes:
        dense: number of ranks with shards of a dense layer's weights; 1 if each rank has all
            weights.
        experts: number of ranks with shards of an expert's weights; 1 if each rank has all weights.
        drops: whether gathered weights are freed after each run of passes that use them.
    """

    dense: int = 1
    experts: int = 1
    drops: bool = False


NOT_GATHERED = Gathers()


@dataclass(frozen=True)
class RankLoad:
    """The load of one rank: a microbatch's tokens on it, and the ranks that split a layer with it.

    The methods turn numbers of channels into FLOPs and bytes: `scores` and `sliced` for attention,
    `saved` and `bytes` for activations.

    Attributes:
        seq: number of tokens in a whole sequence.
        tokens: number of the microbatch's tokens on this context-parallel rank.
        tp: number of tensor-parallel ranks.
        shared: number of ranks over which sequence parallelism splits the hidden states; 1 without
            it.
        element: bytes of an element of an activation.
        meets: whether keys arrive from other context-parallel ranks. Attention is then computed
            block by block.
        ep: number of expert-parallel ranks.
        etp: number of ranks that split each expert.
        modules: names of modules whose activations may be copied to the host.
        gathers: numbers of data-parallel ranks that gather weights from each other in eight bits.
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

    def scores(self, channels: int, model: ModelConfig) -> float:
        """Return the FLOPs of one matrix product of causal attention over all heads.

        Attention has two products: queries with keys, and probabilities with values.

        Args:
            channels: the number of channels of all heads together.
            model: the layer's configuration, which may have a window or chunks.
        """
        seq = min(self.seq, model.attention_chunk_size or self.seq)
        reach = seq
        if model.window is not None:
            reach = min(seq, model.window + 1)
        # A token early in the sequence has fewer than `reach` tokens before it: the area of a
        # triangle is missing.
        return 2.0 * self.tokens * channels * (reach - reach * reach / 2 / seq)

    def sliced(
        self, scores: float, again: float, channels: int, model: ModelConfig
    ) -> dict[str, Any]:
        """Return the fields "scores_f", "scores_b" and "keys" of `Work` as {field: value}.

        These fields price slices of the sequence: later slices attend to more tokens, so they cost
        more.

        Args:
            scores: FLOPs of attention's products in forward.
            again: the FLOPs of attention's products in backward, as a multiple of `scores`.
            channels: the number of channels of all keys and values together.
            model: the layer's configuration, which may have a window or chunks.
        """
        growing = scores
        # Within a window all tokens attend to equally many, so later slices cost no more.
        window = model.window
        chunked = (model.attention_chunk_size or self.seq) < self.seq
        if chunked or (window is not None and window < self.seq - 1):
            growing = 0.0
        return {
            "scores_f": growing,
            "scores_b": again * growing,
            "keys": self.bytes(0, channels),
        }

    def saved(self, *parts: tuple[float, str]) -> dict[str, Any]:
        """Return the fields "held" and "copied" of `Work` as {field: bytes}, for kept activations.

        Args:
            parts: each is (bytes, names of the modules that keep these bytes). The names are
                separated by spaces. "held" counts all bytes, and "copied" only bytes that may be
                offloaded.
        """
        held = sum(size for size, _ in parts)
        chosen = set(self.modules)
        copied = sum(size for size, names in parts if not chosen.isdisjoint(names.split()))
        return {"held": held, "copied": copied}

    def bytes(self, between: float, inside: float, masked: float = 0) -> float:
        """Return the bytes of activations on a rank.

        Args:
            between: number of elements kept for a token outside of linear layers and heads, such as
                a norm's input. Sequence parallelism splits them.
            inside: number of elements kept for a token within linear layers and heads. Tensor
                parallelism splits them.
            masked: number of a token's elements with a dropout mask. Only the mask is counted here,
                one byte each.
        """
        outside = (self.element * between + masked) / self.shared
        return self.tokens * (outside + self.element * inside / self.tp)


def around(model: ModelConfig, load: RankLoad) -> list[tuple[float, str]]:
    """Return [(bytes, module)] for what attention's norms, its input and its dropout keep.

    The module is a name of --offload-modules; "" for bytes that belong to none. `load` has a rank's
    tokens, and the ranks that split the layer.
    """
    h = model.hidden
    # The norm's result can be recomputed. Without a norm before attention its input is the
    # residual stream itself.
    read = not (model.has_pre_norm and model.recompute_norms)
    return [
        (load.bytes(h * model.has_post_norm, 0, h * bool(model.hidden_dropout)), ""),
        (load.bytes(h * model.has_pre_norm, 0), "attn_norm"),
        (load.bytes(h * read, 0), "qkv_linear"),
    ]


def norms_of_half(model: ModelConfig) -> int:
    """Return the number of norms around attention: 1 or 2. An MLP has as many."""
    return model.has_pre_norm + model.has_post_norm


def norm_size(model: ModelConfig, size: int) -> int:
    """Return the number of parameters of a norm over `size` features."""
    # LayerNorm has a bias in addition to its weight; RMSNorm has none.
    has_bias = model.normalization == "LayerNorm" and not model.no_norm_bias
    return size * (1 + has_bias)
