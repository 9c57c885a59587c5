"""Find slow stages and links: slower than peers with equal work, or than their own past.

The result depends on nothing but measured steps. A stage or link that is slow in two samples in a
row is reported once. If it costs less than WORTH of a step, it does not count as slow.
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

SLOWER = 1.25
"""A stage is slow from this multiple of the time of its peers."""
LATER_S = 1e-3
"""A link is late from this many seconds."""
WORTH = 0.02
"""Stages and links are reported if they cost this share of a step."""


@dataclass(frozen=True)
class Sample:
    """The measurements of one pipeline replica over some steps, in seconds.

    Attributes:
        costs: the measured costs of the replica's stages and links.
        ranks: global rank of each pipeline rank.
    """

    costs: Costs
    ranks: tuple[int, ...]


class Slow(NamedTuple):
    """A slow stage or link, or one that was slow and is no longer.

    Attributes:
        name: the stage or link in words, such as "link 0->1".
        text: the sentence to print.
        cost: the fraction of a step, 0 to 1, that the slowness costs; None if it is slow no longer.
    """

    name: str
    text: str
    cost: float | None


_Key = tuple[str, int, int]
"""("stage" or "link", replica, number)."""


@dataclass(frozen=True)
class History:
    """The measurements so far from which slow stages and links are found.

    A sample has the measured costs of one replica. `after` takes one more sample of each replica,
    and returns a new history and the slow stages and links.

    Attributes:
        least: the least seconds measured so far. A key is ("stage" or "link", replica, position of
            the stage or number of the link).
        suspects: names of stages and links that were slow in the last sample.
        named: names of stages and links that were reported and are still slow.
    """

    least: Mapping[_Key, float]
    suspects: frozenset[str] = frozenset()
    named: frozenset[str] = frozenset()

    def after(
        self, samples: Sequence[Sample], schedule: Schedule, counted: Costs
    ) -> tuple[History, list[Slow], list[Slow]]:
        """Return the history with one more sample of every replica of the pipeline.

        Args:
            samples: one for each replica.
            schedule: the table that all of them ran.
            counted: the plan's costs, which say which stages have equal work.
        Returns: (the new history, stages and links to report now as slow or as slow no longer, all
            that are slow in this sample).
        """
        slow = [
            *_slow_stages(self.least, samples, schedule, counted),
            *_late_links(self.least, samples, schedule),
        ]
        names = frozenset(x.name for x in slow)
        # A single slow sample is often another program or a garbage collection. So a finding is
        # reported in the second sample in a row, and again only after it was fast in between.
        #
        #     sample    1    2    3      4    5
        #     slow     yes  yes  yes    no   yes
        #     says          new        again
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
        # A plain number is a pipeline of one rank, which has no link.
        comm = sample.costs.comm
        if isinstance(comm, tuple):
            for link, seconds in enumerate(comm):
                yield ("link", replica, link), seconds


def stage_seconds(costs: Costs, schedule: Schedule) -> list[float]:
    """Return the seconds of F, B and W of one microbatch for each stage of one copy of the model.

    Args:
        costs: measured costs, in seconds.
        schedule: the table, for its placement.
    """
    place = schedule.placement
    # The overhead is the same on every stage and would make slow stages look less slow.
    time = replace(costs, overhead=0.0).durations(place)
    return [time[Kind.F][at] + time[Kind.BW][at] for at in range(place.chain)]


def extremes(samples: Sequence[Sample], schedule: Schedule, counted: Costs) -> str:
    """Return a line about the slowest and the fastest stage, compared with the plan.

    The plan's times are scaled to the median speed of all stages.

    Args:
        samples: one for each replica of the pipeline.
        schedule: the table that all replicas ran.
        counted: the plan's costs.
    """
    work = stage_seconds(counted, schedule)
    took = {(r, at): t for (what, r, at), t in _took(samples, schedule) if what == "stage"}
    speed = median(t / (work[at] or 1.0) for (_, at), t in took.items())
    ratios = {key: t / ((work[key[1]] or 1.0) * speed) for key, t in took.items()}
    names = []
    # Stages have different work, so their ratios to the plan are compared and not their times.
    for r, at in (max(took, key=ratios.__getitem__), min(took, key=ratios.__getitem__)):
        names.append(f"{_stage_name(samples[r], at, schedule)}, {ratios[r, at]:.2f} x")
    slowest, fastest = names
    return f"straggler: slowest {slowest}, fastest {fastest} the plan's time at the speed of all"


def _stage_name(sample: Sample, at: int, schedule: Schedule) -> str:
    place = schedule.placement
    ranks = [str(sample.ranks[place.rank_of[s]]) for s in range(at, place.num_stages, place.chain)]
    return f"stage {at} on rank {' or '.join(ranks)}"


def _slow_stages(
    least: Mapping[_Key, float], samples: Sequence[Sample], schedule: Schedule, counted: Costs
) -> Iterator[Slow]:
    """Yield stages that take at least SLOWER times as long as peers with equal work.

    A stage without peers is compared with its own past, corrected for a slow-down of all others.

    Args:
        least: the least seconds of each stage so far, as in `History`.
        samples: one for each replica.
        schedule: the table that all replicas ran.
        counted: the plan's costs, which say which stages have equal work.
    """
    place = schedule.placement
    took = {(r, at): t for (what, r, at), t in _took(samples, schedule) if what == "stage"}
    work = stage_seconds(counted, schedule)
    ends = {0, place.chain - 1}
    grown = {}
    for key, seconds in took.items():
        before = least.get(("stage", *key), 0.0)
        if before:
            grown[key] = seconds / before
    for (r, at), seconds in took.items():
        # The first and the last stage have embedding and head, so only replicas are their peers.
        equal = [
            t
            for (_, b), t in took.items()
            if b == at or (not ends & {at, b} and _equal(work[at], work[b]))
        ]
        others = [ratio for key, ratio in grown.items() if key != (r, at)]
        # The lower median: of two replicas the faster one is what the other should be.
        if len(equal) > 1:
            should = median_low(equal)
            peers = "its peers"
        # If all stages became slower together, such as by heat, no single one is to blame.
        elif others and (r, at) in grown:
            should = least["stage", r, at] * max(1.0, median(others))
            peers = "the time it took before"
        else:
            continue
        if seconds < SLOWER * should:
            continue
        # A slow stage whose rank has time to spare costs nothing, and is not reported.
        costs = samples[r].costs
        cost = _cost(costs, _with_stage(costs, at, should / seconds), schedule)
        if cost >= WORTH:
            name = _stage_name(samples[r], at, schedule)
            text = f"{name} computes {seconds / should:.1f} x {peers}, {cost:.0%} of the step"
            yield Slow(name, text, cost)


def _late_links(
    least: Mapping[_Key, float], samples: Sequence[Sample], schedule: Schedule
) -> Iterator[Slow]:
    """Yield links at least twice as slow as the median link, and slower by LATER_S seconds or more.

    A single link is compared with its own past.

    Args:
        least: the least seconds of each link so far, as in `History`.
        samples: one for each replica.
        schedule: the table that all replicas ran.
    """
    took = {(r, n): t for (what, r, n), t in _took(samples, schedule) if what == "link"}
    for (r, n), seconds in took.items():
        should = median_low(took.values())
        if len(took) == 1:
            should = least.get(("link", r, n), seconds)
        late = seconds - should
        if late < max(LATER_S, should):
            continue
        costs = samples[r].costs
        ranks = samples[r].ranks
        assert isinstance(costs.comm, tuple)
        usual = replace(costs, comm=(*costs.comm[:n], should, *costs.comm[n + 1 :]))
        cost = _cost(costs, usual, schedule)
        if cost >= WORTH:
            name = f"link {ranks[n]}->{ranks[(n + 1) % len(ranks)]}"
            yield Slow(name, f"{name} is {late * 1e3:.0f} ms late, {cost:.0%} of the step", cost)


def _equal(a: float, b: float) -> bool:
    """Return whether two amounts of work, `a` and `b`, differ by at most 1%."""
    return abs(a - b) <= 0.01 * max(a, b)


def _with_stage(costs: Costs, at: int, factor: float) -> Costs:
    """Return the costs with f, b and w of one stage multiplied by `factor`.

    Args:
        at: position of the stage in the model.
    """

    def faster(value: float | tuple[float, ...]) -> tuple[float, ...]:
        assert isinstance(value, tuple)
        return (*value[:at], value[at] * factor, *value[at + 1 :])

    return replace(costs, f=faster(costs.f), b=faster(costs.b), w=faster(costs.w))


def _cost(costs: Costs, usual: Costs, schedule: Schedule) -> float:
    """Return the fraction of a step, 0 to 1, by which a slow stage or link makes the step longer.

    Args:
        costs: the measured costs, with a slow stage or link.
        usual: the same costs with that stage or link as fast as it should be.
        schedule: the table that is simulated with both.
    """
    now = simulate(schedule, costs).makespan
    then = simulate(schedule, usual).makespan
    return (now - then) / now
