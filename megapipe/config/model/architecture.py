"""The architecture of a model, its initial weights, and who computes its layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from megapipe.config.model.activation import ActivationConfig
from megapipe.config.model.mla import HEADS, PLAIN_ROPE, ROPE, STRETCHED
from megapipe.config.notes import (
    ABOVE_0,
    BELOW_1,
    FREE,
    FROM_0,
    FROM_1,
    LISTED,
    MUST,
    NAMED,
    UP_TO_1,
    Idle,
    Required,
    demands,
    needs,
    of_no_layer,
)


@dataclass(frozen=True)
class ArchitectureConfig(ActivationConfig):
    """The settings of every GPT, and the implementation of its layers."""

    # Widths and heads.
    # MUST on --load: with other sizes a checkpoint's weights are not this model's.
    num_layers: Annotated[int | None, Required("12"), LISTED, MUST] = None
    """Number of transformer layers. Required."""
    hidden_size: Annotated[int | None, Required("768"), FROM_1, MUST] = None
    """Width of the hidden state between layers. Required."""
    ffn_hidden_size: Annotated[int | None, FROM_1, MUST] = None
    """Width of the MLP; with a gate, such as --swiglu's, of each half. Default: 4 x --hidden-size,
    with --swiglu 4 x hidden x 2/3 rounded down to a multiple of 64."""
    num_attention_heads: Annotated[int | None, Required("12"), LISTED, MUST] = None
    """Number of query heads. Required. The tensor-parallel size must divide it."""
    kv_channels: Annotated[int | None, FROM_1, MUST, HEADS] = None
    """Channels of each attention head. Default: --hidden-size / --num-attention-heads."""
    group_query_attention: Annotated[bool, MUST] = False
    """Let groups of query heads share a key and a value head; --num-query-groups says how many."""
    num_query_groups: Annotated[
        int,
        LISTED,
        MUST,
        of_no_layer(
            lambda m: not m.group_query_attention,
            "each query head has its own key and value, without --group-query-attention",
        ),
    ] = 1
    """Number of key and value heads, with --group-query-attention."""
    # Positions, and the tokens that a token attends to.
    max_position_embeddings: Annotated[int | None, Required("1024"), FROM_1, MUST] = None
    """Largest sequence length: rows of the learned position table, and limit of rotary positions.
    Required, at least --seq-length."""
    position_embedding_type: Annotated[
        Literal["learned_absolute", "rope", "yarn", "longrope", "none"], MUST
    ] = "learned_absolute"
    """How the model sees positions. learned_absolute: a table that is added to the embedding.
    rope: rotary embedding of queries and keys. yarn: the same, stretched by
    --rotary-scaling-factor (Peng et al. 2023). longrope: the same, with a divisor for each
    frequency (--longrope-short-factor). none: not at all."""
    rotary_base: Annotated[float, ABOVE_0, MUST, ROPE] = 10000.0
    """Base of the rotary frequencies."""
    rotary_percent: Annotated[float, UP_TO_1, MUST, ROPE, STRETCHED] = 1.0
    """Fraction of each head's channels that is rotated, above 0 and at most 1."""
    rotary_interleaved: Annotated[bool, MUST, ROPE, HEADS] = False
    """Rotate pairs of neighbouring channels, as GPT-J. Default: a channel of the head's first half
    with one of its second half."""
    use_rope_scaling: Annotated[bool, MUST, ROPE, HEADS, PLAIN_ROPE] = False
    """Slow down low rotary frequencies as Llama 3.1 does, for an original length of 8192 tokens."""
    rope_scaling_factor: Annotated[float, ABOVE_0, MUST, demands("use_rope_scaling")] = 8.0
    """Factor by which --use-rope-scaling slows them: 8 in Llama 3.1, 32 in Llama 3.2."""
    window_size: Annotated[str | None, MUST] = None
    """Sliding window LEFT,RIGHT in tokens, such as 127,0. A token attends to itself and the LEFT
    tokens before it; -1 is no limit. Default: all tokens before it."""
    # Norms.
    normalization: Annotated[Literal["LayerNorm", "RMSNorm"], MUST] = "LayerNorm"
    """Kind of all norms in the model."""
    norm_epsilon: Annotated[float, ABOVE_0, MUST] = 1e-5
    """Number that norms add to the variance before its root."""
    apply_layernorm_1p: Annotated[bool, MUST] = False
    """Store the weight of each norm minus 1, so that it starts at 0."""
    # Biases, and norms of heads.
    disable_bias_linear: Annotated[bool, MUST] = False
    """Leave the bias out of all linear layers."""
    add_qkv_bias: Annotated[
        bool,
        MUST,
        of_no_layer(
            lambda m: not m.disable_bias_linear,
            "all projections have a bias, without --disable-bias-linear",
        ),
        HEADS,
    ] = False
    """Keep the bias of the QKV projection under --disable-bias-linear, as Qwen2."""
    qk_layernorm: Annotated[bool, MUST] = False
    """Normalise each query and key head by the kind in --normalization, as Qwen3."""
    untie_embeddings_and_output_weights: Annotated[bool, MUST] = False
    """Give the output head its own weight. Default: it uses the word embedding's."""
    # Initial weights. FREE on --load, which has the weights themselves.
    init_method_std: Annotated[
        float,
        FROM_0,
        FREE,
        Idle(
            lambda c: (
                c.model.init_method_xavier_uniform and c.model.embedding_init_method_std is None
            ),
            "the shape of a matrix says it, with --init-method-xavier-uniform",
        ),
    ] = 0.02
    """Standard deviation of the initial weights. Projections into the residual stream have this
    divided by sqrt(2 x layers)."""
    init_method_xavier_uniform: Annotated[bool, FREE] = False
    """Draw initial weights uniformly within sqrt(6 / (inputs + outputs)) of 0. Sizes are the whole
    matrix's under any layout."""
    embedding_init_method_std: Annotated[float | None, FROM_0, FREE] = None
    """Standard deviation of the initial word and position embeddings. Default:
    --init-method-std."""
    # Dropout.
    # NAMED on --load: training goes on with other numbers, and the weights keep their meaning.
    attention_dropout: Annotated[float, BELOW_1, NAMED] = 0.1
    """Dropout probability of attention weights, at least 0 and below 1."""
    hidden_dropout: Annotated[float, BELOW_1, NAMED] = 0.1
    """Dropout probability of embeddings and of each block's output, at least 0 and below 1."""
    # The vocabulary. FREE on --load: the embedding's shape in the checkpoint says its size.
    padded_vocab_size: Annotated[int | None, FROM_1, FREE] = None
    """Rows of the word embedding. Default: the tokenizer's size rounded up to a multiple of
    --make-vocab-size-divisible-by."""
    # With the tensor-parallel size, the weight's shape and its initial values would depend on the
    # layout.
    make_vocab_size_divisible_by: Annotated[
        int,
        FROM_1,
        FREE,
        Idle(
            lambda c: c.model.padded_vocab_size is not None,
            "the rows are given, with --padded-vocab-size",
        ),
    ] = 128
    """Round the word embedding's rows up to a multiple of this. Unlike in Megatron-LM, the
    tensor-parallel size does not enter."""
    cross_entropy_loss_fusion: Annotated[bool, FREE] = False
    """Compute output head and loss in one operation. Above 64M logits of a microbatch it holds a
    block of them at a time (1M on a CPU, 256M on a GPU), and multiplies once more. A GPU that has
    room by the plan keeps more than 64M."""
    # Who computes the layers.
    # FREE on --load: the same function by other code, up to rounding.
    model_provider: Annotated[str | None, FREE] = None
    """Function that builds the model, as MODULE:NAME or FILE.py:NAME, see docs/model_provider.md.
    Default: megapipe's GPT. Not in Megatron-LM."""
    transformer_impl: Annotated[Literal["local", "transformer_engine", "auto"], FREE] = "local"
    """Implementation of the layers. local: plain torch. transformer_engine: Transformer Engine's.
    auto: Transformer Engine's in bf16 or fp16 on a GPU, if they work there."""
    attention_backend: Annotated[
        Literal["auto", "flash", "fused", "unfused", "local"],
        FREE,
        Idle(
            lambda c: c.parallel.context_parallel_size > 1 and "a2a" not in c.model.cp_comm_type,
            "context-parallel ranks compute attention in blocks of plain torch, "
            "without --cp-comm-type a2a",
        ),
    ] = "auto"
    """Kernel of torch's scaled dot-product attention. auto: torch chooses."""
    cp_comm_type: Annotated[
        tuple[str, ...],
        FREE,
        needs("context_parallel_size", "there is nothing to exchange", least=2),
    ] = ("p2p",)
    """How context-parallel ranks exchange keys and values. p2p, a2a+p2p: around a ring.
    all_gather: all at once. a2a: heads are exchanged for tokens."""

    # Sizes that Megatron-LM derives. They are valid once the required flags are given.
    @property
    def layers(self) -> int:
        """Number of layers."""
        assert self.num_layers is not None
        return self.num_layers

    @property
    def hidden(self) -> int:
        """Width of the hidden state."""
        assert self.hidden_size is not None
        return self.hidden_size

    @property
    def heads(self) -> int:
        """Number of query heads."""
        assert self.num_attention_heads is not None
        return self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Number of key and value heads."""
        return self.num_query_groups if self.group_query_attention else self.heads

    @property
    def head_dim(self) -> int:
        """Number of channels of a head. Multi-latent attention has other flags for its heads."""
        return self.kv_channels or self.hidden // self.heads

    @property
    def ffn(self) -> int:
        """Width of the MLP: number of channels between its two linear layers.

        With a gate, gate and up have this width each.
        """
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.swiglu:
            # Megatron-LM's rounding, down to a multiple of 64.
            return int(4 * self.hidden * 2 / 3 / 64) * 64
        return 4 * self.hidden

    @property
    def rotates(self) -> bool:
        """Return whether queries and keys are rotated by their positions."""
        return self.position_embedding_type in ("rope", "yarn", "longrope")

    @property
    def window(self) -> int | None:
        """Number of tokens before itself that a token attends to, None for all."""
        if self.window_size is None:
            return None
        left = int(self.window_size.strip("()").split(",")[0])
        return None if left < 0 else left

    @property
    def erf_gelu(self) -> bool:
        """Return whether the MLP has the exact GELU, by erf, and not its tanh approximation."""
        # Megatron-LM computes the tanh form in its fusion of bias and GELU, which needs a bias.
        by_erf = self.no_bias_gelu_fusion or self.disable_bias_linear
        return by_erf and self.activation == "gelu"

    @property
    def linear_std(self) -> float | None:
        """Standard deviation of initial weights of linear layers; None for Xavier's uniform."""
        return None if self.init_method_xavier_uniform else self.init_method_std

    @property
    def residual_std(self) -> float | None:
        """Standard deviation of the linear layers that write to the residual stream.

        None stands for Xavier's uniform distribution.
        """
        if self.init_method_xavier_uniform:
            return None
        # Two projections of each layer add to the residual stream (Radford et al. 2019, section
        # 2.3).
        growth: float = (2 * self.layers) ** 0.5
        return self.init_method_std / growth

    @property
    def embedding_std(self) -> float | None:
        """Standard deviation of word and position embeddings; None for Xavier's uniform."""
        # Megatron-LM's rule: an equal deviation means the distribution of all other weights,
        # Xavier's too.
        own = self.embedding_init_method_std
        return self.linear_std if own in (None, self.init_method_std) else own

    @property
    def bias(self) -> bool:
        """Return whether linear layers have a bias."""
        return not self.disable_bias_linear

    @property
    def tied(self) -> bool:
        """Return whether the output head uses the word embedding's weight."""
        return not self.untie_embeddings_and_output_weights

    def padded_vocab(self, vocab_size: int) -> int:
        """Return the number of rows of the word embedding, padding included.

        Args:
            vocab_size: the number of ids of the tokenizer.
        """
        to = self.make_vocab_size_divisible_by
        return self.padded_vocab_size or math.ceil(vocab_size / to) * to
