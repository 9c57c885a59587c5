"""The interface of an optimizer's rule, which updates parameters given their names and shapes.

How parameters are stored, summed over ranks, clipped, split by ZeRO and saved is not the rule's
concern. `--optimizer FILE.py:NAME` names a function that takes the OptimizerConfig and returns a
Rule.
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
    """Factors on the rates of parameters that are updated together.

    Attributes:
        lr: factor on the learning rate.
        weight_decay: factor on --weight-decay.
    """

    lr: float = 1.0
    weight_decay: float = 1.0


Groups = Callable[[str, torch.Size], Group]
"""Returns the group of a parameter from its name in the whole model and its shape on this rank."""


def usual_groups(name: str, shape: torch.Size) -> Group:
    """Return the usual factors: no weight decay for biases and one-dimensional parameters.

    Megatron-LM has the same rule.

    Args:
        name: name of the parameter, by which biases are recognised.
        shape: shape of the parameter.
    """
    # Norms and biases have one dimension; a bias of experts [experts, outputs] has two.
    is_decayed = len(shape) > 1 and not name.endswith(".bias")
    return Group(weight_decay=float(is_decayed))


class Rates(NamedTuple):
    """The learning rates and the weight decay of one update.

    Attributes:
        lr: the learning rate.
        ends_lr: learning rate of word embeddings and output head; None for `lr`.
        weight_decay: the weight decay; None for --weight-decay.
    """

    lr: float
    ends_lr: float | None = None
    weight_decay: float | None = None


Factors = tuple[float | Tensor, float]
"""(scale, clipping), two factors by which gradients are multiplied one after the other."""


def multiply(grad: Tensor, factors: Factors) -> None:
    """Multiply a gradient in place by two factors: the scale and the clipping factor."""
    for factor in factors:
        # The host does not read a tensor, so it multiplies even by 1.
        if isinstance(factor, Tensor) or factor != 1:
            grad.mul_(factor)


@dataclass(frozen=True)
class Part:
    """Some parameters that a rule updates in place, with their gradients, state and rates.

    A rule is an optimizer's formula, such as AdamW. For an elementwise rule a part has many
    parameters in one flat tensor. For any other rule it is a single parameter. `whole` gathers a
    split parameter, `mine` cuts it again, and `round_value` writes it, rounded, into `model`.

    Attributes:
        names: names of the parameters in the whole model.
        value: the parameters in float32; in float64 for a float64 model, in bf16 if a flag asks for
            it.
        grad: the gradients of the parameters, summed over ranks, scaled and clipped but for
            `factors`.
        state: {name in Rule.state: tensor of the shape of `value`}. The tensors are zeros at first,
            and are saved in checkpoints. They are float32 or wider, or bf16 if a flag asks for it.
        lr: learning rate of this step and these parameters.
        weight_decay: weight decay of this step and these parameters.
        layout: for a single parameter, how it is split over tensor parallelism.
        tp: the tensor-parallel axis. For a parameter of experts, the experts on this rank count as
            the whole parameter.
        factors: for a rule with `sweeps`, factors by which `grad` is still to be multiplied. For
            any other rule the optimizer has multiplied it.
        model: for a rule with `sweeps`, the model's 16-bit weights, to which it must round the
            updated value; None if they are not 16-bit. For any other rule the optimizer rounds.
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
        """Round the value to the model's weights, if `model` is given."""
        if self.model is not None:
            self.model.copy_(self.value)

    def whole(self, x: Tensor) -> Tensor:
        """Gather a tensor like `value` over tensor parallelism, and return it in the full shape."""
        # Experts stay on their ranks: only `dim` is gathered, over tp or etp.
        dim = self.layout.dim
        local = x.reshape(self.layout.local(self.tp))
        axis = self._axis
        if dim is None or axis.size == 1:
            return local
        # Gathered along a new dimension, as collectives join tensors along the first one.
        return torch.cat(axis.all_gather(local[None].contiguous()).unbind(), dim)

    def mine(self, whole: Tensor) -> Tensor:
        """Return this rank's slice of a tensor that `whole` returned, in the shape of `value`."""
        # `whole` has gathered this dimension alone, so parts of a pipeline do not matter.
        if self.layout.dim is not None:
            whole = whole.chunk(self._axis.size, self.layout.dim)[self._axis.rank]
        return whole.reshape(self.value.shape)

    @property
    def _axis(self) -> Axis:
        """The axis that splits the parameter: etp for a parameter of an expert, else tp."""
        name = "etp" if self.layout.experts else "tp"
        return self.tp.named(name)


# Checked at run time for the user's own rules.
@runtime_checkable
class Rule(Protocol):
    """The interface of an optimizer's formula, such as AdamW.

    A rule may also have these attributes:
    - `sweeps`: the rule itself multiplies gradients by Part.factors and rounds to Part.model.
    - `keeps_grad`: the rule leaves gradients as they are, but for multiplying by the factors. A
      rule without it is given copies whenever the gradients are needed again.
    - `may_round`: the optimizer state may be stored in 16 bits.

    `update` updates all parameters of a rank.

    Attributes:
        elementwise: the update of each element depends only on its own gradient and state. ZeRO-1
            may then split parameters.
        state: names of the tensors that the rule keeps for every parameter, such as exp_avg.
    """

    elementwise: bool
    state: tuple[str, ...]

    # `steps` is an argument because a rule has no state outside of the saved tensors.
    def update(self, parts: Sequence[Part], steps: int) -> None:
        """Update all parameters of this rank.

        Args:
            parts: all parameters of the rank, a few or one in each `Part`.
            steps: number of updates before this one.
        """
