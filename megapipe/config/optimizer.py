"""The optimizer, its learning rate, weight decay and clipping, and the types of its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megapipe.config.checkpoint import LOADS
from megapipe.config.notes import (
    ABOVE_0,
    BELOW_1,
    CURVE,
    FREE,
    FROM_0,
    FROM_1,
    NAMED,
    Idle,
    Required,
    Spelled,
    demands,
    excludes,
    needs,
    read_by,
)

_CONSTANT = "the rate does not fall, with --lr-decay-style constant"
FALLS = Idle(lambda c: c.optimizer.lr_decay_style == "constant", _CONSTANT)
HAS_CURVE = Idle(
    lambda c: c.optimizer.lr_decay_style == "constant" and c.optimizer.lr_warmup_fraction is None,
    _CONSTANT,
)
WARMS_UP = Idle(lambda c: not c.optimizer.warms_up, "the rate starts at --lr, without a warm-up")
ADAM = read_by("adam", "muon", instead="sgd has none of them")
SGD = read_by("sgd", instead="nothing reads it, without --optimizer sgd")
MUON = read_by("muon", instead="nothing reads it, without --optimizer muon")
OF_WSD = demands("lr_decay_style", "WSD")
GROWS = demands("weight_decay_incr_style", "linear", "cosine")
ROUNDED = demands(
    "use_precision_aware_optimizer",
    says="{} changes the numbers; say so with --use-precision-aware-optimizer.",
)
OF_BF16 = demands("bf16", says="{} is for weights of --bf16. Add it, or leave it out.")


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, learning rate, weight decay, clipping."""

    # The rule and its learning rate.
    optimizer: Annotated[str, NAMED] = "adam"
    """The optimizer: adam (AdamW, decoupled weight decay), sgd, muon, or FILE.py:NAME of your
    own."""
    # CURVE on --load: the rate goes on where it stopped, or a flag has to say which curve counts.
    lr: Annotated[float | None, Required("3e-4"), ABOVE_0, CURVE] = None
    """Peak learning rate. Required."""
    min_lr: Annotated[float, FROM_0, CURVE, FALLS] = 0.0
    """Learning rate at the end of the decay."""
    decoupled_lr: Annotated[float | None, ABOVE_0, NAMED] = None
    """Peak learning rate of word embeddings and output head. Default: --lr."""
    decoupled_min_lr: Annotated[
        float | None, FROM_0, NAMED, needs("decoupled_lr", "one rate for all"), FALLS
    ] = None
    """Learning rate of word embeddings and output head at the end of the decay. Default:
    --min-lr."""
    lr_decay_style: Annotated[
        Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"], CURVE
    ] = "linear"
    """Curve of the learning rate after the warm-up. WSD: constant, then decay in the last
    --lr-wsd-decay-iters."""
    lr_decay_iters: Annotated[int | None, FROM_1, CURVE, HAS_CURVE] = None
    """Number of steps over which the learning rate decays, warm-up included. Default:
    --train-iters."""
    lr_decay_samples: Annotated[int | None, FROM_1, CURVE, HAS_CURVE] = None
    """Number of sequences over which the learning rate decays, with --train-samples. Default:
    --train-samples."""
    lr_warmup_fraction: Annotated[
        float | None,
        BELOW_1,
        CURVE,
        excludes("lr_warmup_iters lr_warmup_samples", "{} and {} both give the warm-up"),
    ] = None
    """Length of the linear warm-up as a fraction of the decay, at least 0 and below 1. Default:
    --lr-warmup-iters."""
    lr_warmup_iters: Annotated[int, FROM_0, CURVE] = 0
    """Number of steps of linear warm-up."""
    lr_warmup_samples: Annotated[int, FROM_0, CURVE] = 0
    """Number of sequences of linear warm-up, with --train-samples."""
    lr_warmup_init: Annotated[float, FROM_0, CURVE, WARMS_UP] = 0.0
    """Learning rate at the start of the warm-up."""
    lr_wsd_decay_style: Annotated[
        Literal["exponential", "linear", "cosine", "minus_sqrt"], CURVE, OF_WSD
    ] = "exponential"
    """Curve of the decay at the end of --lr-decay-style WSD."""
    lr_wsd_decay_iters: Annotated[int | None, FROM_1, CURVE, OF_WSD] = None
    """Number of steps of the decay at the end of --lr-decay-style WSD."""
    lr_wsd_decay_samples: Annotated[int | None, FROM_1, CURVE, OF_WSD] = None
    """Number of sequences of the decay at the end of --lr-decay-style WSD, with
    --train-samples."""
    # Weight decay and clipping.
    weight_decay: Annotated[
        float,
        FROM_0,
        CURVE,
        needs("weight_decay_incr_style", "it grows to --end-weight-decay", "constant"),
    ] = 0.01
    """Coefficient of the decoupled weight decay. Biases and other one-dimensional parameters have
    none."""
    weight_decay_incr_style: Annotated[Literal["constant", "linear", "cosine"], CURVE] = "constant"
    """Curve of the weight decay. constant: --weight-decay. linear, cosine: it grows over the run
    from --start-weight-decay to --end-weight-decay."""
    start_weight_decay: Annotated[float | None, FROM_0, CURVE, GROWS] = None
    """Weight decay of the first step, with --weight-decay-incr-style linear or cosine."""
    end_weight_decay: Annotated[float | None, FROM_0, CURVE, GROWS] = None
    """Weight decay at the end of the run, with --weight-decay-incr-style linear or cosine."""
    clip_grad: Annotated[float, FROM_0, NAMED] = 1.0
    """Largest L2 norm of the whole gradient; a larger gradient is scaled down to it. 0: do not
    clip."""
    # Settings of the rules.
    # Defaults are Megatron-LM's, of its Muon as well.
    adam_beta1: Annotated[float, BELOW_1, NAMED, ADAM] = 0.9
    """Decay per step of Adam's first moment."""
    adam_beta2: Annotated[float, BELOW_1, NAMED, ADAM] = 0.999
    """Decay per step of Adam's second moment."""
    adam_eps: Annotated[float, ABOVE_0, NAMED, ADAM] = 1e-8
    """Number that Adam adds to the root of the second moment."""
    sgd_momentum: Annotated[float, BELOW_1, NAMED, SGD] = 0.9
    """Momentum of sgd."""
    muon_momentum: Annotated[float, BELOW_1, NAMED, MUON] = 0.9
    """Momentum of the matrices that muon updates. The other parameters have adam's settings."""
    muon_no_split_qkv: Annotated[bool, NAMED, MUON] = False
    """Let muon make the fused query, key and value orthogonal as one matrix. Default: as three."""
    muon_nesterov: Annotated[bool, NAMED, MUON] = False
    """Let muon look one step of momentum ahead (Nesterov)."""
    muon_num_ns_steps: Annotated[int, FROM_1, NAMED, MUON] = 5
    """Number of Newton-Schulz steps in which muon makes the momentum orthogonal."""
    muon_coefficient_type: Annotated[Literal["quintic", "simple"], NAMED, MUON] = "quintic"
    """Coefficients of the Newton-Schulz steps. quintic: a set for each of five steps, in turn.
    simple: Jordan's, the same for all steps."""
    muon_scale_mode: Annotated[
        Literal["spectral", "shape_scaling", "unit_rms_norm"], NAMED, MUON
    ] = "spectral"
    """Factor on muon's step. spectral: root of max(rows, columns). shape_scaling: root of
    max(1, rows / columns) (Jordan). unit_rms_norm: root of rows / columns."""
    muon_extra_scale_factor: Annotated[float, ABOVE_0, NAMED, MUON] = 1.0
    """Further factor on muon's step. 0.2 makes spectral steps as large as adam's."""
    # Types of gradients, parameters and state.
    # A switch of its own, as in Megatron-LM: no type alone may change the numbers.
    use_precision_aware_optimizer: Annotated[
        bool,
        NAMED,
        needs(
            "main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype",
            "all is kept in float32",
            "bf16",
        ),
    ] = False
    """Keep gradients, parameters and moments in the types of --main-grads-dtype,
    --main-params-dtype, --exp-avg-dtype and --exp-avg-sq-dtype. bf16 changes the numbers."""
    main_grads_dtype: Annotated[Literal["fp32", "bf16"], NAMED, ROUNDED, OF_BF16] = "fp32"
    """Type of the gradients, in which microbatches are added and ranks are summed."""
    main_params_dtype: Annotated[Literal["fp32", "bf16"], NAMED, ROUNDED, OF_BF16] = "fp32"
    """Type of the parameters that are updated. bf16: the model's own, without a copy in
    float32."""
    exp_avg_dtype: Annotated[Literal["fp32", "bf16"], NAMED, ROUNDED] = "fp32"
    """Type of Adam's first moment between steps. Updates compute in float32."""
    exp_avg_sq_dtype: Annotated[Literal["fp32", "bf16"], NAMED, ROUNDED] = "fp32"
    """Type of Adam's second moment between steps. Updates compute in float32."""
    # The curves on --load.
    # Spelled as in Megatron-LM, with underscores within.
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
    """Take learning-rate and weight-decay settings from the command line on --load, even if the
    checkpoint has others. Default: refuse others."""
    use_checkpoint_opt_param_scheduler: Annotated[
        bool, Spelled("use-checkpoint-opt_param-scheduler"), FREE, LOADS
    ] = False
    """Take learning-rate and weight-decay settings from the checkpoint on --load."""
    freeze_all_layers: Annotated[bool, FREE] = False
    """Train nothing: run the forwards, report the losses, keep the weights. To freeze a part of a
    model, use --model-provider."""

    @property
    def warms_up(self) -> bool:
        """Return whether the learning rate rises in the first steps."""
        return bool(self.lr_warmup_fraction or self.lr_warmup_iters or self.lr_warmup_samples)
