"""Run one stage of the model: its module, what forwards save for backwards, and deferred W."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from contextvars import copy_context
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

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
from megapipe.tensor_parallel.rng import MicrobatchContext
from megapipe.tensor_parallel.weight_grad import WeightGrads


class _Saved(NamedTuple):
    """The tensors that a forward leaves for its backward.

    Attributes:
        x: the input; None at the embedding.
        output: the edge of the output in autograd's graph; None if nothing in the graph is trained.
            The output itself is freed once it is sent.
        grad: gradient of the step's loss with respect to this stage's own loss. None on a stage
            without loss, which receives the gradient of its output from the next stage. Also None
            if the output or another pass carries it.
    """

    x: Tensor | None
    output: GradientEdge | None
    grad: Grad


@dataclass(eq=False)
class PipelineStage:
    """One stage in one step: it runs Megatron's forward_step_func and differentiates it.

    The executor calls `forward`, `backward` and `weight` for the passes F, B (or BW) and W of a
    microbatch. Methods get the number of a microbatch. If microbatches are cut into slices, it is
    the number of a slice, counted through all microbatches. `finish` checks the end of a step, and
    `forget` lets it begin again.

    Args:
        request: the arguments of the step. Factors on losses, such as loss_scale, apply to
            gradients and not to the reported losses.
        module: has `set_input_tensor`, and forward_step calls its forward.
        data_iterator: the data iterator for forward_step; None for a stage that reads no data.
        mesh: this rank's mesh.
        number: the number of the stage.
        ends: whether the stage has a loss, and how the input of its forwards is made.
        last: which microbatch (or slice) runs the stage's last backward, and which adds the last
            weight gradients; None without a table.
        kept: numbers of microbatches that keep all activations, so that nothing is recomputed.
        microbatches: the microbatches, whole or cut into slices.
        weights: functions for the passes on all weights of the stage, such as the update; None if
            the table has no such pass.
        own: {family of passes, such as offload: its actions around the passes of the stage}.
    Attributes:
        losses: the loss of each microbatch or slice, as loss_func returned it, without graph. On a
            stage of multi-token prediction, in the form of `Loss.kept`.
        results: other data that loss_func returned, or outputs of an evaluation without loss_func.
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
                f"{type(module).__name__} has no set_input_tensor(x), by which a stage is given "
                "the hidden states of the one before it (None on the first). Add it to the model."
            ) from None
        self.weight_grads = WeightGrads()
        self.losses: dict[int, Loss] = {}
        self.results: dict[int, Any] = {}
        # Layers find their stream and their weight gradients in this context.
        self.context = copy_context()
        self.context.run(self.weight_grads.capture)
        self._saved: dict[int, _Saved] = {}

    @property
    def synchronises(self) -> bool:
        """Return whether the last backward also synchronises gradients, as Megatron's does."""
        return self.request.around_last_backward is not None

    def stream(self, number: int) -> MicrobatchContext:
        """Return the random stream of a microbatch or slice. Layers read it in their forward.

        The stream gives random numbers, the range of tokens, and the factor on the layers' own
        losses.
        """
        step = self.request
        parts = self.microbatches
        # The same factors as in Loss.share.
        scale = step.loss_scale()
        share = parts.share(number)
        # Losses of layers are of a rank's tokens only. Ranks sum their gradients, or average them.
        ranks = self.mesh.cp.size if step.averaged_over_cp else 1

        def weigh(tokens: int, part: float = share) -> float:
            if step.calculate_per_token_loss:
                return scale * tokens
            return scale * part * ranks / step.num_microbatches

        stream = parts.stream(step.stream(parts.microbatch(number)), number)
        recomputes = number not in self.kept
        stream = replace(
            stream, cp=self.mesh.cp, dp=self.mesh.dp, recomputes=recomputes, weigh=weigh
        )
        for of_stage in self.own.values():
            stream = of_stage.stream(stream, number, parts)
        return stream

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        """Run a forward: return the output [s, b, h], given the input x [s, b, h].

        The input is None at the embedding. The output is None if a loss is computed here and no
        stage follows.
        """
        run: Forward = self.run_forward
        for of_stage in self.own.values():
            run = of_stage.forward(self, microbatch, run)
        # A copy, because two passes of the stage may run together.
        return self.context.copy().run(run, microbatch, x)

    def backward(self, microbatch: int, grad: Tensor | None, *, weights: bool) -> Tensor | None:
        """Run a backward and return the gradient of the stage's input; None at the embedding.

        Args:
            microbatch: number of the microbatch.
            grad: gradient of the output, [s, b, h]; None if no stage follows.
            weights: also compute the gradients of weights. Otherwise they wait for `weight`.
        """
        saved = self._saved.pop(microbatch)
        # A slice's loss counts by the tokens of its microbatch, which are known by now.
        own = saved.grad() if callable(saved.grad) else saved.grad
        for of_stage in self.own.values():
            own = of_stage.gradient(microbatch, own)
        if grad is None:
            grad = own
        elif own is not None:
            # A depth sends the gradient of its input, followed by the gradient of its embedded
            # tokens, where a vocabulary's shares look these up.
            grad = grad[: len(own)] + own
        assert grad is not None, f"no gradient for microbatch {microbatch}"
        around = None
        if self.last is not None and microbatch == self.last.backward:
            around = self.request.around_last_backward
        synchronising = nullcontext() if around is None else around(self.number)
        # B keeps the products for weights, with the tensors that they need, until W.
        deferring = nullcontext() if weights else self.weight_grads.deferring(microbatch)
        with synchronising, deferring:
            if saved.output is not None:
                _differentiate(saved.output, grad)
        return _grad_of(saved.x)

    def same_waits(self, microbatch: int, other: int) -> bool:
        """Return whether two backwards wait for the same collectives in the same order.

        This is so if both are of the same slice, such as slice 1 of two microbatches, and if both
        recompute or neither does.

        Args:
            microbatch, other: the numbers of the two microbatches (or slices).
        """
        same_slice = (microbatch - other) % self.microbatches.count == 0
        return same_slice and (microbatch in self.kept) == (other in self.kept)

    def run_forward(
        self,
        microbatch: int,
        x: Tensor | None,
        data: Iterator[Any] | None = None,
        stream: MicrobatchContext | None = None,
    ) -> Tensor | None:
        """Run forward_step_func, save tensors for the backward, and return the output.

        Args:
            microbatch: number of the microbatch.
            x: the input; None at the embedding.
            data: the data iterator; None for the stage's own.
            stream: the random stream, for a forward that runs twice, first without a graph and then
                with one. None for a forward that runs once.
        Returns: the output without graph; None if a loss is computed here and no stage follows.
        """
        differentiates = torch.is_grad_enabled()
        if x is not None:
            # A leaf of this stage's own graph: autograd stops here, and leaves the gradient that is
            # sent back.
            x = x.detach().requires_grad_(differentiates)
        again = stream is not None and differentiates
        if stream is None:
            stream = self.microbatches.begun(microbatch, self.stream)
        stream.activate()
        families = list(self.own.values())
        given = x
        if differentiates:
            for of_stage in families:
                given = of_stage.takes_input(given)
        self.set_input(given)
        with ExitStack() as saving:
            if differentiates:
                for of_stage in families:
                    saving.enter_context(of_stage.saving(self, microbatch))
            output, loss_func = output_of(
                self.request.forward_step_func(data or self.data_iterator, self.module)
            )
            ends = self.ends
            grad: Grad = None
            elsewhere = False
            if ends.holds_loss:
                for of_stage in families:
                    elsewhere |= of_stage.takes_loss(
                        microbatch, output, loss_func, stream.cp, again=again
                    )
                if not elsewhere:
                    output, grad = self.loss(microbatch, output, loss_func, stream.cp)
        gives_loss = ends.holds_loss and not elsewhere
        if gives_loss and ends.goes_on:
            # The hidden states go to the first depth of multi-token prediction. When their gradient
            # returns, the loss gets its own.
            hidden = attribute_of(self.module, "take_hidden_states")()
            output = hidden if grad is None else attach_gradient(hidden, output, grad)
            grad = None
        if differentiates:
            # The edge and not the output: it holds the graph without the tensor.
            edge = get_gradient_edge(output) if output.requires_grad else None
            self._saved[microbatch] = _Saved(x, edge, grad)
            # The module would keep the values of a leaf that gives them up.
            if given is not x:
                self.set_input(None)
            for of_stage in families:
                of_stage.saved(microbatch, output, x)
        if gives_loss and not ends.goes_on:
            return None
        return output.detach()

    def weight(self, microbatch: int) -> None:
        """Compute the weight gradients that `backward` with weights=False has left out."""
        # As in autograd's own backward: gradients must not grow a graph.
        with torch.no_grad():
            self.weight_grads.run(microbatch)

    def forget(self) -> None:
        """Drop what forwards have saved, because all forwards will run again.

        Call this only before the first backward of a step.
        """
        self._saved.clear()
        for of_stage in self.own.values():
            of_stage.forget()
        if isinstance(self.data_iterator, Rewinding):
            self.data_iterator.rewind()

    def finish(self) -> None:
        """Raise AssertionError if a forward of the step has had no backward or no weight pass."""
        assert not self._saved, f"microbatches without backward: {list(self._saved)}"
        owed = self.weight_grads.owed
        assert not owed, f"microbatches without weight pass: {owed}"

    def loss(
        self, microbatch: int, output: Tensor, loss_func: LossFunc | None, cp: Axis
    ) -> tuple[Tensor, Grad]:
        """Call loss_func, and store the loss, or the other data that loss_func returns.

        Args:
            microbatch: number of the microbatch.
            output: the output of the model.
            loss_func: the function that forward_step returned; None without one.
            cp: the ranks that share the microbatch's tokens.
        Returns: (the loss, the gradient of the step's loss with respect to it). If no loss was
            computed, without loss_func or with `collect_non_loss_data`, (output, None).
        Raises: ConfigError for a training step without loss_func.
        """
        step = self.request
        ends = self.ends
        self.microbatches.refuse_lossless(loss_func, step.collect_non_loss_data)
        if loss_func is None:
            if torch.is_grad_enabled():
                raise ConfigError(
                    "forward_step must return (output, loss_func) on the stage with the loss, got "
                    "None."
                )
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
        # A depth is logged in Megatron-LM's form, from which its share could not be computed.
        self.losses[microbatch] = loss.kept(ends.depth, cp)
        return loss.value, counts


def _differentiate(output: GradientEdge, grad: Tensor) -> None:
    """Add the gradients of the graph before `output` to its leaves, given the output's gradient.

    This is torch.autograd.backward without the checks in Python, which take a fifth of a small
    pass's CPU time.
    """
    _engine_run_backward(
        (output,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _grad_of(x: Tensor | None) -> Tensor | None:
    """Return the gradient that a backward left in the stage's input x; None if x is None.

    The gradient is zeros if the output does not depend on the input.
    """
    if x is None:
        return None
    return torch.zeros_like(x) if x.grad is None else x.grad
