"""Compare single operations on a device with float64 and plain torch, and print the errors.

PYTHONPATH=. python megapipe/commands/gpu/kernels.py --device cuda --only weight_grad
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse, run
from megapipe.models.attention.blocks import MaskSpec
from megapipe.models.attention.context import context_attention
from megapipe.tensor_parallel.fused_cross_entropy import vocab_parallel_linear_cross_entropy
from megapipe.tensor_parallel.linear import ColumnParallelLinear
from megapipe.tensor_parallel.rng import MicrobatchContext
from megapipe.tensor_parallel.weight_grad import WeightGrads


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        figure: the measured numbers and their limits, in words.
        passed: whether the numbers are within the limits.
    """

    figure: str
    passed: bool = True


def within(error: float, allowed: float) -> CheckResult:
    """Return the result for an error that may be at most `allowed`; NaN does not pass."""
    return CheckResult(f"error {error:.1e}, at most {allowed:.1e}", error <= allowed)


def weight_grad(device: torch.device) -> CheckResult:
    """Check the weight gradient of a bf16 layer, computed in a pass W after the inputs' backward.

    The gradients of two microbatches are added into a float32 buffer. A GPU computes and adds in
    float32 (`addmm(out_dtype)`); a CPU rounds each product to bf16 before.
    """
    draw = torch.Generator().manual_seed(1)
    layer = ColumnParallelLinear(96, 64, tp=Axis(), bias=False)
    layer.weight.data = torch.randn(64, 96, generator=draw).bfloat16().to(device)
    main_grad = torch.zeros(64, 96, device=device)
    setattr(layer.weight, "main_grad", main_grad)  # noqa: B010
    owner = WeightGrads()
    # The expected gradient: the sum over both microbatches, by torch in float64.
    want = torch.zeros(64, 96, dtype=torch.float64)
    for microbatch in range(2):
        x = torch.randn(40, 3, 96, generator=draw).bfloat16()
        dy = torch.randn(40, 3, 64, generator=draw).bfloat16()
        # The forward notes the owner, and the backward leaves its products to the owner's W.
        with owner.capturing():
            out = layer(x.to(device).requires_grad_())
        with owner.deferring(microbatch):
            torch.autograd.backward(out, dy.to(device))
        weight = torch.zeros(64, 96, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad(F.linear(x.double(), weight), weight, dy.double())
        want += grad
    # Now W of each microbatch runs, as late as in a zero-bubble schedule.
    for microbatch in owner.owed:
        owner.run(microbatch)
    allowed = 1e-5
    # The rounding of bf16, which has eight significant bits.
    if device.type == "cpu":
        allowed = 2**-8
    return within(_error(main_grad, want), allowed)


def fused_loss(device: torch.device) -> CheckResult:
    """Check the fused output head and loss in float32 against separate operations.

    Losses are compared, and the gradients of the hidden states and the weight.
    """
    draw = torch.Generator().manual_seed(2)
    # On a CPU this is three blocks of the vocabulary, the last one shorter.
    x = torch.randn(300, 32, generator=draw)
    weight = torch.randn(9001, 32, generator=draw)
    target = torch.randint(0, 9001, (300,), generator=draw)
    grad = torch.randn(300, generator=draw)
    # A token with this label has no loss (`ignore_index` of torch).
    target[7] = -100
    got = _results(
        lambda x, w: vocab_parallel_linear_cross_entropy(x, w, target.to(device), Axis()),
        (x.to(device), weight.to(device)),
        grad.to(device),
    )
    want = _results(
        lambda x, w: F.cross_entropy(x @ w.t(), target, reduction="none"),
        (x.double(), weight.double()),
        grad.double(),
    )
    return within(max(map(_error, got, want)), 1e-5)


def dropout_attention(device: torch.device) -> CheckResult:
    """Check attention with dropout in float32: its output, and the gradients of q, k and v.

    The expected result needs the dropout mask. A first call with unit vectors as v finds it: its
    output is the matrix of probabilities, with zeros where they were dropped.
    """
    s = 64
    p = 0.25
    draw = torch.Generator().manual_seed(3)
    q, k, v, grad = (torch.randn(2, 4, s, s, generator=draw) for _ in range(4))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_attention(
            q, k, v, MaskSpec(s, MicrobatchContext(1, 5), p=p, site=("layer",))
        )

    on_device = (q.to(device), k.to(device), v.to(device))
    unit = torch.eye(s, device=device).expand(2, 4, s, s).contiguous()
    kept = (attend(on_device[0], on_device[1], unit) != 0).cpu()
    # A query attends to the keys up to its own. Of these, about 1 - p were kept.
    seen = torch.ones(s, s, dtype=torch.bool).tril()
    share = kept.sum().item() / (8 * seen.sum().item())
    assert abs(share - (1 - p)) < 0.02, f"{share:.3f} of the probabilities were kept, not {1 - p}"

    # The same in plain torch: dropout removes probabilities and scales the others by 1 / (1 - p).
    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT * s**-0.5).masked_fill(~seen, float("-inf"))
        return torch.matmul(scores.softmax(-1) * kept / (1 - p), v)

    got = _results(attend, on_device, grad.to(device))
    want = _results(plain, [x.double() for x in (q, k, v)], grad.double())
    return within(max(map(_error, got, want)), 1e-5)


KERNELS: dict[str, Callable[[torch.device], CheckResult]] = {
    f.__name__: f for f in (weight_grad, fused_loss, dropout_attention)
}


def _results(f: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """Return the output of `f`, then the gradient of each input.

    Args:
        inputs: the arguments of `f`.
        grad: the gradient of the output.
    """
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = f(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _error(got: Tensor, want: Tensor) -> float:
    """Return the largest absolute difference, divided by the largest absolute value of `want`.

    Args:
        got: the result.
        want: the expected result, of the same shape.
    """
    return float((got.detach().double().cpu() - want).abs().max() / want.abs().max())


@dataclass(frozen=True)
class Flags:
    """Check single operations on a device."""

    device: str = "cuda"
    """cuda or cpu."""
    only: str = ""
    """The check to run. Default: all."""


def main(
    argv: Sequence[str], checks: Mapping[str, Callable[[torch.device], CheckResult]] = KERNELS
) -> None:
    """Run the check that --only names, or all, and print the number that each has measured.

    Args:
        checks: a function for each name, which takes the device.
    Raises: SystemExit with status 0 if all pass, else 1. ConfigError for an unknown --only.
    """
    flags = parse(Flags, argv)
    if flags.only not in ("", *checks):
        raise ConfigError(f"--only {flags.only} is none of the checks: {', '.join(checks)}")
    device = torch.device(flags.device)
    found = [check(device) for name, check in checks.items() if flags.only in ("", name)]
    for one in found:
        print(one.figure)
    raise SystemExit(not all(one.passed for one in found))


if __name__ == "__main__":
    run(main)
