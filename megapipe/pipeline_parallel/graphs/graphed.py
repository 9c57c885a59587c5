"""Run the passes of a rank's stages by CUDA graphs where a microbatch in flight has one.

A graph replays the kernels of a pass with one launch. Kernels of a small model take less time than
their launches, one by one, take of the CPU.
"""

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
    """A stage's module whose calls replay CUDA graphs, with one slot for each microbatch in flight.

    A slot has the graphs and buffers for one microbatch. A call replays a graph if a slot is free
    and if its input and arguments have the form (see `Form`) of the captured ones. Any other call
    goes to the module itself, as does one outside of a stage's pass or within `between_layers`.
    `begin` captures graphs before a step, and `set_input_tensor` sets the input of the next call.

    Args:
        module: the stage.
        lasts: whether the output is read until the end of the step, as a last stage's. Each replay
            then returns a copy, because the next one overwrites the graph's own output.
    Attributes:
        forms: at most two different forms (shapes and types of arguments) of calls that went to the
            module and might have had a graph.
        slots: the captured graphs, one slot for each microbatch in flight.
        why_not: the reason why no graph is captured any more; "" if more may be. If forms differ,
            the graphs captured before are still replayed.
    """

    def __init__(self, module: nn.Module, *, lasts: bool) -> None:
        super().__init__()
        self.module = module
        self.lasts = lasts
        self.forms: list[Form] = []
        self.slots: list[Slot] = []
        self.why_not = ""
        self._set_input: Callable[[Tensor | None], None] = attribute_of(module, "set_input_tensor")
        self._input: Tensor | None = None
        self._form: Form | None = None
        self._free: list[Slot] = []
        self._where: tuple[int, ...] = ()
        self._reports = False
        # Autograd calls a backward only if some input is trained. A stage without input has none,
        # so this scalar takes its place.
        self._anchor = torch.zeros((), device=next(module.parameters()).device, requires_grad=True)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped module, if this object has none of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def set_input_tensor(self, x: Tensor | None) -> None:
        """Store the input of the next call; None on a stage without input."""
        self._input = x

    @property
    def between_layers(self) -> Callable[..., AbstractContextManager[None]]:
        """Return the module's `between_layers`. Passes in its context run without a graph.

        Layers of such a pass report their gradients by hooks, which a graph would not call.
        Raises: AttributeError if the module has none.
        """
        inner = attribute_of(self.module, "between_layers")

        @contextmanager
        def reporting(cut: Callable[[Tensor], Tensor]) -> Iterator[None]:
            self._reports = True
            with inner(cut):
                yield
            self._reports = False

        return reporting

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, or replay its graph, on the stored input and these arguments."""
        x = self._input
        self._input = None
        form, leaves = Form.of(x, (args, kwargs))
        owner = current_weight_grads()
        if not self._reports and owner is not None:
            if form == self._form and self._free:
                slot = self._free.pop()
                slot.take(x, leaves)
                if x is None:
                    x = self._anchor
                return replayed(x, slot, owner, self.lasts)
            # Two are enough to say that forms differ.
            if len(self.forms) < 2 and form not in self.forms:
                self.forms.append(form)
        self._set_input(x)
        return self.module(*args, **kwargs)

    def begin(self, number: int, pool: Callable[[], Capture], *, splits: bool) -> int:
        """Prepare a step: capture the slots that are missing, and return how many were captured.

        If hooks or an error of the module forbid graphs, all slots are dropped and 0 is returned.

        Args:
            number: most microbatches that the step has in flight on this stage.
            pool: returns a function that captures graphs in a new private memory pool.
            splits: whether the table has backwards split into B and W.
        Raises: torch.OutOfMemoryError if the device has no room for a graph.
        """
        parameters = list(self.module.parameters())
        where = tuple(x.data_ptr() for p in parameters for x in (p, getattr(p, "main_grad", p)))
        # Graphs write to addresses. They are of no use once weights or gradients have moved.
        if where != self._where:
            self.slots.clear()
        self._where = where
        captured = 0
        # Users may register hooks at any time, so this is asked before each step.
        if any(map(_has_hooks, self.module.modules())):
            self.why_not = self.why_not or "its modules have hooks, which a graph would not call"
            self.slots.clear()
        if len(self.forms) == 1:
            self._form = self.forms[0]
        elif self.forms:
            self.why_not = self.why_not or "its microbatches differ in form"
        try:
            while self._form is not None and not self.why_not and len(self.slots) < number:
                slot = Slot(
                    pool(),
                    self.module,
                    self._set_input,
                    self._form,
                    splits=splits,
                    on_free=self._free.append,
                )
                self.slots.append(slot)
                captured += 1
        # A kind of RuntimeError, but no fault of the module: the user has to make room.
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.why_not = str(error).partition("\n")[0]
            self.slots.clear()
            captured = 0
        # All of them: a step that ended in an error has left some taken.
        self._free[:] = self.slots
        return captured


def _has_hooks(module: nn.Module) -> bool:
    """Return whether a module, or one of its own parameters, has hooks that graphs would not call.

    One hook of a parameter after its gradient is accumulated is allowed: it is the optimizer's.
    """
    own = (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
    if own:
        return True
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        # The optimizer's own hook is the one that a parameter may have.
        if parameter._backward_hooks or len(parameter._post_accumulate_grad_hooks or ()) > 1:
            return True
    return False


class Graphs:
    """The CUDA graphs of a rank's stages. Call the object before each training step.

    A call captures graphs if necessary and returns the stages that use them. Graphs are captured
    between steps, when no message is on its way: first after `warmup` steps. Later they are
    captured before a step whose table has more microbatches in flight, or if weights have moved.

    Args:
        pool: returns a function that captures graphs in a new private memory pool.
        warmup: number of steps without graphs.
        say: prints a line, such as how many graphs were captured on a stage, or why none.
    """

    def __init__(
        self, pool: Callable[[], Capture], warmup: int, say: Callable[[str], None]
    ) -> None:
        self._pool = pool
        self._left = warmup
        self._say = say
        self.stages: dict[int, Graphed] = {}
        self._warned: set[int] = set()

    def __call__(self, chunks: Chunks, table: Schedule) -> Chunks:
        """Return the stages of a training step, each with its module in a `Graphed`.

        Call this once before each training step: it captures the graphs that its table needs.

        Args:
            chunks: module and data iterator of each stage.
            table: the step's schedule.
        """
        for number, (module, _) in chunks.items():
            if number not in self.stages:
                self.stages[number] = Graphed(module, lasts=table.placement.is_last(number))
        # During warm-up the calls show their forms, and lazily made buffers get their place.
        if self._left == 0:
            for number, stage in self.stages.items():
                self._begin(number, stage, table)
        self._left = max(self._left - 1, 0)
        return {number: (self.stages[number], data) for number, (_, data) in chunks.items()}

    def _begin(self, number: int, stage: Graphed, table: Schedule) -> None:
        """Capture the graphs that a table needs on a stage, and print the result.

        number: the number of the stage.
        """
        has_w = splits(table, number)
        if stage.begin(in_flight(table, number), self._pool, splits=has_w):
            kinds = "F, B and W" if has_w else "F and B"
            self._say(
                f"CUDA graphs: {kinds} of {len(stage.slots)} microbatch(es) in flight on stage "
                f"{number}"
            )
        if stage.why_not and number not in self._warned:
            self._warned.add(number)
            self._say(
                f"WARNING: kernels of stage {number} are launched one by one: {stage.why_not}"
            )
