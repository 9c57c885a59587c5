"""The optimizer, its learning rate, weight decay and clipping, and the types of what it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megapipe.config.files import LOADS
from megapipe.config.notes import (
    ABOVE_0,
    BELOW_1,
    CURVE,
    FREE,
    NAMED,
    Idle,
    Required,
    Spelled,
    at_least,
    demands,
    excludes,
    needs,
    read_by,
)

_CONSTANT = "the rate does not fall, with --lr-decay-style constant"
FALLS = Idle(lambda c: c.optimizer.lr_decay_style == "constant", _CONSTANT)
HAS_CURVE = Idle(
    lambda c: c.optimizer.lr_decay_style == "constant" and c.optimizer.lr_warmup_fraction is None, _CONSTANT
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
class OptimizerConfig:
    """Optimizer, learning rate, weight decay, clipping."""

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
        Idle(lambda c: not c.optimizer.warms_up, "the rate starts at --lr, without a warm-up"),
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
    """Type of the parameters that are updated. bf16: the model's own are, without a copy in float32."""
    exp_avg_dtype: Annotated[Literal["fp32", "bf16"], NAMED, ROUNDED] = "fp32"
    """Of Adam's first moment between steps; an update computes in float32."""
    exp_avg_sq_dtype: Annotated[Literal["fp32", "bf16"], NAMED, ROUNDED] = "fp32"
    """Of Adam's second moment between steps."""
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
    freeze_all_layers: Annotated[bool, FREE] = False
    """Train nothing: run the forwards, report the losses, keep the weights. A provider freezes a part of a model."""

    @property
    def warms_up(self) -> bool:
        return bool(self.lr_warmup_fraction or self.lr_warmup_iters or self.lr_warmup_samples)
