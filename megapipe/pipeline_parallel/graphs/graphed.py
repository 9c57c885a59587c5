"""A rank's stages by CUDA graphs: which passes they serve, and how many microbatches are in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.distributed.device import Capture
from megapipe.pipeline_parallel.attributes import Chunks, attribute_of
from megapipe.pipeline_parallel.graphs.slot import Form, Slot, replayed
from megapipe.schedule import Schedule
from megapipe.schedule.memory.slots import in_flight, splits
from megapipe.tensor_parallel.weight_grad import current_weight_grads


class Graphed(nn.Module):
    """A stage's module, called by graphs where a microbatch has a free slot and the form that was captured.

    Attributes:
        forms: of the passes that were run without graphs and might have had one.
        why_not: the reason why none is captured, or not of all.
    """

    def __init__(self, module: nn.Module, *, lasts: bool) -> None:
        super().__init__()
        self.module, self.lasts = module, lasts
        self.forms, self.slots, self.why_not = list[Form](), list[Slot](), ""
        self._set_input: Callable[[Tensor | None], None] = attribute_of(module, "set_input_tensor")
        self._input: Tensor | None = None
        self._form: Form | None = None
        self._free, self._where, self._reports = list[Slot](), tuple[int, ...](), False
        # A stage without input has gradients all the same.
        self._anchor = torch.zeros((), device=next(module.parameters()).device, requires_grad=True)

    def __getattr__(self, name: str) -> Any:
        """The module's own, which wrapping must not hide."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def set_input_tensor(self, x: Tensor | None) -> None:
        """The input of the next call."""
        self._input = x

    @property
    def between_layers(self) -> Callable[..., AbstractContextManager[None]]:
        """The module's, if it has one: a pass whose gradients report layer by layer is run without graphs."""
        inner = attribute_of(self.module, "between_layers")

        @contextmanager
        def reporting(cut: Callable[[Tensor], Tensor]) -> Iterator[None]:
            self._reports = True
            with inner(cut):
                yield
            self._reports = False

        return reporting

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, self._input = self._input, None
        form, leaves = Form.of(x, (args, kwargs))
        owner = current_weight_grads()
        if not self._reports and owner is not None:
            if form == self._form and self._free:
                slot = self._free.pop()
                slot.take(x, leaves)
                return replayed(self._anchor if x is None else x, slot, owner, self.lasts)
            if len(self.forms) < 2 and form not in self.forms:  # two say that forms differ
                self.forms.append(form)
        self._set_input(x)
        return self.module(*args, **kwargs)

    def begin(self, number: int, pool: Callable[[], Capture], *, splits: bool) -> int:
        """Begin a step with so many microbatches in flight. Returns: how many slots were captured for it."""
        where = tuple(x.data_ptr() for p in self.module.parameters() for x in (p, getattr(p, "main_grad", p)))
        if where != self._where:  # graphs write to where gradients were
            self.slots.clear()
        self._where, before = where, len(self.slots)
        if any(map(_has_hooks, self.module.modules())):
            self.why_not = self.why_not or "its modules have hooks, which a graph would not call"
            self.slots.clear()
        if len(self.forms) == 1:
            self._form = self.forms[0]
        elif self.forms:
            self.why_not = self.why_not or "its microbatches differ in form"
        try:
            while self._form is not None and not self.why_not and len(self.slots) < number:
                given = self.module, self._set_input, self._form
                self.slots.append(Slot(pool(), *given, splits=splits, on_free=self._free.append))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.why_not = str(error).partition("\n")[0]
            self.slots.clear()
        self._free[:] = self.slots  # a step that ended in an error has left some taken
        return len(self.slots) - before


def _has_hooks(module: nn.Module) -> bool:
    """Hooks of the module, or of a parameter beside the optimizer's."""
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    of_parameters = (
        p._backward_hooks or len(p._post_accumulate_grad_hooks or ()) > 1
        for p in module._parameters.values()
        if p is not None
    )
    return bool(own) or any(of_parameters)


class Graphs:
    """The graphs of a rank's stages: captured before the first step behind `warmup` of them, when no message is on its
    way, and further ones before a step whose table has more microbatches in flight.

    Args:
        pool: makes a private pool of memory to capture in, see device.graph_pool.
        say: prints a line on what became of a stage of this rank.
    """

    def __init__(self, pool: Callable[[], Capture], warmup: int, say: Callable[[str], None]) -> None:
        self._pool, self._left, self._say = pool, warmup, say
        self.stages: dict[int, Graphed] = {}
        self._told = set[int]()

    def over(self, chunks: Chunks, table: Schedule) -> Chunks:
        """The modules of a step of training, as its passes are to call them."""
        for number, (module, _) in chunks.items():
            if number not in self.stages:
                self.stages[number] = Graphed(module, lasts=table.placement.is_last(number))
        for number, stage in self.stages.items() if self._left == 0 else ():
            apart = splits(table, number)
            if stage.begin(in_flight(table, number), self._pool, splits=apart):
                kinds = "F, B and W" if apart else "F and B"
                self._say(f"CUDA graphs: {kinds} of {len(stage.slots)} microbatch(es) in flight on stage {number}")
            if stage.why_not and number not in self._told:
                self._told.add(number)
                self._say(f"WARNING: kernels of stage {number} are launched one by one: {stage.why_not}")
        self._left = max(self._left - 1, 0)
        return {number: (self.stages[number], data) for number, (_, data) in chunks.items()}
