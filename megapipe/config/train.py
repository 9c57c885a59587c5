"""The training of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megapipe.config.files import LOADS
from megapipe.config.notes import (
    ABOVE_0,
    ANY,
    BELOW_1,
    CURVE,
    FREE,
    MICROBATCH,
    NAMED,
    Idle,
    Range,
    Required,
    Spelled,
    at_least,
    demands,
    excludes,
    needs,
    read_by,
)
from megapipe.config.parallel import REPLICAS

_CONSTANT = "the rate does not fall, with --lr-decay-style constant"
FALLS = Idle(lambda c: c.train.lr_decay_style == "constant", _CONSTANT)
HAS_CURVE = Idle(lambda c: c.train.lr_decay_style == "constant" and c.train.lr_warmup_fraction is None, _CONSTANT)
SCALE_MOVES = Idle(
    lambda c: not c.train.dynamic_loss_scale,
    "the scale does not move, without a dynamic loss scale (--fp16 without --loss-scale)",
)
ADAM = read_by("adam", "muon", instead="sgd has none of them")
SGD = read_by("sgd", instead="nothing reads it, without --optimizer sgd")
MUON = read_by("muon", instead="nothing reads it, without --optimizer muon")
OF_WSD = demands("lr_decay_style", "WSD")
GROWS = demands("weight_decay_incr_style", "linear", "cosine")
ROUNDED = demands(
    "use_precision_aware_optimizer", says="{} changes the numbers; say so with --use-precision-aware-optimizer."
)
OF_BF16 = demands("bf16", says="{} is for weights of --bf16. Add it, or leave it out.")


@dataclass(frozen=True)
class TrainConfig:
    """Batch, length of the run, precision, optimizer, learning rate."""

    micro_batch_size: Annotated[int | None, Required("4"), at_least(1), MICROBATCH] = None
    """Sequences per microbatch and data-parallel rank. Required."""
    global_batch_size: Annotated[int | None, at_least(1), NAMED] = None
    """Sequences per step. Default: micro batch x data-parallel size. The quotient is the number of microbatches."""
    rampup_batch_size: Annotated[tuple[int, ...], ANY, NAMED] = ()
    """START INCREMENT SAMPLES: the batch grows from START by INCREMENT, within SAMPLES, to --global-batch-size."""
    step_batch_size_schedule: Annotated[str | None, NAMED] = None
    """Batch sizes from numbers of tokens on, such as "0:16 2.4B:320"; instead of --global-batch-size."""
    seq_length: Annotated[int | None, Required("1024"), at_least(1), NAMED] = None
    """Tokens per sequence. Required."""
    # The length is the learning rate's where its curve has none of its own.
    train_iters: Annotated[
        int | None, at_least(1), FREE, excludes("train_samples", "{} and {} both give the length of the run")
    ] = None
    """Steps to train. This or --train-samples is required."""
    train_samples: Annotated[int | None, at_least(1), FREE] = None
    """Sequences to train on, instead of --train-iters."""
    exit_interval: Annotated[int | None, at_least(1), FREE] = None
    """Save and stop after an iteration that is a multiple of this, with exit status 0."""
    exit_duration_in_mins: Annotated[float | None, ABOVE_0, FREE] = None
    """Save and stop after this many minutes."""
    exit_signal_handler: Annotated[bool, FREE] = False
    """Save and stop after the iteration in which any rank gets --exit-signal or a first Ctrl-C; repeats are ignored."""
    exit_signal: Annotated[
        Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"],
        FREE,
        needs("exit_signal_handler", "no signal is caught"),
    ] = "SIGTERM"
    """Which signal, with --exit-signal-handler."""
    # numpy's RandomState, which Megatron shuffles with, takes no more
    seed: Annotated[int, Range("at least 0 and below 2^32", lambda v: 0 <= v < 2**32), NAMED] = 1234
    """Seed of initial weights, data order and dropout."""
    calculate_per_token_loss: Annotated[bool, NAMED] = False
    """Divide by the tokens of the whole global batch instead of averaging the microbatches' means."""
    # The tensors of a checkpoint say their types.
    bf16: Annotated[bool, FREE, excludes("fp16", "{} and {} are two types for the same weights")] = False
    """Compute in bfloat16; gradients, main parameters and optimizer state stay float32."""
    fp16: Annotated[bool, FREE] = False
    """Compute in float16 with a loss scale; gradients, main parameters and optimizer state stay float32."""
    loss_scale: Annotated[float | None, ABOVE_0, NAMED] = None
    """Multiply the loss by this before backward, and divide the gradient. Default: with --fp16 dynamic, else 1."""
    initial_loss_scale: Annotated[float, ABOVE_0, FREE, SCALE_MOVES] = 2.0**32
    """First dynamic loss scale."""
    min_loss_scale: Annotated[float, ABOVE_0, NAMED, SCALE_MOVES] = 1.0
    """Least dynamic loss scale."""
    loss_scale_window: Annotated[float, at_least(1), NAMED, SCALE_MOVES] = 1000.0
    """Steps without overflow after which the dynamic loss scale is doubled."""
    hysteresis: Annotated[int, at_least(1), NAMED, SCALE_MOVES] = 2
    """Overflows between two increases at which the dynamic loss scale begins to be halved."""
    grad_reduce_in_bf16: Annotated[bool, NAMED, REPLICAS, demands("bf16")] = False
    """Sum gradients over data-parallel ranks in bfloat16: half the bytes, three digits less. Added up in float32."""
    use_precision_aware_optimizer: Annotated[
        bool,
        NAMED,
        needs("main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype", "all is kept in float32", "bf16"),
    ] = False
    """Keep what the optimizer has in the types that --main-grads-dtype, --main-params-dtype, --exp-avg-dtype and
    --exp-avg-sq-dtype say. bf16 changes the numbers."""
    main_grads_dtype: Annotated[Literal["fp32", "bf16"], NAMED, ROUNDED, OF_BF16] = "fp32"
    """Of the gradients: microbatches are added up, and ranks summed, in it."""
    main_params_dtype: Annotated[Literal["fp32", "bf16"], NAMED, ROUNDED, OF_BF16] = "fp32"
    """Of the parameters that are updated. bf16: those of the model, with no other beside them."""
    exp_avg_dtype: Annotated[Literal["fp32", "bf16"], NAMED, ROUNDED] = "fp32"
    """Of Adam's first moment between steps; an update computes in float32."""
    exp_avg_sq_dtype: Annotated[Literal["fp32", "bf16"], NAMED, ROUNDED] = "fp32"
    """Of Adam's second moment between steps."""
    compile: Annotated[bool, FREE] = False
    """Compile the element-wise parts of layers with torch.compile; the same results to rounding. Not in Megatron-LM."""
    deterministic_mode: Annotated[bool, FREE] = False
    """Refuse kernels whose results differ from run to run."""
    manual_gc: Annotated[bool, FREE] = False
    """Collect Python's garbage on all ranks at once, around evaluations, and not whenever each wants to."""
    manual_gc_interval: Annotated[int, at_least(0), FREE, needs("manual_gc", "Python collects when it wants to")] = 0
    """Collect it every so many steps too; 0 for never."""
    no_manual_gc_eval: Annotated[bool, FREE, needs("manual_gc", "Python collects when it wants to")] = False
    """Do not collect it around evaluations."""
    freeze_all_layers: Annotated[bool, FREE] = False
    """Train nothing: run the forwards, report the losses, keep the weights. A provider freezes a part of a model."""
    optimizer: Annotated[str, NAMED] = "adam"
    """adam (AdamW, decoupled weight decay), sgd, muon, or FILE.py:NAME of your own."""
    lr: Annotated[float | None, Required("3e-4"), ABOVE_0, CURVE] = None
    """Peak learning rate. Required."""
    min_lr: Annotated[float, at_least(0), CURVE, FALLS] = 0.0
    """Learning rate at the end of the decay."""
    decoupled_lr: Annotated[float | None, ABOVE_0, NAMED] = None
    """Peak learning rate of word embeddings and output head. Default: --lr."""
    decoupled_min_lr: Annotated[float | None, at_least(0), NAMED, needs("decoupled_lr", "one rate for all"), FALLS] = (
        None
    )
    """Their learning rate at the end of the decay. Default: --min-lr."""
    lr_decay_style: Annotated[Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"], CURVE] = "linear"
    """Curve after the warm-up."""
    lr_decay_iters: Annotated[int | None, at_least(1), CURVE, HAS_CURVE] = None
    """Steps of the curve. Default: --train-iters."""
    lr_decay_samples: Annotated[int | None, at_least(1), CURVE, HAS_CURVE] = None
    """Sequences of the curve, with --train-samples."""
    lr_warmup_fraction: Annotated[
        float | None,
        BELOW_1,
        CURVE,
        excludes("lr_warmup_iters lr_warmup_samples", "{} and {} both give the warm-up"),
    ] = None
    """Warm-up as a fraction of the decay length."""
    lr_warmup_iters: Annotated[int, at_least(0), CURVE] = 0
    """Steps of linear warm-up."""
    lr_warmup_samples: Annotated[int, at_least(0), CURVE] = 0
    """Sequences of linear warm-up, with --train-samples."""
    lr_warmup_init: Annotated[
        float,
        at_least(0),
        CURVE,
        Idle(
            lambda c: not (c.train.lr_warmup_fraction or c.train.lr_warmup_iters or c.train.lr_warmup_samples),
            "the rate starts at --lr, without a warm-up",
        ),
    ] = 0.0
    """Learning rate at which the warm-up starts."""
    lr_wsd_decay_style: Annotated[Literal["exponential", "linear", "cosine", "minus_sqrt"], CURVE, OF_WSD] = (
        "exponential"
    )
    """Last part of the WSD curve."""
    lr_wsd_decay_iters: Annotated[int | None, at_least(1), CURVE, OF_WSD] = None
    """Steps of the last part of the WSD curve."""
    lr_wsd_decay_samples: Annotated[int | None, at_least(1), CURVE, OF_WSD] = None
    """Sequences of the last part of the WSD curve."""
    weight_decay: Annotated[
        float,
        at_least(0),
        CURVE,
        needs("weight_decay_incr_style", "it grows to --end-weight-decay", "constant"),
    ] = 0.01
    """Decoupled; not applied to biases and other one-dimensional parameters."""
    weight_decay_incr_style: Annotated[Literal["constant", "linear", "cosine"], CURVE] = "constant"
    """--weight-decay throughout, or growing over the whole run from --start-weight-decay to --end-weight-decay."""
    start_weight_decay: Annotated[float | None, at_least(0), CURVE, GROWS] = None
    """Weight decay of the first step, with --weight-decay-incr-style linear or cosine."""
    end_weight_decay: Annotated[float | None, at_least(0), CURVE, GROWS] = None
    """Weight decay at the end of the run, likewise."""
    clip_grad: Annotated[float, at_least(0), NAMED] = 1.0
    """Largest L2 norm of the whole gradient; 0 switches clipping off."""
    adam_beta1: Annotated[float, BELOW_1, NAMED, ADAM] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[float, BELOW_1, NAMED, ADAM] = 0.999
    """Decay of the second moment."""
    adam_eps: Annotated[float, ABOVE_0, NAMED, ADAM] = 1e-8
    """Added to the root of the second moment."""
    sgd_momentum: Annotated[float, BELOW_1, NAMED, SGD] = 0.9
    """Of sgd."""
    muon_momentum: Annotated[float, BELOW_1, NAMED, MUON] = 0.9
    """Of muon's matrices; the rest has adam's settings."""
    muon_no_split_qkv: Annotated[bool, NAMED, MUON] = False
    """Make the fused query, key and value orthogonal as one matrix, not as three."""
    muon_nesterov: Annotated[bool, NAMED, MUON] = False
    """Look one step of momentum ahead."""
    muon_num_ns_steps: Annotated[int, at_least(1), NAMED, MUON] = 5
    """Newton-Schulz steps that make the momentum orthogonal."""
    muon_coefficient_type: Annotated[Literal["quintic", "simple"], NAMED, MUON] = "quintic"
    """Of these steps: quintic has coefficients for each of five steps, in turn; simple Jordan's for all."""
    muon_scale_mode: Annotated[Literal["spectral", "shape_scaling", "unit_rms_norm"], NAMED, MUON] = "spectral"
    """Factor on muon's step: root of max(rows, columns), of max(1, rows / columns) (Jordan), or of rows / columns."""
    muon_extra_scale_factor: Annotated[float, ABOVE_0, NAMED, MUON] = 1.0
    """A further one; 0.2 makes spectral steps as large as adam's."""
    check_weight_hash_across_dp_replicas_interval: Annotated[
        int | None,
        at_least(1),
        FREE,
        Idle(lambda c: c.world_size == 1, "there is no replica, without several ranks"),
        excludes(
            "use_megatron_fsdp use_torch_fsdp2",
            "{} compares weights that {} leaves no rank whole",
            where=lambda c: c.parallel.shards_weights and c.weight_replicas > 1,
        ),
        excludes("fp8_param_gather", "{} compares weights that {} leaves no rank whole", where=lambda c: c.gathers_fp8),
    ] = None
    """Every so many steps compare a hash of all weights over their replicas, and stop if they differ."""
    no_check_for_nan_in_loss_and_grad: Annotated[bool, FREE] = False
    """Skip the update at a loss or gradient that is not finite, as a dynamic loss scale does, instead of stopping."""
    rerun_mode: Annotated[Literal["disabled", "validate_results"], FREE] = "validate_results"
    """validate_results: a step that is not finite is run a second time before the run stops for it."""
    error_injection_rate: Annotated[
        int,
        at_least(0),
        FREE,
        needs("rerun_mode", "no step is run again", "validate_results"),
    ] = 0
    """A drill: one in so many steps counts as wrong and is run again before its update; 0 for none."""
    error_injection_type: Annotated[
        Literal["correct_result", "transient_error", "persistent_error"],
        FREE,
        needs("error_injection_rate", "nothing is injected"),
    ] = "transient_error"
    """What the second run shows; after a persistent error the run stops, as if the step had come out wrong twice."""
    check_for_spiky_loss: Annotated[bool, FREE] = False
    """Run a step a second time before its update if its loss is 10 times the largest of the last 100."""
    max_bad_iterations_in_a_row: Annotated[int, at_least(1), FREE] = 10
    """Stop after so many that were skipped, or with --check-for-spiky-loss spiked; not while a loss scale falls. Not in
    Megatron-LM."""
    override_opt_param_scheduler: Annotated[
        bool,
        Spelled("override-opt_param-scheduler"),
        FREE,
        LOADS,
        excludes(
            "use_checkpoint_opt_param_scheduler",
            "{} takes the settings from the command line, {} from the checkpoint",
        ),
    ] = False
    """On --load take learning-rate and weight-decay settings from the command line, whatever the checkpoint says."""
    use_checkpoint_opt_param_scheduler: Annotated[bool, Spelled("use-checkpoint-opt_param-scheduler"), FREE, LOADS] = (
        False
    )
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
