"""One step of a rank of emulated devices: under our executor, or under
torch.distributed.pipelining.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.distributed.axis import CPU, Pending
from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.execute import execute
from megapipe.pipeline_parallel.messages.messenger import Messenger
from megapipe.pipeline_parallel.messages.transport import Op, Transport
from megapipe.pipeline_parallel.passes.begin import Ends, Weights
from megapipe.pipeline_parallel.request import Request
from megapipe.pipeline_parallel.shapes import together_on
from megapipe.pipeline_parallel.stage import PipelineStage
from megapipe.pipeline_parallel.stopwatch import Stopwatch
from megapipe.schedule import Costs, Kind, Pass, Schedule, lower, unpaired
from megapipe.schedule.costs import SHARES
from megapipe.schedule.kinds import Lane
from megapipe.schedule.passes import overlaps
from tools.bench.emulate.device import Device, Layers, Moves, Part, Share, Shared
from tools.bench.emulate.lanes import Lanes

PEERS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
"""torch's schedule of the same order: its name in torch.distributed.pipelining."""


class Runner(ABC):
    """One rank of one schedule under one runtime. `step` runs it; `device`, `sent_bytes` and a
    `watch` (of ours) say what it did.

    Args:
        costs: times in seconds.
        shape: of every message.
    Attributes:
        steps: how many follow each other in one call of `step`.
        exposed, exposed_in_pairs: seconds in which passes of the last step only waited for their
            communication, and of them those in pairs of a forward and a backward.
        reduced_bytes: G is an all-reduce over data parallel of so much for a device share; 0: it
            takes costs.g of a link that does nothing else and waits for no other rank.
    """

    sent_bytes: int | None = None
    steps = 1
    reduced_bytes = 0
    watch: Stopwatch | None = None
    exposed = exposed_in_pairs = 0.0

    def __init__(
        self, mesh: ProcessMesh, schedule: Schedule, costs: Costs, shape: tuple[int, ...]
    ) -> None:
        self.mesh, self.schedule, self.costs, self.shape = mesh, schedule, costs, shape
        assert not isinstance(costs.comm, tuple), "the emulated links are all alike"
        self.device = Device(link=costs.comm)
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Prepare once, before the first step."""

    def layers(self, split_by_autograd: bool) -> dict[int, Layers]:
        """This rank's stages."""
        place = self.schedule.placement
        rank_of = place.rank_of

        def remote(stage: int, other: int | None) -> bool:
            return other is not None and rank_of[other] != rank_of[stage]

        def share(stage: int) -> Share:
            f, b, w = (
                self.costs.chains(kind, stage, place)[0] for kind in (Kind.F, Kind.B, Kind.W)
            )
            before, after = (
                remote(stage, other) for other in (place.prev(stage), place.next(stage))
            )
            return Share(f, b, w, place.num_ranks / place.chain, before, after)

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


class Ours(Runner):
    """The executor, the communicator and PipelineStage."""

    def prepare(self) -> None:
        self.transport = _EmulatedLinks(self.mesh, self.device)
        self.comm = Messenger(self.mesh.pp, self.shape, torch.float32, transport=self.transport)
        # Pairs are one after the other where passes have no communication to hide.
        hides = any(getattr(self.costs, name) for name in SHARES)
        self.table = self.schedule if hides else unpaired(self.schedule)
        self.program, self.together = (
            lower(self.table, self.costs)[self.mesh.pp.rank],
            together_on(CPU),
        )
        self.modules = self.layers(split_by_autograd=False)
        self.request = Request(
            forward_step_func=self.forward,
            data_iterator=None,
            model=[*self.modules.values()],
            num_microbatches=self.schedule.num_microbatches,
            seq_length=None,
            micro_batch_size=None,
        )
        self.x = torch.zeros(self.shape)
        copies = Kind.O in self.schedule.kinds
        self.lanes = Lanes(self.mesh, self.schedule, self.costs, self.device) if copies else None
        self._pending: Pending | None = None
        self._link_free = 0.0

    def forward(
        self, _: Any, model: Any
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Any]]]]:
        """Megatron's forward step."""
        return model(self.x if model.given[0] is None else None), lambda out: (out.mean(), {})

    def step(self) -> None:
        self.transport.sent_bytes = 0
        for _ in range(self.steps):
            self._step()
        self._norm()
        self.sent_bytes = self.transport.sent_bytes

    def _step(self) -> None:
        place = self.schedule.placement
        if self.lanes:
            self.lanes.begin_step()
        weights = {s: self._weights(s) for s in place.stages_on(self.mesh.pp.rank)}
        stages: Any = (
            self._shared(weights)
            if place.vocabulary or self.schedule.cuts or self.lanes
            else {
                number: PipelineStage(
                    self.request,
                    module,
                    None,
                    mesh=self.mesh,
                    ends=Ends(holds_loss=place.is_last(number)),
                    weights=weights[number],
                )
                for number, module in self.modules.items()
            }
        )
        watch = self.watch or Stopwatch(CPU)
        execute(self.program, place, stages, self.comm, watch=watch, together=self.together)
        steps = [
            step
            for step in self.table.ranks[self.mesh.pp.rank]
            if step[0].kind.traits.lane is Lane.COMPUTE
        ]
        pairs = [ran[1:3] for step, ran in zip(steps, watch.passes, strict=True) if overlaps(step)]
        inside = [
            end - begin for begin, end in watch.waits if any(x <= begin < y for x, y in pairs)
        ]
        self.exposed, self.exposed_in_pairs = watch.exposed_communication, sum(inside)

    def _weights(self, stage: int) -> Weights:
        gather = partial(self._on_link, Kind.A, stage)
        return Weights(
            partial(self._reduce, stage),
            gather,
            partial(self._update, stage),
            self._norm,
            copy=partial(self._on_link, Kind.P, stage),
        )

    def _reduce(self, stage: int) -> Callable[[], None]:
        place = self.schedule.placement
        if self.reduced_bytes:
            gradients = torch.zeros(self.reduced_bytes // 4 * place.num_ranks // place.chain)
            work: Any = dist.all_reduce(gradients, group=self.mesh.dp.group, async_op=True)
            return lambda: work.wait() and None
        return self._on_link(Kind.G, stage)

    def _on_link(self, kind: Kind, stage: int) -> Callable[[], None]:
        """A collective on the rank's link, one after the other. Returns: what waits for its end."""
        took = self.costs.durations(self.schedule.placement)[kind][stage]
        self._link_free = free = max(self._link_free, time.perf_counter()) + took
        return lambda: time.sleep(max(0.0, free - time.perf_counter()))

    def _shared(self, weights: Mapping[int, Weights]) -> dict[int, Shared]:
        place, cuts = self.schedule.placement, self.schedule.cuts
        table, whole = self.schedule, place.num_ranks / place.chain
        items = [
            Pass(Kind.F, 0, i, n) for i in range(len(table.documents) or 1) for n in table.slices
        ]
        lengths = [self.costs.of_slice(cuts, table.part(x)).durations(place) for x in items]
        sizes = [whole if x.slice is None else whole * cuts[x.slice] / sum(cuts) for x in items]

        def parts(stage: int) -> list[Part]:
            rows = zip(lengths, sizes, strict=True)
            return [
                ({kind: stages[stage] for kind, stages in length.items()}, size)
                for length, size in rows
            ]

        def moves(stage: int) -> Moves | None:
            lanes = self.lanes
            return (
                Moves(partial(lanes.offload, stage), partial(lanes.load, stage)) if lanes else None
            )

        own = place.stages_on(self.mesh.pp.rank)
        return {s: Shared(self.device, parts(s), self.x, weights[s], moves(s)) for s in own}

    def _update(self, stage: int) -> None:
        """The update at the last stage of the rank: its part of the norm; a table with V does not
        wait for it here.
        """
        if stage == max(self.modules):
            self._pending = self.mesh.world.start_all_reduce(torch.zeros(1))
        if Kind.V not in self.schedule.kinds:
            self._norm()

    def _norm(self) -> bool:
        if self._pending is not None:
            self._pending.wait()
        self._pending = None
        return False
