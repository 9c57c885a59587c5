"""The residual stream of a model: factors on it, the order of its halves, and biases by matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megapipe.config.notes import ABOVE_0, MUST, excludes, of_no_layer

Matrix = Literal["proj", "fc1", "fc2", "router", "head"]
"""A weight matrix by Megatron-LM's name: the projection out of attention, both layers of an MLP or
expert, the router of experts, and the output head."""


@dataclass(frozen=True)
class StreamConfig:
    """Variants of some model families: of residual stream, layers and biases. Default: none."""

    mup_embedding_mult: Annotated[float, ABOVE_0, MUST] = 1.0
    """Factor on the embeddings. Unlike in Megatron-LM it acts without --use-mup."""
    residual_multiplier: Annotated[float, ABOVE_0, MUST] = 1.0
    """Factor on the output of attention and of the MLP, before it is added to the residual stream.
    Not in Megatron-LM."""
    mup_output_mult: Annotated[float, ABOVE_0, MUST] = 1.0
    """Factor on the input of the output head, and so on the logits. Unlike in Megatron-LM it acts
    without --use-mup."""
    parallel_attention_mlp: Annotated[
        Literal["one_norm", "two_norms"] | None,
        MUST,
        excludes(
            "norm_placement",
            "{} has norms before its halves alone, unlike {}",
            where=lambda c: not c.model.has_pre_norm or c.model.has_post_norm,
        ),
    ] = None
    """Let attention and MLP read the same residual stream, each through a norm of its own or both
    through one norm. Default: the MLP follows attention. Not in Megatron-LM."""
    no_norm_bias: Annotated[
        bool,
        MUST,
        of_no_layer(
            lambda m: m.normalization != "LayerNorm",
            "RMSNorm has no bias, with --normalization RMSNorm",
        ),
    ] = False
    """Leave the bias out of LayerNorm. Not in Megatron-LM."""
    add_bias_to: Annotated[
        tuple[Matrix, ...],
        MUST,
        excludes(
            "cross_entropy_loss_fusion vocab_parallel_pipeline mtp_num_layers",
            "{} and {} do not go together: the head's bias is added to whole logits of the model",
            where=lambda c: "head" in c.model.add_bias_to,
        ),
    ] = ()
    """Matrices with a bias under --disable-bias-linear. head, the output head, has one only so.
    Not in Megatron-LM."""
