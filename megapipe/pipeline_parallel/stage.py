"""A stage of the real model: module, what its forwards saved, what its backwards owe."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import copy_context
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.again import Rewinding
from megapipe.pipeline_parallel.attributes import attribute_of
from megapipe.pipeline_parallel.families.family import Forward, OfStage
from megapipe.pipeline_parallel.loss import Loss, LossFunc, output_of
from megapipe.pipeline_parallel.microbatches import Grad, Microbatches
from megapipe.pipeline_parallel.passes.begin import Ends, Weights
from megapipe.pipeline_parallel.request import Request
from megapipe.schedule.passes import Last
from megapipe.tensor_parallel.attached import attach_gradient
from megapipe.tensor_parallel.rng import Stream
from megapipe.tensor_parallel.weight_grad import WeightGrads


class _Saved(NamedTuple):
    """The part of a forward that its backward needs: the graph of the output, whose memory is free once it is sent.

    Attributes:
        output: None where nothing before it is trained.
        grad: of the loss, on the last stage; elsewhere it arrives.
    """

    x: Tensor | None
    output: GradientEdge | None
    grad: Grad


@runtime_checkable
class Layered(Protocol):
    """A module that says where one of its layers ends."""

    def between_layers(self, cut: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
        """While the context lasts, forward calls `cut` before each layer: it takes the hidden states and gives those to
        go on with. The context is that of one pass: another one of the module may run in between."""


@dataclass(eq=False)
class PipelineStage:
    """Runs Megatron's forward_step_func for one stage and differentiates it.

    Args:
        request: the step. What is reported of its losses knows nothing of how they are scaled and divided.
        module: has `set_input_tensor`; its forward is called by forward_step.
        number: of the stage.
        last: the microbatches that the table has last, for those that follow; None without a table.
        kept: microbatches of which the model computes nothing again.
        microbatches: what numbers stand for: whole microbatches, or parts of them.
        weights: what is done to the stage as a whole.
        own: what families of passes do around those of the stage, by name, of the families that the table has.
    Attributes:
        losses: what loss_func returned for each microbatch, without graph.
        results: its other data, or in an evaluation without loss_func the outputs.
    """

    request: Request
    module: nn.Module
    data_iterator: Iterator[Any] | None
    _: KW_ONLY
    mesh: ProcessMesh
    number: int = 0
    ends: Ends = field(default_factory=Ends)
    last: Last | None = None
    kept: Collection[int] = ()
    microbatches: Microbatches = field(default_factory=Microbatches)
    weights: Weights | None = None
    own: Mapping[str, OfStage] = field(default_factory=dict)

    def __post_init__(self) -> None:
        module = self.module
        try:
            self.set_input = attribute_of(module, "set_input_tensor")
        except AttributeError:
            raise ConfigError(
                f"{type(module).__name__} has no set_input_tensor(x), by which a stage is given the hidden states of "
                "the one before it (None on the first). Add it to the model."
            ) from None
        self.weight_grads = WeightGrads()
        self.losses: dict[int, Loss] = {}
        self.results: dict[int, Any] = {}
        self.context = copy_context()  # where its layers find what they need beside their input
        self.context.run(self.weight_grads.capture)
        self._saved: dict[int, _Saved] = {}

    @property
    def synchronises(self) -> bool:
        """Return whether the last backward has other work to do."""
        return self.request.around_last_backward is not None

    def stream(self, number: int) -> Stream:
        """Return what layers draw from for a microbatch or a slice."""
        step = self.request
        parts = self.microbatches
        scale = step.loss_scale()  # as Loss.share
        share = parts.share(number)
        ranks = self.mesh.cp.size if step.averaged_over_cp else 1  # losses of layers are parts, which ranks sum

        def weigh(tokens: int, part: float = share) -> float:
            if step.calculate_per_token_loss:
                return scale * tokens
            return scale * part * ranks / step.num_microbatches

        stream = parts.stream(step.stream(parts.microbatch(number)), number)
        again = number not in self.kept
        stream = replace(stream, cp=self.mesh.cp, dp=self.mesh.dp, recomputes=again, weigh=weigh)
        for of_stage in self.own.values():
            stream = of_stage.stream(stream, number, parts)
        return stream

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        """Input [s, b, h] (None at the embedding) -> output [s, b, h] (None at the loss)."""
        run: Forward = self.run_forward
        for of_stage in self.own.values():
            run = of_stage.forward(self, microbatch, run)
        return self.context.copy().run(run, microbatch, x)  # two may run together

    def backward(self, microbatch: int, grad: Tensor | None, *, weights: bool) -> Tensor | None:
        """Gradient of the output -> gradient of the input; without `weights` their products wait for `weight`."""
        saved = self._saved.pop(microbatch)
        # The loss of a slice counts by the tokens of its microbatch, which are known by now.
        own = saved.grad() if callable(saved.grad) else saved.grad
        for of_stage in self.own.values():
            own = of_stage.gradient(microbatch, own)
        # The gradient of a depth's input has that of its embedded tokens behind it, where shares look these up.
        grad = own if grad is None else grad if own is None else grad[: len(own)] + own
        assert grad is not None, f"no gradient for microbatch {microbatch}"
        is_last = self.last is not None and microbatch == self.last.backward
        around = self.request.around_last_backward if is_last else None
        # B without W: products for weights are noted, with the tensors they need, until this microbatch's W.
        kept = nullcontext() if weights else self.weight_grads.deferring(microbatch)
        with around(self.number) if around else nullcontext(), kept:
            if saved.output is not None:
                _differentiate(saved.output, grad)
        return _grad_of(saved.x)

    def alike(self, microbatch: int, other: int) -> bool:
        """Do backwards of these microbatches wait in the same places?"""
        of_one_place = (microbatch - other) % self.microbatches.count == 0
        return of_one_place and (microbatch in self.kept) == (other in self.kept)

    def run_forward(
        self, microbatch: int, x: Tensor | None, data: Iterator[Any] | None = None, stream: Stream | None = None
    ) -> Tensor | None:
        """Run a forward in the context of the stage. stream: of a forward that runs apart from its graph, or again."""
        if x is not None:
            # A leaf of this stage's own graph: autograd stops here, and leaves the gradient that is sent back.
            x = x.detach().requires_grad_(torch.is_grad_enabled())
        second = stream is not None and torch.is_grad_enabled()
        if stream is None:
            stream = self.microbatches.begun(microbatch, self.stream)
        stream.activate()
        own = [*self.own.values()]
        differentiated = own if torch.is_grad_enabled() else []
        given = x
        for of_stage in differentiated:
            given = of_stage.takes_input(given)
        self.set_input(given)
        ends, grad, waits = self.ends, None, False
        with self._between_layers(microbatch), ExitStack() as saving:
            for of_stage in differentiated:
                saving.enter_context(of_stage.saving(microbatch))
            output, loss_func = output_of(self.request.forward_step_func(data or self.data_iterator, self.module))
            if ends.holds_loss:
                for of_stage in own:
                    waits |= of_stage.takes_loss(microbatch, output, loss_func, stream.cp, again=second)
                if not waits:
                    output, grad = self.loss(microbatch, output, loss_func, stream.cp)
        if ends.holds_loss and ends.goes_on and not waits:
            hidden = attribute_of(self.module, "take_hidden_states")()
            output, grad = hidden if grad is None else attach_gradient(hidden, output, grad), None
        if torch.is_grad_enabled():
            # The edge, not the output: it holds the graph without the tensor, which is free as soon as it is sent.
            edge = get_gradient_edge(output) if output.requires_grad else None
            self._saved[microbatch] = _Saved(x, edge, grad)
        if given is not x:
            self.set_input(None)  # which would keep the values of a leaf that lets go of them
        for of_stage in differentiated:
            of_stage.saved(microbatch, output, x)
        return None if ends.holds_loss and not (waits or ends.goes_on) else output.detach()

    def _between_layers(self, microbatch: int) -> AbstractContextManager[None]:
        """A context for a forward: lets the gradients of the last microbatch report their layers."""
        module = self.module
        completes = self.last is not None and microbatch == self.last.weights
        if not (completes and torch.is_grad_enabled() and isinstance(module, Layered)):
            return nullcontext()
        done = None if self.weights is None else self.weights.layer_done
        return nullcontext() if done is None else module.between_layers(self._reporting(done))

    def _reporting(self, done: Callable[[int, int], None]) -> Callable[[Tensor], Tensor]:
        """A cut at which the gradient says that all layers behind have had their backward."""
        seen: list[None] = []

        def report(layer: int) -> None:
            done(layer, len(seen))

        def at(x: Tensor) -> Tensor:
            if x.requires_grad:
                job = partial(report, len(seen))  # products that wait for their W pass stand before it
                x.register_hook(lambda _: self.weight_grads.submit(job))  # type: ignore[no-untyped-call]
            seen.append(None)
            return x

        return at

    def weight(self, microbatch: int) -> None:
        """The products that `backward` left out."""
        with torch.no_grad():  # as in autograd's own backward: gradients must not grow a graph
            self.weight_grads.run(microbatch)

    def forget(self) -> None:
        """The forwards so far, none of which has had a backward: they come again."""
        self._saved.clear()
        for of_stage in self.own.values():
            of_stage.forget()
        if isinstance(self.data_iterator, Rewinding):
            self.data_iterator.rewind()

    def finish(self) -> None:
        """Check that nothing is left in hand after a step."""
        assert not self._saved, f"microbatches without backward: {list(self._saved)}"
        assert not self.weight_grads.owed, f"microbatches without weight pass: {self.weight_grads.owed}"

    def loss(self, microbatch: int, output: Tensor, loss_func: LossFunc | None, cp: Axis) -> tuple[Tensor, Grad]:
        """Return what is differentiated, and how much of it counts in the step's loss; None if it is no loss."""
        step, ends = self.request, self.ends
        self.microbatches.refuse_lossless(loss_func, step.collect_non_loss_data)
        if loss_func is None:
            if torch.is_grad_enabled():
                raise ConfigError("forward_step must return (output, loss_func) on the stage with the loss, got None.")
            self.results[microbatch] = output
            return output, None
        if step.collect_non_loss_data:
            self.results[microbatch] = loss_func(output, non_loss_data=True)
            return output, None
        loss = Loss.of(loss_func(output))
        self.losses[microbatch] = loss.kept()
        share = partial(
            Loss.share,
            microbatches=step.num_microbatches,
            per_token=step.calculate_per_token_loss,
            scale=step.loss_scale() * ends.counts,
            cp=cp,
            averaged=step.averaged_over_cp,
        )
        counts = self.microbatches.share_of(microbatch, self.losses, share)
        self.losses[microbatch] = loss.kept(ends.depth, cp)
        return loss.value, counts


def _differentiate(output: GradientEdge, grad: Tensor) -> None:
    """torch.autograd.backward(output, grad) without what that asks in Python, a fifth of a small pass's CPU time."""
    _engine_run_backward((output,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _grad_of(x: Tensor | None) -> Tensor | None:
    """The gradient that a backward left in its input; zeros where the output does not depend on it."""
    return x if x is None else torch.zeros_like(x) if x.grad is None else x.grad
