"""A device that computes by sleeping, and one step on it under our executor or under torch.distributed.pipelining.

A pass holds the main thread for its time without using the CPU, as a kernel does that its host waits for. What a step
takes beyond its passes is then what the runtime adds; what the main thread uses of the CPU is the runtime's and
autograd's own work.
"""

from __future__ import annotations

import ctypes
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.pipelining as peers
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.execute import execute
from megapipe.pipeline_parallel.messenger import Messenger
from megapipe.pipeline_parallel.stage import PipelineStage
from megapipe.pipeline_parallel.transport import Op, Transport
from megapipe.schedule import Costs, Kind, Schedule, lower, unpaired
from megapipe.tensor_parallel.rng import Stream
from megapipe.tensor_parallel.weight_grad import current_weight_grads

PEERS = {
    "gpipe": peers.ScheduleGPipe,
    "1f1b": peers.Schedule1F1B,
    "interleaved": peers.ScheduleInterleaved1F1B,
    "interleaved-zb": peers.ScheduleInterleavedZeroBubble,
    "zb-v": peers.ScheduleZBVZeroBubble,
    "dualpipe-v": peers.ScheduleDualPipeV,
}
"""torch's schedule of the same order."""


def sharpen_sleep() -> None:
    """Let sleeps of this thread end on time: Linux may add 50 microseconds to each to save power."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK, nanoseconds


@dataclass
class Device:
    """One rank's device in one step.

    Attributes:
        link: seconds that a message from another rank is on its way.
        epoch: start of the step; messages carry when they were sent, counted from here, so that float32 is enough.
        busy: seconds of passes so far.
        held, peak: activations kept, in device shares.
    """

    link: float = 0.0
    epoch: float = 0.0
    busy: float = 0.0
    held: float = 0.0
    peak: float = 0.0

    def compute(self, seconds: float) -> None:
        """One pass."""
        started = time.perf_counter()
        if seconds:
            time.sleep(seconds)
            self.busy += time.perf_counter() - started

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
        self.held += share
        self.peak = max(self.peak, self.held)


@dataclass(frozen=True)
class Share:
    """What a stage is to its device: seconds of F, B and W, device shares, and who is beyond a link."""

    f: float
    b: float
    w: float
    size: float
    remote_before: bool
    remote_after: bool


class _Compute(torch.autograd.Function):
    """F, and in backward B; W too, now or deferred, if it is given the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, device: Device, share: Share) -> Tensor:
        device.arrive(x, share.remote_before)
        device.hold(share.size)
        device.compute(share.f)
        ctx.device, ctx.share, ctx.has_weight = device, share, weight is not None
        ctx.owner = current_weight_grads()
        return x.clone()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        device, share = ctx.device, ctx.share
        device.arrive(grad, share.remote_after)
        device.compute(share.b)
        if ctx.owner is not None:  # as our layers: the weight's gradient does not pass through autograd
            ctx.owner.submit(lambda: _weight_pass(device, share))
            return grad.clone(), None, None, None
        if ctx.has_weight:
            _weight_pass(device, share)
        return grad.clone(), grad.new_zeros(1) if ctx.has_weight else None, None, None


class _Weight(torch.autograd.Function):
    """A node of its own for W, so that torch can find it on the way to the parameter and leave it for later."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, device: Device, share: Share) -> Tensor:
        ctx.device, ctx.share = device, share
        return weight.clone()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        _weight_pass(ctx.device, ctx.share)
        return grad, None, None


def _weight_pass(device: Device, share: Share) -> None:
    device.compute(share.w)
    device.hold(-share.size)


class Layers(nn.Module):
    """A stage's model. split_by_autograd: W is a node of the graph, where the runtime splits graphs."""

    def __init__(self, device: Device, share: Share, *, split_by_autograd: bool) -> None:
        super().__init__()
        self.device, self.share, self.split_by_autograd = device, share, split_by_autograd
        self.weight = nn.Parameter(torch.zeros(1))
        self.given: list[Tensor | None] = [None]

    def set_input_tensor(self, x: Tensor | None) -> None:
        """What the next forward takes instead of data."""
        self.given[0] = x

    def forward(self, x: Tensor | None = None) -> Tensor:
        """[n, ...] -> the same shape."""
        x = self.given[0] if x is None else x
        if not self.split_by_autograd:
            return _Compute.apply(x, self.weight, self.device, self.share)  # type: ignore[no-any-return]
        # W joins behind B, so that torch's walk back to the weight does not pass through B a second time.
        x = x if x.requires_grad else x.detach().requires_grad_()
        return _Compute.apply(x, None, self.device, self.share) + _Weight.apply(self.weight, self.device, self.share)  # type: ignore[no-any-return]


class Runner(ABC):
    """One rank of one schedule under one runtime. `step` runs it; `device` and `sent_bytes` say what it did.

    Args:
        costs: times in seconds.
        shape: of every message.
    """

    sent_bytes: int | None = None

    def __init__(self, mesh: ProcessMesh, schedule: Schedule, costs: Costs, shape: tuple[int, ...]) -> None:
        self.mesh, self.schedule, self.costs, self.shape = mesh, schedule, costs, shape
        self.device = Device(link=costs.comm)
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """What is done once, before the first step."""

    def layers(self, split_by_autograd: bool) -> dict[int, Layers]:
        """This rank's stages."""
        place = self.schedule.placement
        time_of, rank_of = self.costs.durations(place), place.rank_of

        def remote(stage: int, other: int | None) -> bool:
            return other is not None and rank_of[other] != rank_of[stage]

        def share(stage: int) -> Share:
            times = (time_of[kind][stage] for kind in (Kind.F, Kind.B, Kind.W))
            beyond = (remote(stage, other) for other in (place.prev(stage), place.next(stage)))
            return Share(*times, place.num_ranks / place.chain, *beyond)

        own = place.stages_on(self.mesh.pp.rank)
        return {s: Layers(self.device, share(s), split_by_autograd=split_by_autograd) for s in own}

    @abstractmethod
    def step(self) -> None:
        """All passes of one step."""


class _EmulatedLinks(Transport):
    """Real messages, stamped and counted as they leave."""

    def __init__(self, mesh: ProcessMesh, device: Device) -> None:
        super().__init__(mesh.pp)
        self.device, self.sent_bytes = device, 0

    def post(self, ops: list[Op]) -> Any:
        for op in ops:
            if op.sends:
                self.device.stamp(op.tensor)
                self.sent_bytes += op.tensor.nbytes
        return super().post(ops)


class _StampingStage(peers.PipelineStage):
    """torch's stage, its messages stamped as they leave."""

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        return self._stamped(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        return self._stamped(super().get_bwd_send_ops(bwd_chunk_id))

    def _stamped(self, ops: Any) -> Any:
        for op in ops:
            self.submod.device.stamp(op.tensor)
        return ops


class Ours(Runner):
    """The executor, the communicator and PipelineStage."""

    def prepare(self) -> None:
        self.transport = _EmulatedLinks(self.mesh, self.device)
        self.comm = Messenger(self.mesh.pp, self.shape, torch.float32, transport=self.transport)
        self.program = lower(unpaired(self.schedule), self.costs)[self.mesh.pp.rank]
        self.modules = self.layers(split_by_autograd=False)
        self.x = torch.zeros(self.shape)

    def step(self) -> None:
        place, self.transport.sent_bytes = self.schedule.placement, 0
        stages = {
            number: PipelineStage(
                module,
                lambda _, model: (model(self.x if model.given[0] is None else None), lambda out: (out.mean(), {})),
                None,
                holds_loss=place.is_last(number),
                loss_divisor=self.schedule.num_microbatches,
                per_token=False,
                collect_non_loss_data=False,
                stream=lambda microbatch: Stream(0, microbatch),
            )
            for number, module in self.modules.items()
        }
        execute(self.program, place, stages, self.comm)
        self.sent_bytes = self.transport.sent_bytes


class Torchs(Runner):
    """torch.distributed.pipelining with its own PipelineStage and automatic split of the graph."""

    def prepare(self) -> None:
        place, pp, m = self.schedule.placement, self.mesh.pp, self.schedule.num_microbatches
        make: Any = PEERS[self.schedule.name]
        modules = self.layers(split_by_autograd=any(kind.is_split for kind in self.schedule.kinds))
        hidden = torch.zeros(self.shape, requires_grad=True)
        data = gradient = hidden.detach()
        # Told everything about its tensors, torch need not find out by a forward and backward of its own.
        stages = [
            _StampingStage(
                module,
                s,
                place.num_stages,
                pp.device,
                input_args=data if place.is_first(s) else hidden,
                output_args=hidden,
                output_grads=None if place.is_last(s) else gradient,
                input_grads=None if place.is_first(s) else gradient,
                group=pp.group,
            )
            for s, module in modules.items()
        ]
        whole_rank = stages if issubclass(make, peers.schedules.PipelineScheduleMulti) else stages[0]
        self.run = make(whole_rank, m, loss_fn=lambda out, _: out.mean())
        whole = torch.zeros(m * self.shape[0], *self.shape[1:])
        self.args = (whole,) if any(map(place.is_first, modules)) else ()
        self.kwargs = {"target": whole, "losses": []} if any(map(place.is_last, modules)) else {}

    def step(self) -> None:
        self.run.step(*self.args, **self.kwargs, return_outputs=False)
