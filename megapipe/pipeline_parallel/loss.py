"""Check what Megatron's loss_func returns for a microbatch, and say how it counts in the step.

Users write loss_func, so each error names the form that was expected and the value that came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megapipe.distributed.axis import ALONE, Axis
from megapipe.errors import ConfigError

LossFunc = Callable[..., Any]
"""loss_func(output) -> (loss, dict) or (sum of token losses, number of tokens, dict)."""

ForwardStep = Callable[[Iterator[Any] | None, nn.Module], tuple[Tensor, LossFunc]]
"""Megatron's: (data_iterator, model) -> (output, loss_func)."""

_FORMS = "loss_func must return (loss, dict) or (sum of token losses, number of tokens, dict)"


def output_of(returned: Any) -> tuple[Tensor, LossFunc | None]:
    """Return (output, loss_func) from what forward_step returned.

    The loss_func is returned as it is. It may be None on a stage that needs none.

    Raises: ConfigError for anything but a pair whose first member is a tensor.
    """
    is_pair = isinstance(returned, tuple | list) and len(returned) == 2
    if not (is_pair and isinstance(returned[0], Tensor)):
        raise ConfigError(f"forward_step must return (output, loss_func), got {_form(returned)}.")
    output, loss_func = returned
    return output, loss_func


class Loss(NamedTuple):
    """The loss of one microbatch, with the values that loss_func reports for the log.

    `of` makes it from the result of loss_func, `share` returns the gradient from which backward
    starts, and `kept` returns the loss without graph.

    Attributes:
        value: the loss as a tensor [], with its graph.
        tokens: number of tokens over which `value` is a sum, a tensor []; None if it is a mean.
        reported: {name: one number or (sum, count)}, for the log.
    """

    value: Tensor
    tokens: Tensor | None
    reported: dict[str, Any]

    @staticmethod
    def of(returned: Any) -> Loss:
        """Return the loss, made from the return value of loss_func.

        Raises: ConfigError for anything but (loss, dict) and (sum, number of tokens, dict). While
            gradients are on, also for a loss that has none.
        """
        if not isinstance(returned, tuple | list) or len(returned) not in (2, 3):
            raise ConfigError(f"{_FORMS}, got {_form(returned)}.")
        value, *tokens, reported = returned
        # An evaluation may return a plain number: it has no gradient to carry.
        if not torch.is_grad_enabled() and not isinstance(value, Tensor) and _is_number(value):
            value = torch.tensor(float(value))
        if not (isinstance(value, Tensor) and value.is_floating_point() and value.numel() == 1):
            raise ConfigError(
                f"{_FORMS}; its loss must be one floating-point number in a tensor, got "
                f"{_form(value)}."
            )
        if torch.is_grad_enabled() and not value.requires_grad:
            raise ConfigError(
                f"{_FORMS}; its loss has no gradient: it depends on no parameter that trains."
            )
        # Checked here, because the errors of autograd or of the sum over microbatches would not
        # name loss_func.
        count = None
        if tokens:
            if not (_is_number(tokens[0]) and torch.as_tensor(tokens[0]).numel() == 1):
                raise ConfigError(
                    f"{_FORMS}; its number of tokens must be one number, got {_form(tokens[0])}."
                )
            count = _count(tokens[0], value.device)
        if not isinstance(reported, Mapping):
            raise ConfigError(f"{_FORMS}; the dict says what to report, got {_form(reported)}.")
        for name, number in reported.items():
            _check_reported(name, number)
        return Loss(value.reshape(()), count, dict(reported))

    def share(
        self,
        microbatches: int,
        per_token: bool,
        scale: float,
        cp: Axis = ALONE,
        *,
        averaged: bool = False,
    ) -> Tensor:
        """Return the gradient of the step's loss with respect to `value`, this microbatch's loss.

        The gradient is scale / microbatches, changed for several context-parallel ranks as `cp` and
        `averaged` say. If `value` is a sum over tokens, it is also divided by their number, at
        least 1. Collective over cp for a sum, unless `per_token` or `averaged`.

        Args:
            microbatches: number of microbatches of the step.
            per_token: divide neither by `microbatches` nor by tokens: the result is `scale`. The
                caller divides gradients by the tokens of the whole batch at the end of the step.
            scale: the loss scale, a factor on the loss.
            cp: the ranks that share the microbatch's tokens. A sum is divided by the number of
                tokens on all these ranks, so the loss is the mean over whole sequences. If `value`
                is a mean, its number of tokens is not known, so the loss is the mean of the ranks'
                means.
            averaged: gradients will be averaged over cp, as Megatron-LM's DistributedDataParallel
                does, and not summed. Then the gradient is Megatron-LM's. A sum is divided by the
                number of this rank's tokens only, so the loss is the mean of the ranks' means. The
                gradient of a mean is multiplied by the number of ranks, so the loss is the sum of
                the ranks' means.
        Raises: ConfigError for per_token without tokens.
        """
        if per_token:
            if self.tokens is None:
                raise ConfigError(
                    "--calculate-per-token-loss divides by the number of tokens, and loss_func "
                    "does not say it: return (sum of token losses, number of tokens, dict) instead "
                    "of (loss, dict), or leave the flag out."
                )
            return torch.full_like(self.value, scale)
        # Clamped below, because no token of a microbatch may have a loss, such as in a batch of
        # padding.
        share = torch.full_like(self.value, scale / microbatches)
        if self.tokens is None:
            return share * cp.size if averaged else share / cp.size
        if averaged:
            return share / self.tokens.clamp(min=1)
        # A copy, because the sum is written in place.
        return share / cp.all_reduce(self.tokens.clone()).clamp(min=1)

    def kept(self, depth: int = 0, cp: Axis = ALONE) -> Loss:
        """Return the loss without its graph, for the log.

        Args:
            depth: number of the multi-token prediction module, from 1; 0 for the model's own loss.
                For a module only the mean over the microbatch's tokens is logged, as in
                Megatron-LM. This is collective over cp.
            cp: the ranks that share the microbatch's tokens.
        """
        value = self.value.detach()
        if not depth:
            return self._replace(value=value)
        whole = cp.size if self.tokens is None else cp.all_reduce(self.tokens.clone()).clamp(min=1)
        # The count is a rank's share of one microbatch: the ranks of cp report its parts.
        mean = torch.stack((value / whole, value.new_full((), 1 / cp.size)))
        return Loss(value, None, {f"mtp_{depth} loss": mean})


def _check_reported(name: str, number: Any) -> None:
    """Raise ConfigError for a reported value that is neither one number nor (sum, count).

    Args:
        name: the value's key in the dict that loss_func returned.
        number: the value.
    """
    numbers = number if isinstance(number, tuple | list) else (number,)
    elements = 0
    if all(map(_is_number, numbers)):
        elements = sum(torch.as_tensor(n).numel() for n in numbers)
    if elements not in (1, 2):
        raise ConfigError(
            f"{_FORMS}; what it reports is one number or (sum, count), got {_form(number)} for "
            f"{name!r}."
        )


def _is_number(x: Any) -> bool:
    # bool is a subclass of int, and a flag is no count.
    return isinstance(x, Tensor | Real) and not isinstance(x, bool)


def _count(tokens: Tensor | float, device: torch.device) -> Tensor:
    """Return a number of tokens as a tensor [] on a device, without waiting for the device."""
    # Waiting would hold up the launch of the next kernels.
    if isinstance(tokens, Tensor):
        return tokens.detach().to(device, non_blocking=True).reshape(())
    return torch.full((), tokens, device=device)


def _form(x: Any) -> str:
    """Return a description of a value for an error message: its type, or a tensor's shape."""
    if isinstance(x, Tensor):
        return f"a tensor {list(x.shape)} of {str(x.dtype).removeprefix('torch.')}"
    if isinstance(x, tuple | list):
        return f"({', '.join(map(_form, x))})"
    if x is None:
        return "None"
    return f"a {type(x).__name__}"
