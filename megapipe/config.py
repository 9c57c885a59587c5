"""What a run is: frozen dataclasses whose fields are Megatron's flags. `cli` turns one into the other.

The docstring under a field is its help. A boolean field is a switch that is off unless given; where Megatron names the
negative (`--disable-bias-linear`), the field has that name too and a property says the positive.
Nothing here is ever changed after parsing: what Megatron fills in during validation is a property.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import Suppress, arg


@dataclass(frozen=True)
class ModelConfig:
    """The architecture. Nothing about layout, data or training."""

    num_layers: int | None = None
    """Transformer layers. Required."""
    hidden_size: int | None = None
    """Model width. Required."""
    ffn_hidden_size: int | None = None
    """MLP width; per half with --swiglu. Default: 4 x hidden, with --swiglu 4 x hidden x 2/3 rounded down to 64."""
    num_attention_heads: int | None = None
    """Query heads. Required; must divide by the tensor-parallel size."""
    kv_channels: int | None = None
    """Size of one head. Default: hidden / heads."""
    group_query_attention: bool = False
    """Use grouped-query attention with --num-query-groups key/value heads."""
    num_query_groups: int = 1
    """Key/value heads, with --group-query-attention."""
    max_position_embeddings: int | None = None
    """Rows of the learned position table and limit of RoPE. Required; at least --seq-length."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """How positions enter the model."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""
    rotary_percent: float = 1.0
    """Fraction of each head that is rotated."""
    rotary_interleaved: bool = False
    """Rotate neighbouring channels as pairs (GPT-J) instead of the two halves of the head."""
    use_rope_scaling: bool = False
    """Llama 3.1's slower rotation of the low frequencies, made for an original length of 8192."""
    rope_scaling_factor: float = 8.0
    """How much slower, with --use-rope-scaling: 8 in Llama 3.1, 32 in 3.2."""
    window_size: str | None = None
    """Sliding window LEFT,RIGHT such as 127,0: a token sees itself and LEFT tokens before it; -1 is no limit."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of every norm."""
    norm_epsilon: float = 1e-5
    """Added to the variance."""
    apply_layernorm_1p: bool = False
    """Norms keep their weight minus 1, so that it starts at 0."""
    swiglu: bool = False
    """Gated SiLU in the MLP instead of GELU."""
    quick_geglu: bool = False
    """Gated GELU in the MLP, as x sigmoid(1.702 x)."""
    squared_relu: bool = False
    """Squared ReLU in the MLP instead of GELU."""
    disable_bias_linear: bool = False
    """No bias in any linear layer."""
    add_qkv_bias: bool = False
    """Bias on the QKV projection even with --disable-bias-linear (Qwen2)."""
    qk_layernorm: bool = False
    """Norm of each query and key head, of --normalization kind (Qwen3)."""
    untie_embeddings_and_output_weights: bool = False
    """An output head of its own instead of the word embedding's weight."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights; projections into the residual stream: std / sqrt(2 x layers)."""
    embedding_init_method_std: float | None = None
    """Standard deviation of the initial word and position embeddings. Default: --init-method-std."""
    attention_dropout: float = 0.1
    """Dropout of attention probabilities."""
    hidden_dropout: float = 0.1
    """Dropout of embeddings and of each block's output."""
    padded_vocab_size: int | None = None
    """Rows of the embedding. Default: the tokenizer's size rounded up to --make-vocab-size-divisible-by."""
    make_vocab_size_divisible_by: int = 128
    """Rounding of the embedding's rows. Unlike Megatron's, the result does not depend on the tensor-parallel size."""
    cross_entropy_loss_fusion: bool = False
    """Output head and loss in one operation that never holds all logits: far less memory, one product more."""
    model_provider: str | None = None
    """Function that builds the model instead of ours: MODULE:NAME or FILE.py:NAME, see docs/model_provider.md."""
    transformer_impl: Literal["local", "transformer_engine", "auto"] = "auto"
    """Layers of plain torch (local) or Transformer Engine's; auto: the latter in bf16 or fp16 on a GPU, if it works."""
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = "auto"
    """Which scaled-dot-product kernel torch may use."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Compute activations again in backward: of whole layers (full), or of --recompute-modules (selective)."""
    recompute_modules: tuple[Literal["core_attn", "mlp", "layernorm"], ...] = ("core_attn",)
    """Of selective: attention without its projections, the MLP, the outputs of a layer's norms."""
    recompute_activations: bool = False
    """The same as --recompute-granularity selective."""
    recompute_method: Literal["uniform", "block"] | None = None
    """full in runs of --recompute-num-layers (uniform, the default), or of so many layers of each stage (block)."""
    recompute_num_layers: int | None = None
    """Layers of a run, or of a stage, see --recompute-method. Default: 1."""
    num_microbatches_with_partial_activation_checkpoints: int | None = None
    """Of the microbatches that a stage holds at once, so many keep their activations; the others recompute theirs."""
    sequence_parallel: bool = False
    """Split the sequence over the tensor-parallel ranks outside of attention and MLP: 1/t of the activations there."""
    per_layer_overrides: str | None = None
    """Layers that differ: a JSON file or its text, from layers to fields, as {"0-3,7": {"ffn_hidden_size": 512}}."""
    no_attention: Annotated[bool, Suppress] = False
    """This layer has no attention. Only as an override."""
    no_mlp: Annotated[bool, Suppress] = False
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
    def gated(self) -> bool:
        """Two widths of the MLP's first layer, gate and up."""
        return self.swiglu or self.quick_geglu

    @property
    def window(self) -> int | None:
        """Tokens before itself that a token sees; None for all."""
        left = -1 if self.window_size is None else int(self.window_size.strip("()").split(",")[0])
        return None if left < 0 else left

    @property
    def embedding_std(self) -> float:
        return self.init_method_std if self.embedding_init_method_std is None else self.embedding_init_method_std

    @property
    def bias(self) -> bool:
        return not self.disable_bias_linear

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
    def recompute_norms(self) -> bool:
        return self.recompute_selective and "layernorm" in self.recompute_modules

    @property
    def tied(self) -> bool:
        return not self.untie_embeddings_and_output_weights

    def padded_vocab(self, vocab_size: int) -> int:
        """Rows of the embedding for a tokenizer of this size."""
        to = self.make_vocab_size_divisible_by
        return self.padded_vocab_size or math.ceil(vocab_size / to) * to


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is spread: tensor, pipeline and data parallel."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer."""
    pipeline_model_parallel_size: int = 1
    """Ranks that share the layers among them."""
    pipeline_schedule: str | None = None
    """Order of the passes: a name or a .json or .csv file. Default: 1f1b, interleaved for several stages on a rank."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers of each stage, where a rank holds several."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Stages of each rank: the same by count."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first pipeline rank, over all its stages; the others share the rest evenly."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last pipeline rank."""
    account_for_embedding_in_pipeline_split: bool = False
    """The embedding counts as a layer where stages are made even."""
    account_for_loss_in_pipeline_split: bool = False
    """The output head and loss count as a layer where stages are made even."""
    pipeline_model_parallel_layout: str | None = None
    """Megatron's string of E (embedding), t (layer) and L (loss); or auto: the split of least simulated time."""
    memory_limit_gib: float | None = None
    """Most memory that a rank may be predicted to need, for parameters, optimizer and activations."""
    no_overlap_p2p_communication: bool = False
    """Post messages between stages in batches instead of one by one."""
    use_ring_exchange_p2p: bool = False
    """Post messages between stages as ring exchanges, each complete as a unit; wins over the flag before."""
    distributed_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: nccl with a GPU, gloo without."""
    distributed_timeout_minutes: float = 10.0
    """How long a collective or message may take before the run is stopped."""
    distributed_timeout_seconds_after_init: float | None = None
    """The same from the second iteration on. Default: --distributed-timeout-minutes."""

    @property
    def p2p_mode(self) -> Literal["plain", "batched", "ring"]:
        """How messages between stages are posted, see pipeline_parallel.transport."""
        if self.use_ring_exchange_p2p:
            return "ring"
        return "batched" if self.no_overlap_p2p_communication else "plain"


@dataclass(frozen=True)
class TrainConfig:
    """Batch, length of the run, precision, optimizer, learning rate."""

    micro_batch_size: int | None = None
    """Sequences per microbatch and data-parallel rank. Required."""
    global_batch_size: int | None = None
    """Sequences per step. Default: micro batch x data-parallel size. The quotient is the number of microbatches."""
    seq_length: int | None = None
    """Tokens per sequence. Required."""
    train_iters: int | None = None
    """Steps to train. This or --train-samples is required."""
    train_samples: int | None = None
    """Sequences to train on, instead of --train-iters."""
    exit_interval: int | None = None
    """Stop after an iteration that is a multiple of this."""
    exit_duration_in_mins: float | None = None
    """Save and stop after this many minutes."""
    exit_signal_handler: bool = False
    """Save and stop after the iteration in which any rank gets --exit-signal."""
    exit_signal: Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"] = "SIGTERM"
    """Which signal, with --exit-signal-handler."""
    seed: int = 1234
    """Seed of initial weights, data order and dropout."""
    calculate_per_token_loss: bool = False
    """Divide by the tokens of the whole global batch instead of averaging the microbatches' means."""
    bf16: bool = False
    """Compute in bfloat16; gradients, main parameters and optimizer state stay float32."""
    fp16: bool = False
    """Compute in float16 with a loss scale; gradients, main parameters and optimizer state stay float32."""
    loss_scale: float | None = None
    """Multiply the loss by this before backward, and divide the gradient. Default: with --fp16 dynamic, else 1."""
    initial_loss_scale: float = 2.0**32
    """First dynamic loss scale."""
    min_loss_scale: float = 1.0
    """Least dynamic loss scale."""
    loss_scale_window: float = 1000.0
    """Steps without overflow after which the dynamic loss scale is doubled."""
    hysteresis: int = 2
    """Overflows between two increases at which the dynamic loss scale begins to be halved."""
    grad_reduce_in_bf16: bool = False
    """Sum gradients over data-parallel ranks in bfloat16: half the bytes, three digits less. Added up in float32."""
    compile: bool = False
    """Compile the element-wise parts of layers with torch.compile; the same results to rounding."""
    deterministic_mode: bool = False
    """Refuse kernels whose results differ from run to run."""
    optimizer: Literal["adam"] = "adam"
    """adam is AdamW with decoupled weight decay."""
    lr: float | None = None
    """Peak learning rate. Required."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Curve after the warm-up."""
    lr_decay_iters: int | None = None
    """Steps of the curve. Default: --train-iters."""
    lr_decay_samples: int | None = None
    """Sequences of the curve, with --train-samples."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a fraction of the decay length."""
    lr_warmup_iters: int = 0
    """Steps of linear warm-up."""
    lr_warmup_samples: int = 0
    """Sequences of linear warm-up, with --train-samples."""
    lr_warmup_init: float = 0.0
    """Learning rate at which the warm-up starts."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Last part of the WSD curve."""
    lr_wsd_decay_iters: int | None = None
    """Steps of the last part of the WSD curve."""
    lr_wsd_decay_samples: int | None = None
    """Sequences of the last part of the WSD curve."""
    weight_decay: float = 0.01
    """Decoupled; not applied to biases and other one-dimensional parameters."""
    clip_grad: float = 1.0
    """Largest L2 norm of the whole gradient; 0 switches clipping off."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    no_check_for_nan_in_loss_and_grad: bool = False
    """Skip the update at a loss or gradient that is not finite, as a dynamic loss scale does, instead of stopping."""
    override_opt_param_scheduler: Annotated[bool, arg(name="override-opt_param-scheduler")] = False
    """On --load take learning-rate and weight-decay settings from the command line, whatever the checkpoint says."""
    use_checkpoint_opt_param_scheduler: Annotated[bool, arg(name="use-checkpoint-opt_param-scheduler")] = False
    """On --load take learning-rate and weight-decay settings from the checkpoint."""

    @property
    def half(self) -> bool:
        """Weights and activations have 16 bits."""
        return self.bf16 or self.fp16

    @property
    def dynamic_loss_scale(self) -> bool:
        return self.fp16 and self.loss_scale is None


@dataclass(frozen=True)
class DataConfig:
    """Tokens, where they come from and in which order."""

    data_path: tuple[str, ...] = ()
    """Prefix of a .bin/.idx pair; or weight prefix weight prefix ...; or prefixes alone, each sample once."""
    split: str | None = None
    """Proportions of train, validation and test, such as 969,30,1 (the default with --data-path)."""
    data_cache_path: str | None = None
    """Folder that keeps the sample indices for the next start. Default: they are computed anew."""
    mock_data: bool = False
    """Synthetic tokens, no files; with --tokenizer-type NullTokenizer --vocab-size N."""
    num_workers: int = 2
    """Background threads that read ahead; 0 reads in the training loop."""
    dataloader_type: Literal["single", "cyclic"] = "single"
    """single: in the order of the sample index. cyclic: shuffled anew each epoch."""
    eod_mask_loss: bool = False
    """No loss where the input is the end-of-document token."""
    reset_position_ids: bool = False
    """Positions, learned or rotary, start again at 0 after each end-of-document token."""
    reset_attention_mask: bool = False
    """A token attends only to tokens of its own document."""
    tokenizer_type: Literal["SentencePieceTokenizer", "NullTokenizer"] = "SentencePieceTokenizer"
    """Kind of tokenizer."""
    tokenizer_model: str | None = None
    """File of a SentencePiece model."""
    vocab_size: int | None = None
    """Ids of the NullTokenizer; the last one ends a document."""
    eval_iters: int = 100
    """Batches per evaluation."""
    eval_interval: int | None = None
    """Evaluate every so many steps."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and loading."""

    save: str | None = None
    """Folder for checkpoints."""
    save_interval: int | None = None
    """Save every so many steps."""
    load: str | None = None
    """Folder to resume from; without a checkpoint in it the run starts fresh."""
    exit_on_missing_checkpoint: bool = False
    """Stop if --load holds no checkpoint."""
    ckpt_step: int | None = None
    """Load this iteration instead of the newest."""
    use_checkpoint_args: bool = False
    """Take the architecture from the checkpoint, if there is one, instead of the flags."""
    finetune: bool = False
    """Load the weights only and start at iteration 0."""
    no_save_optim: bool = False
    """Leave the optimizer state out."""
    no_load_optim: bool = False
    """Do not load the optimizer state."""
    ckpt_format: Literal["torch_dist"] = "torch_dist"
    """torch distributed checkpoint, stored as safetensors."""


@dataclass(frozen=True)
class LogConfig:
    """Console, TensorBoard, profiler."""

    log_interval: int = 100
    """Print a line every so many steps."""
    log_throughput: bool = False
    """TFLOP/s per device in the line."""
    log_params_norm: bool = False
    """Norm of the parameters in the line."""
    log_num_zeros_in_grad: bool = False
    """Count of zeros in the gradient in the line."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard."""
    tensorboard_log_interval: int = 1
    """Write to TensorBoard every so many steps."""
    tensorboard_queue_size: int = 1000
    """Events held back before a write."""
    log_validation_ppl_to_tensorboard: bool = False
    """Validation perplexity in TensorBoard too."""
    log_world_size_to_tensorboard: bool = False
    """World size in TensorBoard too."""
    log_memory_to_tensorboard: bool = False
    """Device memory in TensorBoard too (GPU only)."""
    profile: bool = False
    """Record the steps of the window below; needs --use-pytorch-profiler."""
    use_pytorch_profiler: bool = False
    """One Perfetto-readable trace per rank, torch_profile/rank-N.json.gz beside --tensorboard-dir."""
    profile_step_start: int = 10
    """First step of the window."""
    profile_step_end: int = 12
    """Step at which the window closes."""
    profile_ranks: tuple[int, ...] = ()
    """Ranks to profile. Default: all."""


@dataclass(frozen=True)
class Config:
    """Everything a run is made of."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    world_size: Annotated[int, Suppress] = 1
    """Number of processes, from the launcher; not a flag."""

    @property
    def data_parallel_size(self) -> int:
        model_parallel = self.parallel.tensor_model_parallel_size * self.parallel.pipeline_model_parallel_size
        return self.world_size // model_parallel

    @property
    def global_batch_size(self) -> int:
        assert self.train.micro_batch_size is not None
        return self.train.global_batch_size or self.train.micro_batch_size * self.data_parallel_size

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step and data-parallel rank."""
        assert self.train.micro_batch_size is not None
        return self.global_batch_size // (self.train.micro_batch_size * self.data_parallel_size)

    @property
    def train_iters(self) -> int:
        if self.train.train_iters is not None:
            return self.train.train_iters
        assert self.train.train_samples is not None
        return self.train.train_samples // self.global_batch_size
