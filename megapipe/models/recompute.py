"""Activation recomputation: run a part of the model again in backward (Chen et al. 2016).

The part's activations are not kept. The second run sees the context variables of the first. So it
draws the same dropout masks, and finds the same WeightGrads: under a B/W split the part is
recomputed once, in B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megapipe.config import ModelConfig
from megapipe.tensor_parallel.eager import eager
from megapipe.tensor_parallel.rng import current_microbatch

T = TypeVar("T")


class _Catch(torch.autograd.Function):
    """The identity; backward stores the gradient in a list, with the strides that it has.

    `Tensor.grad` would copy it into the strides of x. A later sum over it, such as the gradient of
    a norm's weight, would then add in another order than without recomputation.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, into: list[Tensor | None], place: int) -> Tensor:
        ctx.into = into
        ctx.place = place
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.into[ctx.place] = grad
        return None, None, None


_catch: Callable[..., Tensor] = _Catch.apply


class _Recompute(torch.autograd.Function):
    """Save the inputs only; backward runs the function again and differentiates that run."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *inputs: Tensor) -> Any:
        ctx.function = function
        # The forward's context variables: in backward the stream and the stage of another pass may
        # be current.
        ctx.context = copy_context()
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = [None] * len(ctx.saved_tensors)
        # The second run has a graph of its own, whose leaves these are. Its gradients end here and
        # continue in the outer graph as this node's result.
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad():
            for place, x in enumerate(inputs):
                if x.requires_grad:
                    inputs[place] = _catch(x, grads, place)
            output = ctx.context.run(ctx.function, *inputs)
        # backward and not grad(): the parameters inside get their gradients, too.
        torch.autograd.backward(output, of_outputs)
        return None, *grads


_recompute: Callable[..., Any] = _Recompute.apply


@eager
def recompute(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return function(*inputs), saving only the inputs for backward.

    Costs a second forward. The function is called plainly if no input needs a gradient, or if
    recomputation is switched off for the running microbatch.

    Args:
        function: must return the same when called again. Parameters that it uses get gradients.
        inputs: the arguments of `function`.
    """
    if current_microbatch().recomputes:
        return from_inputs(function, *inputs)
    return function(*inputs)


@eager
def from_inputs(function: Callable[..., T], *inputs: Tensor) -> T:
    """Run a function of `inputs` and recompute it in backward, whatever the flags say.

    The function returns one tensor or several. It is called plainly if no input needs a gradient.

    Unlike `recompute`, it ignores that a microbatch may keep all activations.
    """
    # Where no input needs a gradient, a Function gets no backward, and the parameters inside would
    # get no gradient.
    if any(x.requires_grad for x in inputs):
        found: T = _recompute(function, *inputs)
        return found
    return function(*inputs)


@eager
def without_result(
    function: Callable[[Tensor], Tensor], x: Tensor, use: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return use(function(x)) without keeping function's result until backward.

    Where autograd would save the result or a view of it for `use`, x is saved instead. Backward
    computes the result again, at the cost of a second forward of `function`. No memory is added, as
    function's own backward needs x anyway.
    """
    y = function(x)
    if not (current_microbatch().recomputes and y.requires_grad):
        return use(y)
    # The result is recognised by its storage, because views of it are saved too. The hooks live as
    # long as the graph, so they must not hold y itself.
    storage = y.untyped_storage()._cdata
    # Autograd calls the innermost hooks only. They pass each saved tensor on to the hooks around
    # them, which may count it or move it to the host.
    around = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack_around, unpack_around = around or (_unchanged, _unchanged)
    # Packed here and not where y is saved: there the hooks would count x for another module.
    packed_x = pack_around(x)

    def pack(kept: Tensor) -> Any:
        if kept.untyped_storage()._cdata != storage:
            return pack_around(kept)
        return _Again(packed_x, (kept.size(), kept.stride(), int(kept.storage_offset())))

    def unpack(kept: Any) -> Tensor:
        if not isinstance(kept, _Again):
            return unpack_around(kept)
        with torch.no_grad():
            return function(unpack_around(kept.x)).as_strided(*kept.view)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return use(y)


class _Again(NamedTuple):
    """A saved view of a result that is computed again from x.

    Attributes:
        x: the input, packed by the saved-tensor hooks around this one.
        view: size, stride and storage offset of the view.
    """

    x: Any
    view: tuple[Sequence[int], Sequence[int], int]


def _unchanged(kept: Any) -> Any:
    return kept


def units(config: ModelConfig, layers: int) -> list[tuple[int, bool]]:
    """Cut a stage's layers into groups for --recompute-granularity full.

    Megatron's two methods: `uniform` recomputes groups of --recompute-num-layers layers, saving
    each group's input; `block` recomputes that number of single layers, the first ones, and keeps
    the activations of the others. At another granularity the groups are single layers, and none is
    recomputed.

    Returns: (number of layers, whether they are recomputed) of each group, in order.
    """
    n = config.recompute_num_layers or 1
    if config.recompute_granularity != "full":
        return [(1, False)] * layers
    if config.recompute_method == "block":
        return [(1, i < n) for i in range(layers)]
    return [(min(n, layers - first), True) for first in range(0, layers, n)]
