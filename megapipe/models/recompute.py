"""Compute a part of the model again in backward instead of keeping its activations (Chen et al. 2016).

Random streams and the stage that may put weight gradients off are context variables; the second run sees the values of
the first, so masks are the same and under a B/W split the recomputation happens once, in B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapipe.config import ModelConfig
from megapipe.tensor_parallel.eager import eager
from megapipe.tensor_parallel.rng import current_stream


class _Catch(torch.autograd.Function):
    """The identity, whose gradient ends in a list, as it lies in memory: `Tensor.grad` would bring it into the order of
    the tensor's elements, and what sums it next, such as a norm's weight, would add in another order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, into: list[Tensor | None], place: int) -> Tensor:
        ctx.into, ctx.place = into, place
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.into[ctx.place] = grad
        return None, None, None


_catch: Callable[..., Tensor] = _Catch.apply


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.function, ctx.context = function, copy_context()
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = [None] * len(ctx.saved_tensors)
        # Leaves of a graph of its own: the gradients end here, and go on in the outer one as this node's result.
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad():
            inputs = [_catch(x, grads, i) if x.requires_grad else x for i, x in enumerate(inputs)]
            output = ctx.context.run(ctx.function, *inputs)
        torch.autograd.backward(output, grad)
        return None, *grads


_recompute: Callable[..., Tensor] = _Recompute.apply


@eager
def recompute(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """function(*inputs), of which only the inputs are kept for backward. Costs a second forward.

    Args:
        function: must compute the same when called again; parameters it uses get their gradients.
    """
    if current_stream().recomputes and any(x.requires_grad for x in inputs):
        return _recompute(function, *inputs)
    return function(*inputs)


@eager
def without_result(function: Callable[[Tensor], Tensor], x: Tensor, use: Callable[[Tensor], Tensor]) -> Tensor:
    """use(function(x)); what `use` would keep of function's result for its backward is computed again from x instead.

    Costs a second forward of `function` alone, and nothing is kept that was not kept before: x is what function's own
    backward needs.
    """
    y = function(x)
    if not (current_stream().recomputes and y.requires_grad):
        return use(y)
    # By its storage, as views of it are kept too; the hooks live as long as the graph and must not hold y itself.
    storage = y.untyped_storage()._cdata
    # Autograd asks the innermost hooks alone: what is kept is handed to those around, which may count or move it.
    around = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack_around, unpack_around = around or (_as_it_is, _as_it_is)
    again = pack_around(x)  # here and not where y is kept, which may be another's to count

    def pack(kept: Tensor) -> Any:
        if kept.untyped_storage()._cdata != storage:
            return pack_around(kept)
        return _Again(again, (kept.size(), kept.stride(), int(kept.storage_offset())))

    def unpack(kept: Any) -> Tensor:
        if not isinstance(kept, _Again):
            return unpack_around(kept)
        with torch.no_grad():
            return function(unpack_around(kept.x)).as_strided(*kept.view)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return use(y)


class _Again(NamedTuple):
    """A saved view of a result that comes again of x, as hooks have packed this."""

    x: Any
    view: tuple[Sequence[int], Sequence[int], int]


def _as_it_is(kept: Any) -> Any:
    return kept


def units(config: ModelConfig, layers: int) -> list[tuple[int, bool]]:
    """Cuts of a stage's layers for full recomputation: (number of layers, computed again?) of each run of layers.

    Megatron's two methods. uniform: runs of --recompute-num-layers, of each only the input is kept. block: so many
    single layers are computed again, the others keep their activations.
    """
    n = config.recompute_num_layers or 1
    if config.recompute_granularity != "full":
        return [(1, False)] * layers
    if config.recompute_method == "block":
        return [(1, i < n) for i in range(layers)]
    return [(min(n, layers - first), True) for first in range(0, layers, n)]
