"""The rules that --optimizer names: adam, sgd, muon, or a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import cycle, islice

import torch
from torch import Tensor

from megapipe.config import TrainConfig
from megapipe.errors import ConfigError
from megapipe.named import find_named
from megapipe.optim.adamw import sweep
from megapipe.optim.rule import Part, Rule, multiply

FLAG = "--optimizer"


class Adam:
    """AdamW (adamw.py), of state with 16 bits too."""

    elementwise, may_round, sweeps, keeps_grad = True, True, True, True
    state: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, train: TrainConfig) -> None:
        self.train = train

    def update(self, parts: Sequence[Part], steps: int) -> None:
        for part in parts:
            if not _is_rounded(part):
                sweep(part, self.train, steps)
                continue
            multiply(part.grad, part.factors)
            for piece, rounded in _pieces(part):
                self.update([piece], steps)
                for its, wide in rounded:
                    its.copy_(wide)
            part.round_value()


PIECE = 1 << 20
"""Elements that an update of rounded state computes with at a time, which bounds what it needs beside them."""


def wide_of(x: Tensor) -> torch.dtype:
    """The type that an update computes in."""
    return torch.promote_types(x.dtype, torch.float32)


def _is_rounded(part: Part) -> bool:
    return any(x.dtype != wide_of(part.value) for x in (part.value, part.grad, *part.state.values()))


def _pieces(part: Part) -> Iterator[tuple[Part, list[tuple[Tensor, Tensor]]]]:
    """The part in the type of its update, a piece at a time, with its pairs of (kept, updated) to copy back."""
    dtype = wide_of(part.value)
    for start in range(0, part.value.numel(), PIECE):
        kept = {kind: x[start : start + PIECE] for kind, x in {"": part.value, **part.state}.items()}
        wide = {kind: x.to(dtype) for kind, x in kept.items()}
        grad = part.grad[start : start + PIECE].to(dtype)
        piece = replace(
            part,
            value=wide[""],
            grad=grad,
            factors=(1.0, 1.0),
            model=None,
            state={kind: x for kind, x in wide.items() if kind},
        )
        yield piece, [(x, wide[kind]) for kind, x in kept.items() if wide[kind] is not x]


class Sgd:
    """m = momentum m + gradient + weight decay x weight; weight -= lr m. As torch.optim.SGD."""

    elementwise, keeps_grad = True, True
    state: tuple[str, ...] = ("momentum",)

    def __init__(self, train: TrainConfig) -> None:
        self.train = train

    def update(self, parts: Sequence[Part], steps: int) -> None:
        for part in parts:
            grad = part.grad.add(part.value, alpha=part.weight_decay) if part.weight_decay else part.grad
            momentum = part.state["momentum"].mul_(self.train.sgd_momentum).add_(grad)
            part.value.add_(momentum, alpha=-part.lr)


class Muon:
    """Momentum made orthogonal by Newton-Schulz for the matrices between embedding and head (Jordan 2024,
    kellerjordan.github.io/posts/muon), AdamW for all the rest.

    A matrix is orthogonalised whole, gathered over tensor parallel, the same on each rank: the gate and the value of
    SwiGLU as one, query, key and value of all heads as three, as Megatron-LM does; of experts each by itself.
    """

    elementwise, keeps_grad = False, True
    state: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, train: TrainConfig) -> None:
        self.train, self.rest = train, Adam(train)

    def update(self, parts: Sequence[Part], steps: int) -> None:
        matrices = [part for part in parts if is_matrix(part)]
        self.rest.update([part for part in parts if not is_matrix(part)], steps)
        for part in matrices:
            momentum = part.state["exp_avg"].lerp_(part.grad, 1 - self.train.muon_momentum)
            step = part.grad.lerp(momentum, self.train.muon_momentum) if self.train.muon_nesterov else momentum
            whole = part.whole(step)
            fused = () if self.train.muon_no_split_qkv else part.layout.fused
            each = whole if part.layout.experts else whole[None]
            made = [self._orthogonal(matrix.flatten(0, -2), fused) for matrix in each]
            towards = torch.stack(made).view(whole.shape)
            part.value.mul_(1 - part.lr * part.weight_decay).sub_(part.mine(towards), alpha=part.lr)

    def _orthogonal(self, x: Tensor, fused: tuple[int, ...]) -> Tensor:
        """x [rows, columns] with its matrices orthogonal and scaled. fused: as in Layout."""
        if fused:
            matrices = x.view(-1, sum(fused), x.shape[-1]).split_with_sizes(fused, 1)
            made = [self._orthogonal(m.flatten(0, 1), ()).view(m.shape) for m in matrices]
            return torch.cat(made, 1).flatten(0, 1)
        t, (rows, columns) = self.train, x.shape
        by_mode: dict[str, float] = {
            "spectral": max(rows, columns) ** 0.5,
            "shape_scaling": max(1.0, rows / columns) ** 0.5,
            "unit_rms_norm": (rows / columns) ** 0.5,
        }
        scale = by_mode[t.muon_scale_mode] * t.muon_extra_scale_factor
        # A GPU multiplies bfloat16 many times as fast (an H100's data sheet: 989 TFLOP/s beside 67 in float32), and the
        # steps forgive its rounding (Jordan 2024).
        products = torch.bfloat16 if x.is_cuda else x.dtype
        return newton_schulz(x, t.muon_num_ns_steps, NEWTON_SCHULZ[t.muon_coefficient_type], products) * scale


def is_matrix(part: Part) -> bool:
    """Return whether Muon updates it. Embeddings and the output head have a row for each token, and stay AdamW's."""
    (name,) = part.names
    # The first dimension of experts counts them: their biases [experts, outputs] are no matrix.
    dimensions = part.value.ndim - int(part.layout.experts)
    return dimensions > 1 and "embedding" not in name and "output_layer" not in name


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
"""Coefficients (a, b, c) of step after step, from the first again after the last."""


def newton_schulz(
    x: Tensor, steps: int, coefficients: Sequence[tuple[float, float, float]], products: torch.dtype | None = None
) -> Tensor:
    """About U V^T of x [rows, columns] = U S V^T: singular values between 0.6 and 1.3 after five steps.

    products: what the steps are computed in, by default as x comes.
    """
    dtype, tall = x.dtype, x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = (x / torch.linalg.matrix_norm(x).clamp_min(1e-7)).to(products or dtype)
    for a, b, c in islice(cycle(coefficients), steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(dtype)


_RULES: dict[str, Callable[[TrainConfig], Rule]] = {"adam": Adam, "sgd": Sgd, "muon": Muon}


def find_rule(train: TrainConfig) -> Rule:
    """The rule that --optimizer names.

    Raises: ConfigError if there is none of this name, or what FILE.py:NAME gives is no Rule.
    """
    name = train.optimizer
    if name in _RULES:
        return _RULES[name](train)
    if ":" not in name:
        near = get_close_matches(name, _RULES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_RULES)}, and FILE.py:NAME of your own"
        raise ConfigError(f"{FLAG} {name}: {hint}")
    try:
        rule = find_named(name, FLAG, "my_optimizer:make")(train)
    except ConfigError as error:
        raise ConfigError(f"{FLAG} {error}") from None
    if not isinstance(rule, Rule):
        raise ConfigError(f"{FLAG} {name} gives a {type(rule).__name__}, which has not elementwise, state and update")
    return rule


def split_problem(train: TrainConfig, rule: Rule, by: str = "--use-distributed-optimizer") -> str | None:
    """The reason why ZeRO-1 cannot split state that this rule needs whole; None if it can. by: the flag that asks."""
    if rule.elementwise:
        return None
    return (
        f"{FLAG} {train.optimizer} needs whole parameters, and {by} splits them over data-parallel ranks. "
        f"Leave {by} out, or use {FLAG} adam."
    )


def rounding_problem(train: TrainConfig, rule: Rule) -> str | None:
    """The reason why --use-precision-aware-optimizer cannot keep this rule's state in 16 bits."""
    if getattr(rule, "may_round", False):
        return None
    return (
        f"--use-precision-aware-optimizer is for {FLAG} adam, got {train.optimizer}. "
        f"Leave --use-precision-aware-optimizer out, or use {FLAG} adam."
    )
