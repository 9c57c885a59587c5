"""Parameters and gradients of a stage, laid out flat: one all-reduce, one fused update and one copy each.

    gradients    [ decayed | not decayed | borrowed ]     float32 (float64 for a float64 model)
    main         [ decayed | not decayed ]                as the gradients; what the optimizer updates
    model        [ decayed | not decayed ]                what the layers compute with; `main` itself unless bf16

Every parameter starts at a multiple of 64 elements and is padded with zeros to the next, so a vectorised kernel has no
remainder to treat in another way and a parameter gets the same bits wherever it lies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from megapipe.distributed.axis import CPU, Axis
from megapipe.distributed.layout import layout_of

ALIGN = 64


class FlatBuffers:
    """The flat storage of one stage. Its parameters become views of `model` and get `main_grad`, a view of `grads`.

    Args:
        params: the stage's parameters by name, of one floating dtype on one device.
        borrowed: names of those whose weight is another's (a tied head beside its embedding): they have a gradient
            here and nothing else.
        has_main: False for a replica, whose main parameters are on another rank; `main` is then `model`.
        device: of a stage without parameters, which takes part in collectives all the same.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        borrowed: Collection[str] = (),
        *,
        has_main: bool = True,
        device: torch.device = CPU,
    ) -> None:
        dtypes = {p.dtype for p in params.values()}
        assert len(dtypes) <= 1, f"one dtype per stage, got {sorted(map(str, dtypes))}"
        own = [name for name in params if name not in borrowed]
        decayed = [name for name in own if _decays(name, params[name])]
        others = [name for name in own if not _decays(name, params[name])]
        self._where: dict[str, tuple[int, torch.Size]] = {}
        ends = []
        end = 0
        for names in (decayed, others, [name for name in params if name in borrowed]):
            for name in names:
                self._where[name] = (end, params[name].shape)
                end += -(-params[name].numel() // ALIGN) * ALIGN
            ends.append(end)
        self.decayed = slice(0, ends[0])
        self.not_decayed = slice(ends[0], ends[1])
        self.own = tuple(decayed + others)
        self._partial = [name for name in self._where if layout_of(params[name]).sum_over_tp]

        dtype = next(iter(dtypes), torch.float32)
        device = next((p.device for p in params.values()), device)
        main_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.grads = torch.zeros(ends[2], dtype=main_dtype, device=device)
        self.model = torch.zeros(ends[1], dtype=dtype, device=device)
        for name in self.own:
            view = self.view(self.model, name)
            view.copy_(params[name].data)
            params[name].data = view
        self.main = self.model if dtype == main_dtype or not has_main else self.model.to(main_dtype)
        for name, param in params.items():
            main_grad = self.view(self.grads, name)
            setattr(param, "main_grad", main_grad)  # noqa: B010
            param.register_post_accumulate_grad_hook(_add_to_main_grad)  # type: ignore[no-untyped-call]

    def view(self, flat: Tensor, name: str) -> Tensor:
        """A parameter's part of a flat tensor, in the parameter's shape."""
        start, shape = self._where[name]
        return flat[start : start + shape.numel()].view(shape)

    def rows(self, name: str) -> slice:
        """A parameter's rows of a flat tensor viewed as [-1, ALIGN], zeros of its padding included."""
        start, shape = self._where[name]
        return slice(start // ALIGN, -(-(start + shape.numel()) // ALIGN))

    def zero_grad(self) -> None:
        """Start a step."""
        self.grads.zero_()

    def sum_over_tp(self, tp: Axis) -> None:
        """Add up the gradients of parameters whose layout says so, in one all-reduce."""
        if tp.size > 1 and self._partial:
            views = [self.view(self.grads, name) for name in self._partial]
            summed = tp.all_reduce(torch.cat([view.flatten() for view in views]))
            for view, part in zip(views, torch.split(summed, [view.numel() for view in views]), strict=True):
                view.copy_(part.view_as(view))

    def reduce(self, dp: Axis, dtype: torch.dtype | None = None) -> None:
        """Sum the gradients over the data-parallel ranks, rounded to `dtype` if given: one all-reduce."""
        if dtype is None or dp.size == 1:
            dp.all_reduce(self.grads)
        else:
            self.grads.copy_(dp.all_reduce(self.grads.to(dtype)))

    def copy_main_to_model(self) -> None:
        """Round the updated main parameters to the model's dtype."""
        if self.main is not self.model:
            self.model.copy_(self.main)

    def copy_model_to_main(self) -> None:
        """Start from the model's weights, for example after loading those alone."""
        if self.main is not self.model:
            self.main.copy_(self.model)


def _decays(name: str, param: nn.Parameter) -> bool:
    """Weight decay leaves out biases and one-dimensional parameters, as in Megatron-LM."""
    return param.ndim > 1 and not name.endswith(".bias")


def _add_to_main_grad(param: Tensor) -> None:
    if param.grad is None:  # the layer added its gradient itself and returned none
        return
    param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
    param.grad = None
