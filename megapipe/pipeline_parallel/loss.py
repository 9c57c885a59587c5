"""The return value of Megatron's loss_func for a microbatch, checked: a user wrote it."""

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
    """The pair that forward_step returned. Raises: ConfigError for anything else."""
    if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[0], Tensor):
        raise ConfigError(f"forward_step must return (output, loss_func), got {_form(returned)}.")
    output, loss_func = returned
    return output, loss_func


class Loss(NamedTuple):
    """The loss of one microbatch, and what is said beside it.

    Attributes:
        value: what is differentiated, one number.
        tokens: what `value` is the sum over, a tensor []; None where it is a mean.
        reported: only to be shown: name -> one number or (sum, count).
    """

    value: Tensor
    tokens: Tensor | None
    reported: dict[str, Any]

    @staticmethod
    def of(returned: Any) -> Loss:
        """Raises: ConfigError for what is none of loss_func's two forms."""
        if not isinstance(returned, tuple | list) or len(returned) not in (2, 3):
            raise ConfigError(f"{_FORMS}, got {_form(returned)}.")
        value, *tokens, reported = returned
        if not torch.is_grad_enabled() and not isinstance(value, Tensor) and _is_number(value):
            value = torch.tensor(float(value))
        if not (isinstance(value, Tensor) and value.is_floating_point() and value.numel() == 1):
            raise ConfigError(f"{_FORMS}; its loss must be one floating-point number in a tensor, got {_form(value)}.")
        if torch.is_grad_enabled() and not value.requires_grad:
            raise ConfigError(f"{_FORMS}; its loss has no gradient: it depends on no parameter that trains.")
        if tokens and not (_is_number(tokens[0]) and torch.as_tensor(tokens[0]).numel() == 1):
            raise ConfigError(f"{_FORMS}; its number of tokens must be one number, got {_form(tokens[0])}.")
        if not isinstance(reported, Mapping):
            raise ConfigError(f"{_FORMS}; the dict says what to report, got {_form(reported)}.")
        for name, number in reported.items():
            numbers = number if isinstance(number, tuple | list) else (number,)
            if not all(map(_is_number, numbers)) or sum(torch.as_tensor(n).numel() for n in numbers) not in (1, 2):
                raise ConfigError(
                    f"{_FORMS}; what it reports is one number or (sum, count), got {_form(number)} for {name!r}."
                )
        return Loss(value.reshape(()), _count(tokens[0], value) if tokens else None, dict(reported))

    def share(
        self, microbatches: int, per_token: bool, scale: float, cp: Axis = ALONE, *, averaged: bool = False
    ) -> Tensor:
        """The gradient of the step's loss with respect to `value`: 1 / microbatches, and of a sum 1 / tokens (at
        least 1) too; per_token leaves both to the end of the step, when the tokens of the whole batch are known.

        Args:
            scale: factor on it, see optim.loss_scale.
            cp: ranks that have the microbatch's tokens among them: a sum is divided by the tokens of all, so that the
                loss is the mean of the whole sequences; of means, which say no number of tokens, the mean counts.
            averaged: gradients will be averaged over cp and not summed, as Megatron-LM's DistributedDataParallel does.
                Then, as there, a sum is divided by this rank's own tokens, and a mean counts once for each rank.
        Raises: ConfigError for per_token without tokens.
        """
        if not per_token:
            share = torch.full_like(self.value, scale / microbatches)
            if averaged:
                return share * cp.size if self.tokens is None else share / self.tokens.clamp(min=1)
            if self.tokens is None:
                return share / cp.size
            return share / cp.all_reduce(self.tokens.clone()).clamp(min=1)
        if self.tokens is None:
            raise ConfigError(
                "--calculate-per-token-loss divides by the number of tokens, and loss_func does not say it: "
                "return (sum of token losses, number of tokens, dict) instead of (loss, dict), or leave the flag out."
            )
        return torch.full_like(self.value, scale)

    def kept(self, depth: int = 0, cp: Axis = ALONE) -> Loss:
        """The loss without its graph. Of a depth of multi-token prediction what Megatron-LM logs: under its name the
        mean over the tokens of this microbatch, which counts as much as that of any other. cp: as in `share`."""
        value = self.value.detach()
        if not depth:
            return self._replace(value=value)
        whole = cp.size if self.tokens is None else cp.all_reduce(self.tokens.clone()).clamp(min=1)
        return Loss(value, None, {f"mtp_{depth} loss": torch.stack((value / whole, value.new_full((), 1 / cp.size)))})


def _is_number(x: Any) -> bool:
    return isinstance(x, Tensor | Real) and not isinstance(x, bool)


def _count(tokens: Tensor | float, beside: Tensor) -> Tensor:
    """The count as a tensor [] on the loss's device, without waiting for it."""
    if isinstance(tokens, Tensor):
        return tokens.detach().to(beside.device, non_blocking=True).reshape(())
    return torch.full((), tokens, device=beside.device)


def _form(x: Any) -> str:
    """A value in an error, by what it is."""
    if isinstance(x, Tensor):
        return f"a tensor {list(x.shape)} of {str(x.dtype).removeprefix('torch.')}"
    if isinstance(x, tuple | list):
        return f"({', '.join(map(_form, x))})"
    return "None" if x is None else f"a {type(x).__name__}"
