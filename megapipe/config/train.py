"""How a model is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megapipe.config.notes import Spelled


@dataclass(frozen=True)
class TrainConfig:
    """Batch, length of the run, precision, optimizer, learning rate."""

    micro_batch_size: int | None = None
    """Sequences per microbatch and data-parallel rank. Required."""
    global_batch_size: int | None = None
    """Sequences per step. Default: micro batch x data-parallel size. The quotient is the number of microbatches."""
    rampup_batch_size: tuple[int, ...] = ()
    """START INCREMENT SAMPLES: the batch grows from START by INCREMENT, within SAMPLES, to --global-batch-size."""
    step_batch_size_schedule: str | None = None
    """Batch sizes from numbers of tokens on, such as "0:16 2.4B:320"; instead of --global-batch-size."""
    seq_length: int | None = None
    """Tokens per sequence. Required."""
    train_iters: int | None = None
    """Steps to train. This or --train-samples is required."""
    train_samples: int | None = None
    """Sequences to train on, instead of --train-iters."""
    exit_interval: int | None = None
    """Save and stop after an iteration that is a multiple of this, with exit status 0."""
    exit_duration_in_mins: float | None = None
    """Save and stop after this many minutes."""
    exit_signal_handler: bool = False
    """Save and stop after the iteration in which any rank gets --exit-signal or a first Ctrl-C; repeats are ignored."""
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
    use_precision_aware_optimizer: bool = False
    """Keep what the optimizer has in the types that --main-grads-dtype, --main-params-dtype, --exp-avg-dtype and
    --exp-avg-sq-dtype say. bf16 changes the numbers."""
    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the gradients: microbatches are added up, and ranks summed, in it."""
    main_params_dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the parameters that are updated. bf16: those of the model, with no other beside them."""
    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    """Of Adam's first moment between steps; an update computes in float32."""
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = "fp32"
    """Of Adam's second moment between steps."""
    compile: bool = False
    """Compile the element-wise parts of layers with torch.compile; the same results to rounding."""
    deterministic_mode: bool = False
    """Refuse kernels whose results differ from run to run."""
    freeze_all_layers: bool = False
    """Train nothing: run the forwards, report the losses, keep the weights. A provider freezes a part of a model."""
    optimizer: str = "adam"
    """adam (AdamW, decoupled weight decay), sgd, muon, or FILE.py:NAME of your own."""
    lr: float | None = None
    """Peak learning rate. Required."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    decoupled_lr: float | None = None
    """Peak learning rate of word embeddings and output head. Default: --lr."""
    decoupled_min_lr: float | None = None
    """Their learning rate at the end of the decay. Default: --min-lr."""
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
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """--weight-decay throughout, or growing over the whole run from --start-weight-decay to --end-weight-decay."""
    start_weight_decay: float | None = None
    """Weight decay of the first step, with --weight-decay-incr-style linear or cosine."""
    end_weight_decay: float | None = None
    """Weight decay at the end of the run, likewise."""
    clip_grad: float = 1.0
    """Largest L2 norm of the whole gradient; 0 switches clipping off."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    sgd_momentum: float = 0.9
    """Of sgd."""
    muon_momentum: float = 0.9
    """Of muon's matrices; the rest has adam's settings."""
    muon_no_split_qkv: bool = False
    """Make the fused query, key and value orthogonal as one matrix, not as three."""
    muon_nesterov: bool = False
    """Look one step of momentum ahead."""
    muon_num_ns_steps: int = 5
    """Newton-Schulz steps that make the momentum orthogonal."""
    muon_coefficient_type: Literal["quintic", "simple"] = "quintic"
    """Of these steps: quintic has coefficients for each of five steps, in turn; simple Jordan's for all."""
    muon_scale_mode: Literal["spectral", "shape_scaling", "unit_rms_norm"] = "spectral"
    """Factor on muon's step: root of max(rows, columns), of max(1, rows / columns) (Jordan), or of rows / columns."""
    muon_extra_scale_factor: float = 1.0
    """A further one; 0.2 makes spectral steps as large as adam's."""
    check_weight_hash_across_dp_replicas_interval: int | None = None
    """Every so many steps compare a hash of all weights over their replicas, and stop if they differ."""
    no_check_for_nan_in_loss_and_grad: bool = False
    """Skip the update at a loss or gradient that is not finite, as a dynamic loss scale does, instead of stopping."""
    rerun_mode: Literal["disabled", "validate_results"] = "validate_results"
    """validate_results: a step that is not finite is run a second time before the run stops for it."""
    error_injection_rate: int = 0
    """A drill: one in so many steps counts as wrong and is run again before its update; 0 for none."""
    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = "transient_error"
    """What the second run shows; after a persistent error the run stops, as if the step had come out wrong twice."""
    check_for_spiky_loss: bool = False
    """Run a step a second time before its update if its loss is 10 times the largest of the last 100."""
    max_bad_iterations_in_a_row: int = 10
    """Stop after so many that were skipped, or with --check-for-spiky-loss spiked; not while a loss scale falls."""
    override_opt_param_scheduler: Annotated[bool, Spelled("override-opt_param-scheduler")] = False
    """On --load take learning-rate and weight-decay settings from the command line, whatever the checkpoint says."""
    use_checkpoint_opt_param_scheduler: Annotated[bool, Spelled("use-checkpoint-opt_param-scheduler")] = False
    """On --load take learning-rate and weight-decay settings from the checkpoint."""

    # Sizes that are required, valid once they are given.
    @property
    def sequence(self) -> int:
        """Tokens of a sequence."""
        assert self.seq_length is not None
        return self.seq_length

    @property
    def micro_batch(self) -> int:
        """Sequences of a microbatch."""
        assert self.micro_batch_size is not None
        return self.micro_batch_size

    @property
    def half(self) -> bool:
        """Weights and activations have 16 bits."""
        return self.bf16 or self.fp16

    @property
    def dynamic_loss_scale(self) -> bool:
        return self.fp16 and self.loss_scale is None
