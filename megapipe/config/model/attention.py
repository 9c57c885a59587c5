"""Variants of attention and norms: placement, scale of scores, caps, sinks and gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megapipe.config.model.mla import HEADS
from megapipe.config.notes import ABOVE_0, FROM_0, FROM_1, MUST, demands, excludes, of_no_layer

UNROTATED = of_no_layer(
    lambda m: m.rotates or m.multi_latent_attention,
    "all layers rotate queries, without --no-rope-freq",
)
TEMPERED = of_no_layer(
    lambda m: not m.attention_temperature_beta,
    "queries do not grow, without --attention-temperature-beta",
)
PLAIN = "{} is computed in blocks of plain torch, and {} names a kernel"


@dataclass(frozen=True)
class AttentionConfig:
    """Settings of attention and norms that only some model families have."""

    norm_placement: Annotated[Literal["pre", "post", "sandwich"], MUST] = "pre"
    """Norms of a layer's halves. pre: x + f(norm(x)). post: x + norm(f(x)), as OLMo 2. sandwich:
    x + norm(f(norm(x))), as Gemma 2. Not in Megatron-LM."""
    qk_layernorm_all_heads: Annotated[bool, MUST, HEADS, demands("qk_layernorm")] = False
    """Norm all query heads of a token together, and all key heads, as OLMo 2. Not in
    Megatron-LM."""
    qk_l2_norm: Annotated[bool, MUST, HEADS, excludes("qk_layernorm")] = False
    """Divide each query and key head by its root mean square, without a weight, as Llama 4."""
    v_l2_norm: Annotated[bool, MUST, HEADS] = False
    """Divide each value head by its root mean square, without a weight, as Gemma 4. Not in
    Megatron-LM."""
    keys_as_values: Annotated[bool, MUST, HEADS] = False
    """The QKV projection makes no values. They are the keys before norm and rotation, as in layers
    of Gemma 4. Not in Megatron-LM."""
    layer_scalar: Annotated[bool, MUST] = False
    """Multiply the output of each layer by a number of the checkpoint, which no step changes, as
    Gemma 4. In a new model it is 1. Not in Megatron-LM."""
    softmax_scale: Annotated[float | None, ABOVE_0, MUST, HEADS] = None
    """Factor on attention scores. Default: 1 / sqrt(channels of a head). Not in Megatron-LM."""
    attn_logit_softcapping: Annotated[
        float | None, ABOVE_0, MUST, excludes("attention_backend", PLAIN)
    ] = None
    """Cap attention scores to c tanh(score / c) with this c, as Gemma 2. Not in Megatron-LM."""
    softmax_type: Annotated[
        Literal["vanilla", "off-by-one", "learnable"], MUST, excludes("attention_backend", PLAIN)
    ] = "vanilla"
    """Softmax of attention. off-by-one: its denominator has 1 in addition. learnable: it has e^s in
    addition, with a learned s for each head, an attention sink as in gpt-oss."""
    attention_output_gate: Annotated[bool, MUST, HEADS] = False
    """Multiply the output of attention by the sigmoid of a gate, which the QKV projection makes
    too, as Qwen3-Next."""
    attention_chunk_size: Annotated[int | None, FROM_1, MUST] = None
    """Cut each sequence, or each document that attention stays in, in chunks of this length; a
    token attends to its own chunk alone, as in layers of Llama 4. Not in Megatron-LM."""
    attention_temperature_beta: Annotated[float, FROM_0, MUST, UNROTATED] = 0.0
    """Multiply queries of layers without rotation by 1 + beta ln(1 + floor((position + 1) / n)),
    as Llama 4. --attention-temperature-length is n. Not in Megatron-LM."""
    attention_temperature_length: Annotated[int, FROM_1, MUST, UNROTATED, TEMPERED] = 8192
    """The number of tokens before such queries grow. Not in Megatron-LM."""
    final_logit_softcapping: Annotated[float | None, ABOVE_0, MUST] = None
    """Cap the logits to c tanh(logit / c) with this c, as Gemma 2. Not in Megatron-LM."""

    @property
    def projected(self) -> int:
        """Number of heads of a group that the QKV projection makes besides queries and gates."""
        return 1 if self.keys_as_values else 2

    @property
    def has_pre_norm(self) -> bool:
        """Return whether a norm precedes attention and MLP."""
        return self.norm_placement != "post"

    @property
    def has_post_norm(self) -> bool:
        """Return whether a norm follows attention and MLP."""
        return self.norm_placement != "pre"

    @property
    def needs_blocks(self) -> bool:
        """Return whether attention has a feature that torch's kernels lack.

        With such a feature attention is computed block by block in plain torch.
        """
        return self.attn_logit_softcapping is not None or self.softmax_type != "vanilla"
