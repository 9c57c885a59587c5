"""A rule makes parameters better, given their names and shapes: all that an optimizer is here. How they are stored,
summed over ranks, clipped, split by ZeRO-1 and saved is not its affair.

`--optimizer FILE.py:NAME` names a function that takes the TrainConfig and gives a Rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout


class Group(NamedTuple):
    """Parameters that are updated alike: factors on the learning rate and on --weight-decay."""

    lr: float = 1.0
    weight_decay: float = 1.0


Groups = Callable[[str, torch.Size], Group]
"""(name in the whole model, shape on this rank) -> the group of a parameter."""


def usual_groups(name: str, shape: torch.Size) -> Group:
    """Weight decay leaves out biases and one-dimensional parameters, as in Megatron-LM."""
    return Group(weight_decay=1.0 if len(shape) > 1 and not name.endswith(".bias") else 0.0)


class Rates(NamedTuple):
    """The rates of one update. None: word embeddings and output head have `lr` too; --weight-decay."""

    lr: float
    ends_lr: float | None = None
    weight_decay: float | None = None


Factors = tuple[float | Tensor, float]
"""The scale of a step's gradients and the factor of clipping, which multiply them one after the other."""


def multiply(grad: Tensor, factors: Factors) -> None:
    """Scale and clip a gradient in sweeps of their own."""
    for factor in factors:
        if isinstance(factor, Tensor) or factor != 1:
            grad.mul_(factor)


@dataclass(frozen=True)
class Part:
    """A part that a rule updates in place: of an elementwise rule many parameters at once, flat, of any other one.

    Attributes:
        names: of the parameters, in the whole model.
        value, grad: float32, or float64 in a float64 model, bf16 where a flag says so; the gradient is summed, scaled
            and clipped.
        state: tensors like `value` by the names that the rule gives, zeros at first; they are saved.
        factors: what the gradient is still to be multiplied by where it lies.
        model: the model's weights of 16 bits that the updated values are to be rounded to. Both are for a rule that
            says `sweeps`; for all others the optimizer does it.
        lr, weight_decay: of this step and these parameters.
        layout, tp: of a single parameter, how it lies over tensor parallel, or over expert tensor parallel; a rank's
            experts are a whole for themselves.
    """

    names: tuple[str, ...]
    value: Tensor
    grad: Tensor
    state: Mapping[str, Tensor]
    lr: float
    weight_decay: float
    layout: Layout = field(default_factory=lambda: Layout(()))
    tp: Axis = Axis()
    factors: Factors = (1.0, 1.0)
    model: Tensor | None = None

    def round_value(self) -> None:
        """Make the model's weights, in a sweep of its own."""
        if self.model is not None:
            self.model.copy_(self.value)

    def whole(self, x: Tensor) -> Tensor:
        """A tensor like `value`, in the shape of the whole model's parameter. Collective over tensor parallel."""
        dim = self.layout.dim
        local = x.reshape(self.layout.local(self.tp))
        axis = self._axis
        if dim is None or axis.size == 1:
            return local
        return torch.cat(axis.all_gather(local[None].contiguous()).unbind(), dim)

    def mine(self, whole: Tensor) -> Tensor:
        """This rank's slice of what `whole` gave, in the shape of `value`."""
        if self.layout.dim is not None:
            whole = whole.chunk(self._axis.size, self.layout.dim)[self._axis.rank]
        return whole.reshape(self.value.shape)

    @property
    def _axis(self) -> Axis:
        return self.tp.named("etp" if self.layout.experts else "tp")


@runtime_checkable
class Rule(Protocol):
    """An optimizer.

    Attributes:
        elementwise: does each number depend on its own gradient and state alone? Then ZeRO-1 may split parameters.
        state: names of the tensors that it keeps for every parameter.

    It may also have `keeps_grad`: it changes gradients by their factors at most. An update that may have to be done
    again from the same gradients gives copies to any other rule.
    """

    elementwise: bool
    state: tuple[str, ...]

    def update(self, parts: Sequence[Part], steps: int) -> None:
        """One step of all parameters of this rank. steps: updates made before this one."""
