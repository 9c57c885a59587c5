"""What a pass costs and holds: the only numbers a schedule is ever judged by.

A plain number is per device share (one microbatch through 1/P of the model), so that every schedule does the same work
on a rank, however many chunks it cuts; a tuple names each stage of the chain and is taken as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.errors import ScheduleError
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Placement, Step

PerStage = float | tuple[float, ...]
MOST = 1e100
_OF_LAYERS, _OF_RANKS = {"f", "b", "w"}, {"s", "t", "e", "mem_s"}


@dataclass(frozen=True)
class Costs:
    """Durations in any time unit, memory in any unit; the defaults are the papers' F = B = W.

    Attributes:
        f, b, w: forward, input gradient, weight gradient. BW costs b + w.
        fb: a forward and a fused backward run as one overlapped pair, per device share; None: the sum of the two.
            A pair whose backward is split takes w less, and none is shorter than one of its passes.
        comm: time of a message between two ranks, latency and transfer, of all links or of each: link r joins ranks r
            and r+1, the last one p-1 and 0. It occupies neither rank; a message within a rank costs nothing.
        s, t: what a rank's share of the vocabulary takes of a microbatch, forward with the input gradient and weight
            gradient; e: looking up its rows, adding to their gradients, and combining the shares. Of a rank, however
            many stages it has.
        mem_s: what a share holds from the start of S to the end of T, of a rank too.
        overhead: what every F, B, W, BW and pair costs beside its work, however small the stage: host time, launches.
        mem_b: activation held from the start of F to the end of B (or BW).
        mem_w: the part of it held on from the end of B to the end of W.
        g, u, a, v: the passes of a stage as a whole: reduce gradients, update, gather weights, validate the update.
    Raises: ScheduleError for a number that is negative, undefined, or so large that sums of it may be infinite.
    """

    f: PerStage = 1.0
    b: PerStage = 1.0
    w: PerStage = 1.0
    fb: float | None = None
    comm: float | tuple[float, ...] = 0.0
    mem_b: PerStage = 1.0
    mem_w: PerStage = 1.0
    g: PerStage = 0.0
    u: PerStage = 0.0
    a: PerStage = 0.0
    v: PerStage = 0.0
    overhead: float = 0.0
    s: PerStage = 0.0
    t: PerStage = 0.0
    e: PerStage = 0.0
    mem_s: PerStage = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            for number in value if isinstance(value, tuple) else (value,):
                if number is not None and not 0 <= number <= MOST:
                    raise ScheduleError(f"Costs.{name} must be a number from 0 to {MOST:g}, got {number}.")

    def durations(self, placement: Placement) -> dict[Kind, list[float]]:
        """Duration of each kind of pass, by stage."""
        stages = {name: self._by_stage(name, placement) for kind in Kind for name in kind.rule.costs}
        return {
            kind: [
                sum(parts, self.overhead if kind.rule.costs[0] in _OF_LAYERS else 0.0)
                for parts in zip(*(stages[name] for name in kind.rule.costs), strict=True)
            ]
            for kind in Kind
        }

    def lag(self, src: int, dst: int, ranks: int) -> float:
        """Time of a message from one rank to another; between ranks that are no neighbours, of the slowest link."""
        if src == dst:
            return 0.0
        if not isinstance(self.comm, tuple):
            return self.comm
        if len(self.comm) < ranks - 1:
            raise ScheduleError(
                f"Costs.comm names {len(self.comm)} links, but {ranks} ranks have at least {ranks - 1}."
            )
        near, far = min(src, dst), max(src, dst)
        if far - near == 1:
            return self.comm[near]
        return self.comm[-1] if (near, far) == (0, ranks - 1) and len(self.comm) == ranks else max(self.comm)

    def memory(self, placement: Placement) -> tuple[list[float], list[float], list[float]]:
        """(mem_b, mem_w, mem_s) by stage."""
        mem_b, mem_w, mem_s = (self._by_stage(name, placement) for name in ("mem_b", "mem_w", "mem_s"))
        return mem_b, mem_w, mem_s

    def of_step(self, step: Step, placement: Placement) -> float:
        """Duration of a step: of one pass, or of an overlapped pair."""
        table = self.durations(placement)
        if len(step) == 1 or self.fb is None:
            return sum(table[x.kind][x.stage] for x in step)
        split = sum(table[Kind.W][x.stage] - self.overhead for x in step if x.kind.is_split)
        together = self.fb * placement.num_ranks / placement.chain - split + self.overhead
        return max(together, *(table[x.kind][x.stage] for x in step))

    def _by_stage(self, name: str, placement: Placement) -> list[float]:
        value: PerStage = getattr(self, name)
        if isinstance(value, tuple):
            if len(value) != placement.chain:
                raise ScheduleError(
                    f"Costs.{name} names {len(value)} stages, but the model is cut in {placement.chain}."
                )
            return [value[placement.position(s)] for s in range(placement.num_stages)]
        share = 1 if name in _OF_RANKS else placement.num_ranks / placement.chain
        return [value * share] * placement.num_stages


UNIT = Costs()
"""F = B = W = 1, activations freed by W, no latency."""
