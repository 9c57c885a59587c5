"""The activations of the MLP: a row for each, by the names of `config.model.activation`.

A row has the function in torch's operations, which say its derivative too. Some have a version of
their own, with a derivative written by hand. Every one keeps one tensor for backward: its input, or
another one of that size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.config.model.activation import ACTIVATIONS
from megapipe.distributed.layout import Layout, parameter
from megapipe.models.fused import swiglu
from megapipe.models.gelu import gelu
from megapipe.models.recompute import from_inputs

QUICK = 1.702
"""x sigmoid(1.702 x) approximates GELU (Hendrycks and Gimpel 2016): "quick GELU"."""


class Row(NamedTuple):
    """The computation of one activation function, and of its derivative.

    Attributes:
        plain: (output of the MLP's first layer, configuration, learned scalars) -> input of the
            last layer, in torch's operations.
        again: True if backward runs `plain` again, because autograd would keep more than the input.
        own: the same function of the first layer's output alone, with a derivative written by hand;
            None if there is only `plain`.
    """

    plain: Callable[..., Tensor]
    again: bool = False
    own: Callable[[Tensor], Tensor] | None = None


def _gated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, ModelConfig], Tensor]:
    """Return the activation (x, config) -> function(gate) * (up + offset) of a gated MLP.

    x is [gate, up]. The configuration says the offset, and to which values gate and up are clamped.

    Args:
        function: the activation of the gate, such as silu.
    """

    def apply(x: Tensor, config: ModelConfig) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        most = config.activation_func_clamp_value
        if most is not None:
            gate = gate.clamp(max=most)
            up = up.clamp(-most, most)
        if config.glu_linear_offset:
            up = up + config.glu_linear_offset
        return function(gate) * up

    return apply


def _xielu(
    x: Tensor, config: ModelConfig, above: Tensor, below: Tensor, beta: Tensor, eps: Tensor
) -> Tensor:
    """Return xIELU of x (Huang and Schlag 2024, arXiv 2411.13010).

    Args:
        above, below: [1], the learned scalars for x above 0 and below it.
        beta: [], the slope at 0. eps: [], the largest argument of the exponential.
    """
    positive = F.softplus(above)
    negative = beta + F.softplus(below)
    return torch.where(
        x > 0,
        positive * x * x + beta * x,
        (torch.expm1(torch.min(x, eps)) - x) * negative + beta * x,
    )


def _plain_gelu(x: Tensor, config: ModelConfig) -> Tensor:
    if config.erf_gelu:
        return F.gelu(x)
    return gelu(x)


ROWS: dict[str, Row] = {
    "swiglu": Row(_gated(F.silu), again=True, own=swiglu),
    "quick_geglu": Row(_gated(lambda gate: gate * torch.sigmoid(QUICK * gate)), again=True),
    "geglu": Row(_gated(lambda gate: F.gelu(gate, approximate="tanh")), again=True),
    "squared_relu": Row(lambda x, config: F.relu(x).square()),
    "xielu": Row(_xielu, again=True),
    "gelu": Row(_plain_gelu),
}
assert ROWS.keys() == ACTIVATIONS.keys()


def function_of(config: ModelConfig) -> Callable[..., Tensor]:
    """Return the configured activation, as a function that autograd differentiates.

    The function takes the output of an MLP's first layer, [..., ffn], or [..., 2 ffn] = [gate, up]
    of a gated MLP. For --xielu the function also takes the four scalars of `Xielu`. The result is
    [..., ffn].
    """
    row = ROWS[config.activation]
    # torch.compile fuses plain operations itself.
    if row.own is not None and config.plain_swiglu and not torch.compiler.is_compiling():
        return row.own
    return lambda x, *scalars: row.plain(x, config, *scalars)


def activate(x: Tensor, config: ModelConfig, *scalars: Tensor) -> Tensor:
    """Apply the configured activation, and keep one tensor like x, and `scalars`, for backward.

    Under torch.compile the compiler decides which tensors are kept.

    Args:
        x: [..., ffn], the output of the MLP's first layer; [..., 2 ffn] for a gated MLP.
        scalars: `Xielu.scalars` with --xielu. Other activations have none.
    Returns: [..., ffn].
    """
    function = function_of(config)
    row = ROWS[config.activation]
    has_own = row.own is function
    if row.again and not has_own and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return from_inputs(function, x, *scalars)
    return function(x, *scalars)


class Xielu(nn.Module):
    """The scalars of an MLP's xIELU activation: two learned ones, and two constants.

    Files have the constants too: `xielu_beta` and `xielu_eps`. Each tensor-parallel rank has all
    scalars, and their gradients from its own channels.
    """

    xielu_beta: Tensor
    xielu_eps: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Both slopes begin at 0.8. Below 0 beta is added to the softplus.
        self.alpha_p = _scalar(0.8)
        self.alpha_n = _scalar(0.3)
        self.register_buffer("xielu_beta", torch.tensor(0.5))
        self.register_buffer("xielu_eps", torch.tensor(-1e-6))

    @property
    def scalars(self) -> tuple[Tensor, ...]:
        """All four scalars, learned and constant, as arguments of `activate`."""
        return self.alpha_p, self.alpha_n, self.xielu_beta, self.xielu_eps


def _scalar(start: float) -> nn.Parameter:
    """Return a learned scalar [1] whose softplus begins at `start`."""
    layout = Layout((1,), mean=math.log(math.expm1(start)), sum_over_tp=True)
    return parameter(layout)
