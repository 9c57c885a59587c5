"""The model of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from megapipe.config.fp8 import SHARED_SCALES, FP8Config
from megapipe.config.mla import HEADS, ROPE, STRETCHED, MLAConfig
from megapipe.config.moe import MoEConfig
from megapipe.config.mtp import MTPConfig
from megapipe.config.notes import (
    ABOVE_0,
    BELOW_1,
    FREE,
    LISTED,
    MUST,
    NAMED,
    NO_FLAG,
    UP_TO_1,
    Idle,
    Refused,
    Required,
    at_least,
    demands,
    excludes,
    needs,
    of_no_layer,
)

RECOMPUTED = Idle(
    lambda c: not (c.model.recompute_granularity or c.model.recompute_activations),
    "nothing is computed again, without --recompute-granularity full",
)
OF_FULL = Refused(
    "{} has no effect without --recompute-granularity full. Add it, or leave it out.",
    lambda c: c.model.recompute_selective and c.model.recompute_granularity != "full",
)
ONE_MLP = "{} and {} are different activations of one MLP"


@dataclass(frozen=True)
class ModelConfig(MTPConfig, FP8Config, MoEConfig, MLAConfig):
    """The architecture. Nothing about layout, data or training."""

    num_layers: Annotated[int | None, Required("12"), LISTED, MUST] = None
    """Transformer layers. Required."""
    hidden_size: Annotated[int | None, Required("768"), at_least(1), MUST] = None
    """Model width. Required."""
    ffn_hidden_size: Annotated[int | None, at_least(1), MUST] = None
    """MLP width; per half with --swiglu. Default: 4 x hidden, with --swiglu 4 x hidden x 2/3 rounded down to 64."""
    num_attention_heads: Annotated[int | None, Required("12"), LISTED, MUST] = None
    """Query heads. Required; must divide by the tensor-parallel size."""
    kv_channels: Annotated[int | None, at_least(1), MUST, HEADS] = None
    """Size of one head. Default: hidden / heads."""
    group_query_attention: Annotated[bool, MUST] = False
    """Use grouped-query attention with --num-query-groups key/value heads."""
    num_query_groups: Annotated[
        int,
        LISTED,
        MUST,
        of_no_layer(
            lambda m: not m.group_query_attention,
            "each query head has its own key and value, without --group-query-attention",
        ),
    ] = 1
    """Key/value heads, with --group-query-attention."""
    max_position_embeddings: Annotated[int | None, Required("1024"), at_least(1), MUST] = None
    """Rows of the learned position table and limit of RoPE. Required; at least --seq-length."""
    position_embedding_type: Annotated[Literal["learned_absolute", "rope", "none"], MUST] = "learned_absolute"
    """How positions enter the model."""
    rotary_base: Annotated[float, ABOVE_0, MUST, ROPE] = 10000.0
    """Base of the rotary frequencies."""
    rotary_percent: Annotated[float, UP_TO_1, MUST, ROPE, STRETCHED] = 1.0
    """Fraction of each head that is rotated."""
    rotary_interleaved: Annotated[bool, MUST, ROPE, HEADS] = False
    """Rotate neighbouring channels as pairs (GPT-J) instead of the two halves of the head."""
    use_rope_scaling: Annotated[bool, MUST, ROPE, HEADS] = False
    """Llama 3.1's slower rotation of the low frequencies, made for an original length of 8192."""
    rope_scaling_factor: Annotated[float, ABOVE_0, MUST, demands("use_rope_scaling")] = 8.0
    """How much slower, with --use-rope-scaling: 8 in Llama 3.1, 32 in 3.2."""
    window_size: Annotated[str | None, MUST] = None
    """Sliding window LEFT,RIGHT such as 127,0: a token sees itself and LEFT tokens before it; -1 is no limit."""
    normalization: Annotated[Literal["LayerNorm", "RMSNorm"], MUST] = "LayerNorm"
    """Kind of every norm."""
    norm_epsilon: Annotated[float, ABOVE_0, MUST] = 1e-5
    """Added to the variance."""
    apply_layernorm_1p: Annotated[bool, MUST] = False
    """Norms keep their weight minus 1, so that it starts at 0."""
    swiglu: Annotated[bool, MUST, excludes("quick_geglu squared_relu", ONE_MLP)] = False
    """Gated SiLU in the MLP instead of GELU."""
    quick_geglu: Annotated[bool, MUST, excludes("squared_relu", ONE_MLP)] = False
    """Gated GELU in the MLP, as x sigmoid(1.702 x)."""
    squared_relu: Annotated[bool, MUST] = False
    """Squared ReLU in the MLP instead of GELU."""
    no_bias_gelu_fusion: Annotated[
        bool,
        MUST,
        Idle(lambda c: c.model.gated or c.model.squared_relu, "the MLP has another activation, without GELU"),
        of_no_layer(
            lambda m: m.disable_bias_linear,
            "GELU has its erf form anyway, with --disable-bias-linear",
        ),
    ] = False
    """GELU in its erf form, which Megatron-LM has where it does not fuse: so also with --disable-bias-linear."""
    disable_bias_linear: Annotated[bool, MUST] = False
    """No bias in any linear layer."""
    add_qkv_bias: Annotated[
        bool,
        MUST,
        of_no_layer(
            lambda m: not m.disable_bias_linear,
            "all projections have a bias, without --disable-bias-linear",
        ),
        HEADS,
    ] = False
    """Bias on the QKV projection even with --disable-bias-linear (Qwen2)."""
    qk_layernorm: Annotated[bool, MUST] = False
    """Norm of each query and key head, of --normalization kind (Qwen3)."""
    untie_embeddings_and_output_weights: Annotated[bool, MUST] = False
    """An output head of its own instead of the word embedding's weight."""
    init_method_std: Annotated[
        float,
        at_least(0),
        FREE,
        Idle(
            lambda c: c.model.init_method_xavier_uniform and c.model.embedding_init_method_std is None,
            "the shape of a matrix says it, with --init-method-xavier-uniform",
        ),
    ] = 0.02
    """Standard deviation of the initial weights; projections into the residual stream: std / sqrt(2 x layers)."""
    init_method_xavier_uniform: Annotated[bool, FREE] = False
    """Initial weights uniform within sqrt(6 / (inputs + outputs)) of 0, of the whole matrix, under any layout."""
    embedding_init_method_std: Annotated[float | None, at_least(0), FREE] = None
    """Standard deviation of the initial word and position embeddings. Default: --init-method-std."""
    attention_dropout: Annotated[float, BELOW_1, NAMED] = 0.1
    """Dropout of attention probabilities."""
    hidden_dropout: Annotated[float, BELOW_1, NAMED] = 0.1
    """Dropout of embeddings and of each block's output."""
    # The embedding's shape says it.
    padded_vocab_size: Annotated[int | None, at_least(1), FREE] = None
    """Rows of the embedding. Default: the tokenizer's size rounded up to --make-vocab-size-divisible-by."""
    make_vocab_size_divisible_by: Annotated[
        int,
        at_least(1),
        FREE,
        Idle(lambda c: c.model.padded_vocab_size is not None, "the rows are given, with --padded-vocab-size"),
    ] = 128
    """Rounding of the embedding's rows. Unlike Megatron's, the result does not depend on the tensor-parallel size."""
    cross_entropy_loss_fusion: Annotated[bool, FREE] = False
    """Output head and loss in one operation; of more than 64M logits it holds 1M at a time, for one product more."""
    model_provider: Annotated[str | None, FREE] = None
    """Function that builds the model instead of ours: MODULE:NAME or FILE.py:NAME, see docs/model_provider.md. Not in
    Megatron-LM."""
    transformer_impl: Annotated[Literal["local", "transformer_engine", "auto"], FREE] = "local"
    """Layers of plain torch (local) or Transformer Engine's; auto: the latter in bf16 or fp16 on a GPU, if it works."""
    attention_backend: Annotated[
        Literal["auto", "flash", "fused", "unfused", "local"],
        FREE,
        Idle(
            lambda c: c.parallel.context_parallel_size > 1 and "a2a" not in c.model.cp_comm_type,
            "context-parallel ranks compute attention in blocks of plain torch, without --cp-comm-type a2a",
        ),
    ] = "auto"
    """Which scaled-dot-product kernel torch may use."""
    cp_comm_type: Annotated[
        tuple[str, ...], FREE, needs("context_parallel_size", "there is nothing to exchange", least=2)
    ] = ("p2p",)
    """Keys and values under --context-parallel-size: ring (p2p, a2a+p2p), all_gather, heads for tokens (a2a)."""
    recompute_granularity: Annotated[Literal["full", "selective"] | None, FREE] = None
    """Compute activations again in backward: of whole layers (full), or of --recompute-modules (selective)."""
    recompute_modules: Annotated[
        tuple[Literal["core_attn", "mlp", "layernorm", "moe", "moe_act", "shared_experts", "mla_up_proj"], ...],
        FREE,
        demands(
            "recompute_granularity recompute_activations",
            "selective",
            True,
            says="{} has no effect without --recompute-granularity selective. Add it, or leave it out.",
        ),
    ] = ("core_attn",)
    """Of selective: attention without its projections, the MLP of dense layers, the outputs of a layer's norms, the
    experts with their router (moe), the shared ones alone; heads from their latents on, attention included
    (mla_up_proj). Activations of experts (moe_act) are never kept."""
    recompute_activations: Annotated[
        bool,
        FREE,
        excludes(
            "recompute_granularity",
            "{} means --recompute-granularity selective, but {} is given",
            where=lambda c: c.model.recompute_granularity == "full",
        ),
    ] = False
    """The same as --recompute-granularity selective."""
    recompute_method: Annotated[Literal["uniform", "block"] | None, FREE, RECOMPUTED, OF_FULL] = None
    """full in runs of --recompute-num-layers (uniform, the default), or of so many layers of each stage (block)."""
    recompute_num_layers: Annotated[int | None, at_least(1), FREE, RECOMPUTED, OF_FULL] = None
    """Layers of a run, or of a stage, see --recompute-method. Default: 1."""
    num_microbatches_with_partial_activation_checkpoints: Annotated[
        int | None,
        at_least(1),
        FREE,
        demands(
            "recompute_granularity recompute_activations",
            says="{} has no effect where nothing is computed again. Add --recompute-granularity full.",
        ),
    ] = None
    """Of the microbatches that a stage holds at once, so many keep their activations; the others recompute theirs. Not
    in Megatron-LM."""
    sequence_parallel: Annotated[
        bool, FREE, needs("tensor_model_parallel_size", "there is nothing to share", least=2)
    ] = False
    """Split the sequence over the tensor-parallel ranks outside of attention and MLP: 1/t of the activations there."""
    tp_comm_overlap: Annotated[
        bool, FREE, SHARED_SCALES, needs("tensor_model_parallel_size", "nothing is sent", least=2)
    ] = False
    """Multiply in pieces of the rows while those of other tensor-parallel ranks travel."""
    compile: Annotated[bool, FREE] = False
    """Compile the element-wise parts of layers with torch.compile; the same results to rounding. Not in Megatron-LM."""
    per_layer_overrides: Annotated[str | None, MUST] = None
    """Layers that differ: a JSON file or its text, from layers to fields, as {"0-3,7": {"ffn_hidden_size": 512}}. Not
    in Megatron-LM."""
    no_attention: Annotated[bool, NO_FLAG, MUST] = False
    """This layer has no attention. Only as an override."""
    no_mlp: Annotated[bool, NO_FLAG, MUST] = False
    """This layer has no MLP. Only as an override."""

    # Widths that Megatron derives, valid once the required flags are given.
    @property
    def layers(self) -> int:
        assert self.num_layers is not None
        return self.num_layers

    @property
    def hidden(self) -> int:
        assert self.hidden_size is not None
        return self.hidden_size

    @property
    def heads(self) -> int:
        assert self.num_attention_heads is not None
        return self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Key/value heads."""
        return self.num_query_groups if self.group_query_attention else self.heads

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden // self.heads

    @property
    def ffn(self) -> int:
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return int(4 * self.hidden * 2 / 3 / 64) * 64 if self.swiglu else 4 * self.hidden

    @property
    def expert_ffn(self) -> int:
        """Width of an expert."""
        return self.moe_ffn_hidden_size or self.ffn

    @property
    def gated(self) -> bool:
        """Two widths of the MLP's first layer, gate and up."""
        return self.swiglu or self.quick_geglu

    @property
    def window(self) -> int | None:
        """Tokens before itself that a token sees; None for all."""
        left = -1 if self.window_size is None else int(self.window_size.strip("()").split(",")[0])
        return None if left < 0 else left

    @property
    def erf_gelu(self) -> bool:
        """The MLP has GELU, in its erf form."""
        return (self.no_bias_gelu_fusion or self.disable_bias_linear) and not (self.gated or self.squared_relu)

    @property
    def linear_std(self) -> float | None:
        """The deviation of initial weights; None is Xavier's uniform, as in Layout."""
        return None if self.init_method_xavier_uniform else self.init_method_std

    @property
    def residual_std(self) -> float | None:
        """The deviation of projections into the residual stream."""
        return None if self.init_method_xavier_uniform else self.init_method_std / (2 * self.layers) ** 0.5

    @property
    def embedding_std(self) -> float | None:
        """The deviation of word and position embeddings."""
        own = self.embedding_init_method_std
        return self.linear_std if own in (None, self.init_method_std) else own

    @property
    def bias(self) -> bool:
        return not self.disable_bias_linear

    @property
    def recompute_mla_up_proj(self) -> bool:
        return self.recompute_selective and "mla_up_proj" in self.recompute_modules

    @property
    def recompute_selective(self) -> bool:
        return self.recompute_activations or self.recompute_granularity == "selective"

    @property
    def recompute_attention(self) -> bool:
        return self.recompute_selective and "core_attn" in self.recompute_modules

    @property
    def recompute_mlp(self) -> bool:
        return self.recompute_selective and "mlp" in self.recompute_modules

    @property
    def recompute_moe(self) -> bool:
        return self.recompute_selective and "moe" in self.recompute_modules

    @property
    def recompute_shared_experts(self) -> bool:
        return self.recompute_selective and "shared_experts" in self.recompute_modules

    @property
    def recompute_norms(self) -> bool:
        return self.recompute_selective and "layernorm" in self.recompute_modules

    @property
    def tied(self) -> bool:
        return not self.untie_embeddings_and_output_weights

    def padded_vocab(self, vocab_size: int) -> int:
        """Rows of the embedding for a tokenizer of this size."""
        to = self.make_vocab_size_divisible_by
        return self.padded_vocab_size or math.ceil(vocab_size / to) * to
