"""Variants of attention and norms: placement, scale of scores, caps, sinks and gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megapipe.config.model.mla import HEADS
from megapipe.config.notes import ABOVE_0, MUST, demands, excludes

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
    final_logit_softcapping: Annotated[float | None, ABOVE_0, MUST] = None
    """Cap the logits to c tanh(logit / c) with this c, as Gemma 2. Not in Megatron-LM."""

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
