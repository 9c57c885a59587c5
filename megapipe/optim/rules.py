"""The rules that --optimizer names: adam, sgd, muon, or a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import cycle, islice

import torch
from torch import Tensor

from megapipe.config import OptimizerConfig
from megapipe.errors import ConfigError
from megapipe.named import find_named
from megapipe.optim.adamw import sweep
from megapipe.optim.rule import Part, Rule, multiply
from megapipe.optim.traits import FLAG, KNOWN


class Adam:
    """The optimizer AdamW. Parameters, gradients and state may be stored in 16 bits.

    `update` updates parameters in place. `flags` are the optimizer's flags.
    """

    elementwise, may_round, state = KNOWN["adam"]
    sweeps = True
    keeps_grad = True

    def __init__(self, flags: OptimizerConfig) -> None:
        self.flags = flags

    def update(self, parts: Sequence[Part], steps: int) -> None:
        """Update parameters in place. Tensors in 16 bits are updated in float32, and then rounded.

        `steps` is the number of updates before this one.
        """
        for part in parts:
            if not _is_narrow(part):
                sweep(part, self.flags, steps)
                continue
            # Stored gradients get the factors too: a step that is undone reads them again.
            multiply(part.grad, part.factors)
            for piece, rounded in _pieces(part):
                self.update([piece], steps)
                for stored, wide in rounded:
                    stored.copy_(wide)
            part.round_value()


PIECE = 1 << 20
"""Elements of 16-bit state that are updated at a time, so that float32 copies stay small."""


def wide_of(x: Tensor) -> torch.dtype:
    """Return the type in which an update of this tensor is computed: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def _is_narrow(part: Part) -> bool:
    """Return whether a part's value, gradient or state has fewer bits than its update needs."""
    wide = wide_of(part.value)
    return any(x.dtype != wide for x in (part.value, part.grad, *part.state.values()))


def _pieces(part: Part) -> Iterator[tuple[Part, list[tuple[Tensor, Tensor]]]]:
    """Yield (piece, copies) for each PIECE elements of some parameters, copied to at least float32.

    A piece is a Part with the copies. `copies` are (stored tensor, its copy in the wider type). The
    caller updates the piece, and then rounds each copy to its stored tensor.
    """
    dtype = wide_of(part.value)
    for start in range(0, part.value.numel(), PIECE):
        elements = slice(start, start + PIECE)
        # The empty name stands for the parameters themselves.
        stored = {"": part.value[elements]}
        for kind, x in part.state.items():
            stored[kind] = x[elements]
        wide = {kind: x.to(dtype) for kind, x in stored.items()}
        piece = replace(
            part,
            value=wide[""],
            grad=part.grad[elements].to(dtype),
            factors=(1.0, 1.0),
            model=None,
            state={kind: x for kind, x in wide.items() if kind},
        )
        # `to` returns the stored tensor itself if it has the type already.
        yield piece, [(x, wide[kind]) for kind, x in stored.items() if wide[kind] is not x]


class Sgd:
    """SGD with momentum, as in torch.optim: m = beta * m + g + decay * w; w -= lr * m.

    m is the momentum, g the gradient, w the weight, and beta is --sgd-momentum.

    `update` updates parameters in place. `flags` are the optimizer's flags.
    """

    elementwise, may_round, state = KNOWN["sgd"]
    keeps_grad = True

    def __init__(self, flags: OptimizerConfig) -> None:
        self.flags = flags

    def update(self, parts: Sequence[Part], steps: int) -> None:
        """Update parameters in place. `steps` is the number of updates before this one."""
        for part in parts:
            grad = part.grad
            if part.weight_decay:
                grad = grad.add(part.value, alpha=part.weight_decay)
            # The gradient enters with weight 1, as with torch's default dampening of 0.
            momentum = part.state["momentum"].mul_(self.flags.sgd_momentum).add_(grad)
            part.value.add_(momentum, alpha=-part.lr)


class Muon:
    """The optimizer Muon for matrices between embedding and head, AdamW for other parameters.

    Muon orthogonalises the momentum by Newton-Schulz (Jordan 2024,
    kellerjordan.github.io/posts/muon). A matrix is gathered over tensor parallelism, and each rank
    orthogonalises all of it. As in Megatron-LM, gate and value of SwiGLU are one matrix. Queries,
    keys and values of all heads are three matrices, and each expert has its own matrix. `update`
    updates parameters in place. `flags` are the optimizer's flags.
    """

    elementwise, may_round, state = KNOWN["muon"]
    keeps_grad = True

    def __init__(self, flags: OptimizerConfig) -> None:
        self.flags = flags
        self.rest = Adam(flags)

    def update(self, parts: Sequence[Part], steps: int) -> None:
        """Update the parts in place.

        Collective over tensor parallelism. `steps` is the number of updates before this one.
        """
        matrices = []
        others = []
        for part in parts:
            if is_matrix(part):
                matrices.append(part)
            else:
                others.append(part)
        self.rest.update(others, steps)
        for part in matrices:
            beta = self.flags.muon_momentum
            momentum = part.state["exp_avg"].lerp_(part.grad, 1 - beta)
            step = momentum
            if self.flags.muon_nesterov:
                step = part.grad.lerp(momentum, beta)
            whole = part.whole(step)
            fused = () if self.flags.muon_no_split_qkv else part.layout.fused
            # The first dimension of experts counts them.
            each = whole if part.layout.experts else whole[None]
            made = [self._orthogonal(matrix.flatten(0, -2), fused) for matrix in each]
            towards = torch.stack(made).view(whole.shape)
            decayed = part.value.mul_(1 - part.lr * part.weight_decay)
            decayed.sub_(part.mine(towards), alpha=part.lr)

    def _orthogonal(self, x: Tensor, fused: tuple[int, ...]) -> Tensor:
        """Return x [rows, columns] after orthogonalising and scaling it as --muon-scale-mode says.

        Args:
            fused: () if x is one matrix. Otherwise the rows of several matrices alternate, and
                these are the numbers of rows: (2, 1, 1) for rows q q k v q q k v. Each matrix is
                orthogonalised separately.
        """
        # Groups of rows of several matrices alternate: each matrix is orthogonalised by itself.
        if fused:
            matrices = x.view(-1, sum(fused), x.shape[-1]).split_with_sizes(fused, 1)
            made = [self._orthogonal(m.flatten(0, 1), ()).view(m.shape) for m in matrices]
            return torch.cat(made, 1).flatten(0, 1)
        flags = self.flags
        rows, columns = x.shape
        by_mode: dict[str, float] = {
            "spectral": max(rows, columns) ** 0.5,
            "shape_scaling": max(1.0, rows / columns) ** 0.5,
            "unit_rms_norm": (rows / columns) ** 0.5,
        }
        scale = by_mode[flags.muon_scale_mode] * flags.muon_extra_scale_factor
        # A GPU multiplies bfloat16 many times as fast as float32 (by an H100's data sheet, 989
        # TFLOP/s instead of 67), and the steps tolerate its rounding (Jordan 2024).
        dtype = torch.bfloat16 if x.is_cuda else x.dtype
        coefficients = NEWTON_SCHULZ[flags.muon_coefficient_type]
        return newton_schulz(x, flags.muon_num_ns_steps, coefficients, dtype) * scale


def is_matrix(part: Part) -> bool:
    """Return whether Muon updates the one parameter of this part; otherwise AdamW does.

    Embeddings and the output head have a row for each token, and a convolution has a few taps for
    each channel; AdamW updates them.
    """
    (name,) = part.names
    # The first dimension of experts counts them: their biases [experts, outputs] are no matrix.
    dimensions = part.value.ndim - int(part.layout.experts)
    others = ("embedding", "output_layer", "conv1d")
    return dimensions > 1 and not any(other in name for other in others)


NEWTON_SCHULZ = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    # leloykun.github.io/ponder/muon-opt-coeffs
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
"""Coefficients (a, b, c) of the steps, repeated from the first after the last."""


def newton_schulz(
    x: Tensor,
    steps: int,
    coefficients: Sequence[tuple[float, float, float]],
    products: torch.dtype | None,
) -> Tensor:
    """Return approximately U V^T, given x [rows, columns] with the decomposition U S V^T.

    After five steps, singular values above 1/500 of x's Frobenius norm are between 0.6 and 1.3.
    Smaller ones may stay below 0.6.

    Args:
        steps: number of steps.
        coefficients: (a, b, c) of each step.
        products: dtype in which the steps are computed; None for x.dtype.
    """
    dtype = x.dtype
    # The gram matrix is smaller if rows are the shorter dimension.
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    # The iteration converges for singular values up to 1, which the Frobenius norm ensures.
    x = (x / torch.linalg.matrix_norm(x).clamp_min(1e-7)).to(products or dtype)
    for a, b, c in islice(cycle(coefficients), steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    if tall:
        x = x.mT
    return x.to(dtype)


_RULES: dict[str, Callable[[OptimizerConfig], Rule]] = {"adam": Adam, "sgd": Sgd, "muon": Muon}


def find_rule(flags: OptimizerConfig) -> Rule:
    """Return the optimizer's formula that --optimizer asks for.

    Raises: ConfigError for an unknown name, or if FILE.py:NAME does not return a Rule.
    """
    name = flags.optimizer
    if name in _RULES:
        return _RULES[name](flags)
    if ":" not in name:
        near = get_close_matches(name, _RULES, n=1)
        hint = f"there are {', '.join(_RULES)}, and FILE.py:NAME of your own"
        if near:
            hint = f"did you mean {near[0]}?"
        raise ConfigError(f"{FLAG} {name}: {hint}")
    try:
        rule = find_named(name, FLAG, "my_optimizer:make")(flags)
    except ConfigError as error:
        raise ConfigError(f"{FLAG} {error}") from None
    if not isinstance(rule, Rule):
        raise ConfigError(
            f"{FLAG} {name} gives a {type(rule).__name__}, which has not elementwise, state and "
            "update"
        )
    return rule
