"""What a pass costs and holds: the only numbers a schedule is ever judged by.

A plain number is per device share (one microbatch through 1/P of the model), so that every schedule does the same work
on a rank, however many chunks it cuts; a tuple names each stage of the chain and is taken as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.schedule.passes import Kind, Pass, Placement, ScheduleError, Step

PerStage = float | tuple[float, ...]


@dataclass(frozen=True)
class Costs:
    """Durations in any time unit, memory in any unit; the defaults are the papers' F = B = W.

    Attributes:
        f, b, w: forward, input gradient, weight gradient. BW costs b + w.
        fb: a forward and a fused backward run as one overlapped pair, per device share; None: the sum of the two.
            A pair whose backward is split saves the same time.
        comm: latency of a message between two ranks. It occupies neither; a message within a rank costs nothing.
        mem_b: activation held from the start of F to the end of B (or BW).
        mem_w: the part of it held on from the end of B to the end of W.
    """

    f: PerStage = 1.0
    b: PerStage = 1.0
    w: PerStage = 1.0
    fb: float | None = None
    comm: float = 0.0
    mem_b: PerStage = 1.0
    mem_w: PerStage = 1.0

    def durations(self, placement: Placement) -> dict[Kind, list[float]]:
        """Seconds (or whatever the unit is) of each kind of pass, by stage."""
        f, b, w = (self._by_stage(name, placement) for name in ("f", "b", "w"))
        return {Kind.F: f, Kind.B: b, Kind.W: w, Kind.BW: [x + y for x, y in zip(b, w, strict=True)]}

    def memory(self, placement: Placement) -> tuple[list[float], list[float]]:
        """(mem_b, mem_w) by stage."""
        return self._by_stage("mem_b", placement), self._by_stage("mem_w", placement)

    def of(self, item: Pass, placement: Placement) -> float:
        """Duration of one pass."""
        return self.durations(placement)[item.kind][item.stage]

    def of_step(self, step: Step, placement: Placement) -> float:
        """Duration of a step, an overlapped pair included."""
        table = self.durations(placement)
        return sum(table[x.kind][x.stage] for x in step) - (self.saved(step, placement) if len(step) > 1 else 0.0)

    def saved(self, pair: Step, placement: Placement) -> float:
        """What an overlapped pair saves against its forward and its fused backward in turn."""
        if self.fb is None:
            return 0.0
        table = self.durations(placement)
        apart = sum(table[Kind.F if x.kind is Kind.F else Kind.BW][x.stage] for x in pair)
        return apart - self.fb * placement.num_ranks / placement.chain

    def _by_stage(self, name: str, placement: Placement) -> list[float]:
        value: PerStage = getattr(self, name)
        if isinstance(value, tuple):
            if len(value) != placement.chain:
                raise ScheduleError(
                    f"Costs.{name} names {len(value)} stages, but the model is cut in {placement.chain}."
                )
            return [value[placement.position(s)] for s in range(placement.num_stages)]
        return [value * placement.num_ranks / placement.chain] * placement.num_stages


UNIT = Costs()
"""F = B = W = 1, activations freed by W, no latency."""
