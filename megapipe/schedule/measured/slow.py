"""Slow stages and links: those that take more than others of equal work, or than they once did, and at what cost.

A pure function of what some steps have taken. What is slow in two samples in a row is named, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low
from typing import NamedTuple

from megapipe.schedule.costs import Costs
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Schedule
from megapipe.schedule.simulate import simulate

SLOWER, LATER_S, WORTH = 1.25, 1e-3, 0.02
"""Bounds of what is named: it takes so much more than it should, is so much later, costs so much of a step."""


@dataclass(frozen=True)
class Sample:
    """A pipeline in some steps, in seconds.

    Attributes:
        costs: of its stages and links, see schedule.measured.
        ranks: the global rank at each of its positions.
    """

    costs: Costs
    ranks: tuple[int, ...]


class Slow(NamedTuple):
    """A slow stage or link: its name, in words, and the share of a step that it costs; None for one that was slow."""

    name: str
    text: str
    cost: float | None


_Key = tuple[str, int, int]
"""`stage` or `link`, replica, number."""


@dataclass(frozen=True)
class History:
    """The history of samples so far.

    Attributes:
        least: each took.
        suspects: what was slow in the last sample.
        named: what was said to be slow and still is.
    """

    least: Mapping[_Key, float]
    suspects: frozenset[str] = frozenset()
    named: frozenset[str] = frozenset()

    def after(
        self, samples: Sequence[Sample], schedule: Schedule, counted: Costs
    ) -> tuple[History, list[Slow], list[Slow]]:
        """A history with one more sample of every replica of the pipeline under one table.

        Args:
            counted: what the plan gives each stage, which says whose work is equal.
        Returns: the history to go on with, what is to be named now, and what the sample shows by itself.
        """
        slow = [
            *_slow_stages(self.least, samples, schedule, counted),
            *_late_links(self.least, samples, schedule),
        ]
        names = frozenset(x.name for x in slow)
        new = [x for x in slow if x.name in self.suspects - self.named]
        over = [
            Slow(name, f"{name} is as fast as it should be again", None)
            for name in sorted(self.named - names)
        ]
        took = dict(_took(samples, schedule))
        least = {key: min(seconds, self.least.get(key, seconds)) for key, seconds in took.items()}
        named = (self.named & names) | {x.name for x in new}
        return History(least, names, named), [*new, *over], slow


def _took(samples: Sequence[Sample], schedule: Schedule) -> Iterator[tuple[_Key, float]]:
    for replica, sample in enumerate(samples):
        for at, seconds in enumerate(stage_seconds(sample.costs, schedule)):
            yield ("stage", replica, at), seconds
        comm = sample.costs.comm
        for link, seconds in enumerate(comm if isinstance(comm, tuple) else ()):
            yield ("link", replica, link), seconds


def stage_seconds(costs: Costs, schedule: Schedule) -> list[float]:
    """Seconds of a microbatch, forward and backward, at each position of the chain."""
    time, place = replace(costs, overhead=0.0).durations(schedule.placement), schedule.placement
    return [time[Kind.F][at] + time[Kind.BW][at] for at in range(place.chain)]


def extremes(samples: Sequence[Sample], schedule: Schedule, counted: Costs) -> str:
    """The slowest and the fastest stage, by what the plan gives each at the speed of all."""
    work = stage_seconds(counted, schedule)
    took = {(r, at): t for (what, r, at), t in _took(samples, schedule) if what == "stage"}
    speed = median(t / (work[at] or 1.0) for (_, at), t in took.items())
    ratios = {key: t / ((work[key[1]] or 1.0) * speed) for key, t in took.items()}
    slowest, fastest = max(took, key=lambda x: ratios[x]), min(took, key=lambda x: ratios[x])
    (a, b) = (
        f"{_stage_name(samples[r], at, schedule)}, {ratios[r, at]:.2f} x"
        for r, at in (slowest, fastest)
    )
    return f"straggler: slowest {a}, fastest {b} what the plan gives it at the speed of all"


def _stage_name(sample: Sample, at: int, schedule: Schedule) -> str:
    place = schedule.placement
    ranks = [str(sample.ranks[place.rank_of[s]]) for s in range(at, place.num_stages, place.chain)]
    return f"stage {at} on rank {' or '.join(ranks)}"


def _slow_stages(
    least: Mapping[_Key, float], samples: Sequence[Sample], schedule: Schedule, counted: Costs
) -> Iterator[Slow]:
    """Slow stages beside those of equal work; one without any beside itself as it was, if others are as they were."""
    place = schedule.placement
    took = {(r, at): t for (what, r, at), t in _took(samples, schedule) if what == "stage"}
    work = stage_seconds(counted, schedule)
    ends = {0, place.chain - 1}
    grown = {
        key: t / before for key, t in took.items() if (before := least.get(("stage", *key), 0.0))
    }
    for (r, at), seconds in took.items():
        equal = [
            t
            for (_, b), t in took.items()
            if b == at or (not ends & {at, b} and _alike(work[at], work[b]))
        ]
        others = [ratio for key, ratio in grown.items() if key != (r, at)]
        if len(equal) > 1:
            should, peers = median_low(equal), "its peers"
        elif others and (r, at) in grown:
            should, peers = least["stage", r, at] * max(1.0, median(others)), "what it took before"
        else:
            continue
        if seconds < SLOWER * should:
            continue
        costs = samples[r].costs
        cost = _cost(costs, _with_stage(costs, at, should / seconds), schedule)
        if cost >= WORTH:
            name = _stage_name(samples[r], at, schedule)
            yield Slow(
                name,
                f"{name} computes {seconds / should:.1f} x {peers}, {cost:.0%} of the step",
                cost,
            )


def _late_links(
    least: Mapping[_Key, float], samples: Sequence[Sample], schedule: Schedule
) -> Iterator[Slow]:
    """Late links beside the others; where there is one, beside itself as it was."""
    took = {(r, n): t for (what, r, n), t in _took(samples, schedule) if what == "link"}
    for (r, n), seconds in took.items():
        should = median_low(took.values()) if len(took) > 1 else least.get(("link", r, n), seconds)
        if (late := seconds - should) < max(LATER_S, should):
            continue
        costs, ranks = samples[r].costs, samples[r].ranks
        assert isinstance(costs.comm, tuple)
        usual = replace(costs, comm=(*costs.comm[:n], should, *costs.comm[n + 1 :]))
        if (cost := _cost(costs, usual, schedule)) >= WORTH:
            name = f"link {ranks[n]}->{ranks[(n + 1) % len(ranks)]}"
            yield Slow(name, f"{name} is {late * 1e3:.0f} ms late, {cost:.0%} of the step", cost)


def _alike(a: float, b: float) -> bool:
    return abs(a - b) <= 0.01 * max(a, b)


def _with_stage(costs: Costs, at: int, factor: float) -> Costs:
    """The costs with one stage faster."""

    def faster(value: float | tuple[float, ...]) -> tuple[float, ...]:
        assert isinstance(value, tuple)
        return (*value[:at], value[at] * factor, *value[at + 1 :])

    return replace(costs, f=faster(costs.f), b=faster(costs.b), w=faster(costs.w))


def _cost(costs: Costs, usual: Costs, schedule: Schedule) -> float:
    """Share of the passes that the difference takes."""
    now, then = (simulate(schedule, x).makespan for x in (costs, usual))
    return (now - then) / now
