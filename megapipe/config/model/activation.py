"""The activation between the two layers of an MLP: which one, and its constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from megapipe.config.notes import (
    ABOVE_0,
    FINITE,
    MUST,
    Idle,
    demands,
    excludes,
    of_no_layer,
)

ONE_MLP = "{} and {} are different activations of one MLP"


class Kind(NamedTuple):
    """The properties of an activation that decide a model's sizes and memory.

    Attributes:
        gated: the MLP's first layer has two halves, gate and up.
        kept: number of tensors [tokens, width] that an MLP keeps for backward. These are the output
            of the first layer (two tensors with a gate) and the input of the last.
        weights: number of learned scalars of the activation itself, such as 2 for xIELU.
    """

    gated: bool
    kept: int
    weights: int = 0


ACTIVATIONS = {
    "swiglu": Kind(True, 3),
    "quick_geglu": Kind(True, 3),
    "geglu": Kind(True, 3),
    "squared_relu": Kind(False, 2),
    "xielu": Kind(False, 2, weights=2),
    "gelu": Kind(False, 2),
}
"""By the name of the field that chooses it; gelu is chosen by none. `models.activations` has the
functions."""


@dataclass(frozen=True)
class ActivationConfig:
    """The activation of the MLP, GELU by default."""

    swiglu: Annotated[bool, MUST, excludes("quick_geglu geglu squared_relu xielu", ONE_MLP)] = False
    """Use a gated SiLU in the MLP instead of GELU."""
    quick_geglu: Annotated[bool, MUST, excludes("geglu squared_relu xielu", ONE_MLP)] = False
    """Use a gated GELU in the MLP, in the form x sigmoid(1.702 x), instead of GELU."""
    geglu: Annotated[bool, MUST, excludes("squared_relu xielu", ONE_MLP)] = False
    """Use a gated GELU in the MLP, in its tanh form, as Gemma. Not in Megatron-LM."""
    squared_relu: Annotated[bool, MUST, excludes("xielu", ONE_MLP)] = False
    """Use a squared ReLU in the MLP instead of GELU."""
    xielu: Annotated[
        bool,
        MUST,
        excludes(
            "num_experts", "{} has two learned scalars for each MLP, and {} has none for them"
        ),
    ] = False
    """Use xIELU in the MLP, with two learned scalars, as Apertus. Not in Megatron-LM."""
    activation_func_clamp_value: Annotated[
        float | None,
        ABOVE_0,
        MUST,
        demands(
            "swiglu quick_geglu geglu",
            says="{} clamps gate and up of a gated MLP. Add --swiglu, --quick-geglu or --geglu.",
        ),
    ] = None
    """Limit the gate of a gated MLP from above, and up on both sides, to this value; 7 in gpt-oss.
    Default: no limit."""
    glu_linear_offset: Annotated[
        float,
        FINITE,
        MUST,
        of_no_layer(lambda m: not m.gated, "the MLP has no gate, and nothing to add the offset to"),
    ] = 0.0
    """Number that is added to up, the half of a gated MLP without the activation; 1 in gpt-oss."""
    no_bias_gelu_fusion: Annotated[
        bool,
        MUST,
        Idle(
            lambda c: c.model.activation != "gelu",
            "the MLP has another activation, without GELU",
        ),
        of_no_layer(
            lambda m: m.disable_bias_linear,
            "GELU has its erf form anyway, with --disable-bias-linear",
        ),
    ] = False
    """Compute GELU exactly, by erf, as Megatron-LM does where it does not fuse. Default: the tanh
    form, but erf with --disable-bias-linear."""

    @property
    def activation(self) -> str:
        """Name of the activation, a key of ACTIVATIONS."""
        chosen = {
            "swiglu": self.swiglu,
            "quick_geglu": self.quick_geglu,
            "geglu": self.geglu,
            "squared_relu": self.squared_relu,
            "xielu": self.xielu,
        }
        return next((name for name, given in chosen.items() if given), "gelu")

    @property
    def gated(self) -> bool:
        """Return whether the MLP's first layer has two halves, gate and up."""
        return ACTIVATIONS[self.activation].gated

    @property
    def plain_swiglu(self) -> bool:
        """Return whether the activation is SwiGLU as it was published: no limit, and no offset."""
        unchanged = self.activation_func_clamp_value is None and not self.glu_linear_offset
        return self.swiglu and unchanged
