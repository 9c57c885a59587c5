"""A device that computes by sleeping.

A pass holds the main thread for its time without using the CPU, as a kernel does that its host
waits for. What a step takes beyond its passes is then what the runtime adds; what the main thread
uses of the CPU is the runtime's and autograd's own work.
"""

from __future__ import annotations

import ctypes
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megapipe.distributed.axis import Pending
from megapipe.distributed.shared_memory import Started
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.passes.begin import Weights
from megapipe.schedule import Kind
from megapipe.schedule.core.pieces import Chain
from megapipe.tensor_parallel.weight_grad import current_weight_grads


def sharpen_sleep() -> None:
    """Let sleeps of this thread end on time: Linux may add 50 us to each, to save power."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK, nanoseconds


def times(text: str) -> tuple[float, float, float]:
    """Times of F, B and W, from --ms. Raises: ConfigError."""
    try:
        f, b, w = map(float, text.split(","))
    except ValueError:
        f = b = w = -1.0
    if not 0 <= min(f, b, w) <= max(f, b, w) < math.inf:
        raise ConfigError(f"--ms {text} is not three times F,B,W from 0, such as 20,20,20")
    return f, b, w


@dataclass
class Device:
    """One rank's device in one step.

    Attributes:
        link: seconds that a message from another rank is on its way.
        lane_free: when the transfers of passes are over that it has begun; they follow each other.
        epoch: start of the step; messages carry when they were sent, counted from here, so that
            float32 is enough.
        busy: seconds of passes so far.
        held, peak: activations kept, in device shares.
    """

    link: float = 0.0
    lane_free: float = 0.0
    epoch: float = 0.0
    busy: float = 0.0
    held: float = 0.0
    peak: float = 0.0
    holding: Any = field(default_factory=Lock, repr=False, compare=False)

    def compute(self, seconds: float) -> None:
        """One pass."""
        started = time.perf_counter()
        if seconds:
            time.sleep(seconds)
            self.busy += time.perf_counter() - started

    def transfer(self, seconds: float) -> Pending:
        """A communication within a pass, of experts that are somewhere else."""
        if not seconds:
            return Pending(_NOTHING)
        self.lane_free = over = max(self.lane_free, time.perf_counter()) + seconds
        return Pending(_NOTHING, Started(lambda: time.sleep(max(0.0, over - time.perf_counter()))))

    def arrive(self, message: Tensor, remote: bool) -> None:
        """Wait until a message from another rank would be here."""
        if self.link and remote:
            early = self.epoch + message.view(-1)[0].item() + self.link - time.perf_counter()
            if early > 0:
                time.sleep(early)

    def stamp(self, message: Tensor) -> None:
        """Write into a message when it was sent."""
        if self.link:
            message.detach().view(-1)[0] = time.perf_counter() - self.epoch

    def hold(self, share: float) -> None:
        """Keep or (negative) free activations."""
        with self.holding:  # copies end on threads of their own
            self.held += share
            self.peak = max(self.peak, self.held)


@dataclass(frozen=True)
class Share:
    """The share that a stage is to its device: pieces of F, B and W, device shares, and who is
    beyond a link.
    """

    f: Chain
    b: Chain
    w: Chain
    size: float
    remote_before: bool
    remote_after: bool


class _Compute(torch.autograd.Function):
    """F, and in backward B; W too, now or deferred, if it is given the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, device: Device, share: Share) -> Tensor:
        device.arrive(x, share.remote_before)
        device.hold(share.size)
        for _ in range(turns := max(share.f.turns, 1)):
            device.compute(share.f.compute / turns)
            device.transfer(share.f.link / turns).wait()
        ctx.device, ctx.share, ctx.has_weight = device, share, weight is not None
        ctx.owner = current_weight_grads()
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        device, share = ctx.device, ctx.share
        device.arrive(grad, share.remote_after)
        coming = device.transfer(share.b.link / (turns := max(share.b.turns, 1)))
        for turn in range(turns):
            coming.wait()
            device.compute(share.b.compute / turns)
            # As our layers: the weight's gradient does not pass through autograd.
            if ctx.owner is not None:
                ctx.owner.submit(partial(_weight_pass, device, share, turns))
            if turn < turns - 1:
                coming = device.transfer(share.b.link / turns)
        if ctx.owner is not None:
            return grad.clone(), None, None, None
        if ctx.has_weight:
            _weight_pass(device, share)
        return grad.clone(), grad.new_zeros(1) if ctx.has_weight else None, None, None


class _Weight(torch.autograd.Function):
    """A node of its own for W, so that torch can find it on the way to the parameter and leave it
    for later.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, device: Device, share: Share) -> Tensor:
        ctx.device, ctx.share = device, share
        return weight.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        _weight_pass(ctx.device, ctx.share)
        return grad, None, None


_compute: Callable[..., Tensor] = _Compute.apply
_weigh: Callable[..., Tensor] = _Weight.apply


def _weight_pass(device: Device, share: Share, turns: int = 1) -> None:
    device.compute(share.w.compute / turns)
    device.transfer(share.w.link / turns).wait()
    device.hold(-share.size / turns)


_NOTHING = torch.empty(0)


Part = tuple[Mapping[Kind, float], float]


class Moves(NamedTuple):
    """A stage's copies of a microbatch: begun, and what waits for their end."""

    offload: Callable[[int], Callable[[], None]]
    load: Callable[[int], Callable[[], None]]


class Shared:
    """A stage whose rank has a share of the vocabulary, or whose microbatches are in slices or
    copied, as the executor calls it: passes that only take their time.

    Args:
        parts: of each slice, or of whole microbatches, the seconds of each kind of pass and the
            device shares that it holds from F to W.
        message: what every pass makes.
        weights: what is done to it as a whole.
        moves: its copies to the host and back.
    """

    def __init__(
        self,
        device: Device,
        parts: Sequence[Part],
        message: Tensor,
        weights: Weights,
        moves: Moves | None = None,
    ):
        self.device, self.parts, self.message, self.weights = device, parts, message, weights
        self.share, self.own = self, {"vocabulary": self, "offload": moves}

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor:
        """F."""
        self.device.hold(self._part(microbatch)[1])
        return self._take(Kind.F, microbatch)

    def backward(self, microbatch: int, grad: Tensor | None, *, weights: bool) -> Tensor:
        """B, with or without W."""
        made = self._take(Kind.B, microbatch)
        if weights:
            self.weight(microbatch)
        return made

    def weight(self, microbatch: int) -> None:
        """W."""
        self._take(Kind.W, microbatch)
        self.device.hold(-self._part(microbatch)[1])

    def look_up(self, microbatch: int) -> Tensor:
        """E."""
        return self._take(Kind.E, microbatch)

    def give(self, microbatch: int, x: Tensor) -> Tensor:
        """S."""
        return self._take(Kind.S, microbatch)

    def combine(self, stage: Any, microbatch: int, given: Sequence[Tensor]) -> Tensor:
        """C."""
        return self._take(Kind.C, microbatch)

    def head_gradient(self, microbatch: int, loss: Tensor) -> None:
        """T."""
        self._take(Kind.T, microbatch)

    def rows_gradient(self, microbatch: int, grad: Tensor) -> None:
        """EW."""
        self._take(Kind.EW, microbatch)

    def _part(self, number: int) -> Part:
        return self.parts[number % len(self.parts)]

    def _take(self, kind: Kind, number: int) -> Tensor:
        self.device.compute(self._part(number)[0][kind])
        return self.message.clone()


class Layers(nn.Module):
    """A stage's model. split_by_autograd: W is a node of the graph, where the runtime splits
    graphs.
    """

    def __init__(self, device: Device, share: Share, *, split_by_autograd: bool) -> None:
        super().__init__()
        self.device, self.share, self.split_by_autograd = device, share, split_by_autograd
        self.weight = nn.Parameter(torch.zeros(1))
        self.given: list[Tensor | None] = [None]

    def set_input_tensor(self, x: Tensor | None) -> None:
        """Set what the next forward takes instead of data."""
        self.given[0] = x

    def forward(self, x: Tensor | None = None) -> Tensor:
        """[n, ...] -> the same shape."""
        x = self.given[0] if x is None else x
        assert x is not None, "neither data nor the stage before gave anything"
        if not self.split_by_autograd:
            return _compute(x, self.weight, self.device, self.share)
        # W joins behind B, so that torch's walk back to the weight does not pass through B a second
        # time.
        x = x if x.requires_grad else x.detach().requires_grad_()
        return _compute(x, None, self.device, self.share) + _weigh(
            self.weight, self.device, self.share
        )
