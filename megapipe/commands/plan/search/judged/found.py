"""Keep what a search has found so far, and say how good a plan must be to be of interest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol, TypeVar

from megapipe.commands.plan.search.judged.screen import (
    OUT_OF_MEMORY,
    SLOWER,
    CandidatePlan,
    ExtrapolatedPlan,
    Kind,
    Rejection,
    kind_of,
)
from megapipe.commands.plan.verdict import Machine
from megapipe.config import Config
from megapipe.plan.seconds.step import Layout, TimedPlan

OF_KIND = 4
"""Layouts of each kind that the search keeps."""
Group = tuple[Layout, str]
"""(layout, schedule, or "" for all schedules), made by `SearchResults.group`."""
Key = tuple[Layout, Kind, bool, tuple[object, ...]]
"""(layout, kind, whether single activations are moved, how compared plans differ otherwise)."""


class Limits(NamedTuple):
    """The seconds above which a plan's step will not be reported, for each group and kind.

    A kind is (whether weights are sharded, whether there is a pipeline). A group is a layout; where
    schedules are compared it is a layout with a schedule. The search keeps the best plan of each
    group, and the best OF_KIND layouts of each kind.

    Attributes:
        steps: {kind: {group: seconds of the best step so far}}.
        last: {kind: seconds of the slowest layout's step}, for kinds that have OF_KIND layouts.
    """

    steps: dict[Kind, dict[Group, float]]
    last: dict[Kind, float]

    def of(self, group: Group, kind: Kind) -> float:
        """Return the seconds above which a step of this group and kind will not be reported."""
        known = self.steps.get(kind, {}).get(group, inf)
        return min(known, self.last.get(kind, inf))


@dataclass
class SearchResults:
    """The results of a search so far.

    A plan's key is (layout, kind, whether single activations are offloaded or recomputed). The kind
    is (whether weights are sharded, whether there is a pipeline). One plan is kept for each key.
    Where a user leaves hardly more than the schedule free, the key has the schedule too, and what
    hides communication: the user asks how schedules compare.

    `note` stores the result of a candidate, `keep` a plan that fits, `take` a finished plan.
    `fastest` is the best step so far. `limits` are the step times above which a plan would not be
    reported.

    Attributes:
        sketches: {key: fastest plan}, with steps that are extrapolated from short batches.
        best: {key: fastest plan} for the report, computed like the plan of a run.
        finished: all plans that were computed so and fit.
        by_schedule: whether schedules are compared. A plan that was kept before this was set stays
            under its shorter key.
        like_yours: the plan to take of those with the user's own pp and schedule, which a second
            search has found; None if there is none.
        changed: the fastest plan of the user's flags with one of them changed; None if there is
            none, or if no change makes it faster.
        plain: the best plan that neither offloads nor recomputes single activations.
        tight: plans that need too much memory, to be tried again with single activations offloaded
            or recomputed.
        least: (bytes, candidate) of the plan without room that needs least memory.
        nearest: this plan, if no plan fits; None if it cannot be made.
        lost: {reason: number of plans that were rejected for this reason}.
        stopped: how far the search came, in words, if it was stopped before its end; else "".
        unlisted: layouts of more context parallelism than this were not listed for want of time; 0
            if all were.
        far: (plans that were looked at, all plans, or 0 if not known).
    """

    sketches: dict[Key, ExtrapolatedPlan] = field(default_factory=dict)
    best: dict[Key, TimedPlan] = field(default_factory=dict)
    finished: list[TimedPlan] = field(default_factory=list)
    by_schedule: bool = False
    like_yours: TimedPlan | None = None
    changed: TimedPlan | None = None
    plain: TimedPlan | None = None
    tight: list[CandidatePlan] = field(default_factory=list)
    least: tuple[float, CandidatePlan | None] = (inf, None)
    nearest: TimedPlan | None = None
    lost: Counter[str] = field(default_factory=Counter)
    stopped: str = ""
    unlisted: int = 0
    far: tuple[int, int] = (0, 0)

    @property
    def fastest(self) -> float | None:
        """Return the seconds of the best step so far; None before there is one."""
        return min((x.step for x in self.sketches.values()), default=None)

    @property
    def limits(self) -> Limits:
        """Return, by group and kind, the seconds above which a step will not be reported."""
        steps: dict[Kind, dict[Group, float]] = {}
        for x in self.sketches.values():
            of_kind = steps.setdefault(x.kind, {})
            group = self.group(x.layout, x.schedule)
            of_kind[group] = min(x.step, of_kind.get(group, inf))
        last: dict[Kind, float] = {}
        if self.by_schedule:
            return Limits(steps, last)
        for kind, of_layouts in steps.items():
            if len(of_layouts) >= OF_KIND:
                last[kind] = sorted(of_layouts.values())[OF_KIND - 1]
        return Limits(steps, last)

    def group(self, layout: Layout, schedule: str) -> Group:
        """Return the group of a plan: one plan is kept for each group and kind."""
        return layout, schedule * self.by_schedule

    def key(self, x: ExtrapolatedPlan | TimedPlan, config: Config) -> Key:
        """Return the key of a plan; only one plan is kept for each.

        Args:
            config: the plan's configuration.
        """
        others: tuple[object, ...] = ()
        if self.by_schedule:
            pairs = config.parallel.overlap_moe_expert_parallel_comm
            slices = config.parallel.pipeline_slices
            shared = config.parallel.vocab_parallel_pipeline
            others = (x.schedule, pairs, config.overlaps_tp, slices, shared)
        return x.layout, kind_of(config), x.moves, others

    def note(self, candidate: CandidatePlan, answer: ExtrapolatedPlan | Rejection) -> None:
        """Store the result of a candidate.

        Args:
            candidate: the plan that was tried.
            answer: the plan with its step if it fits, or why it was rejected.
        """
        if isinstance(answer, Rejection):
            if answer.peak < self.least[0]:
                self.least = answer.peak, candidate
            if answer.movable and answer.step is not None:
                self.tight.append(candidate._replace(least=answer.step, moves=True))
            else:
                self.lost[answer.reason] += 1
        else:
            self.keep(answer)

    def keep(self, sketch: ExtrapolatedPlan) -> None:
        """Store a plan that fits, unless a faster one with the same key is stored.

        Args:
            sketch: the plan. Its key is described at the class.
        """
        key = self.key(sketch, sketch.config)
        other = self.sketches.get(key)
        if other is None or sketch.step < other.step:
            self.sketches[key] = sketch
        self.lost[SLOWER] += other is not None

    def stop(self, why: str) -> None:
        """Note that the search ends early, by ctrl-C or by the time.

        Args:
            why: what has ended it; the text begins with how far the search came.
        """
        done, among = self.far
        looked = f" at {done:,} of {among:,} plans" if among else " before it had listed all plans"
        unseen = ""
        if among and done == among:
            looked = f" after all {among:,} plans"
            unseen = ": none is unseen, and more time computes more of the best ones exactly"
        self.stopped = self.stopped or f"{looked}{why}{unseen}"

    def take(self, made: TimedPlan | None, machine: Machine) -> None:
        """Store a finished plan if it fits and is the fastest with its key.

        The key is described at the class. A plan that does not fit is counted in `lost`.

        Args:
            made: the plan as a run computes it; None if a run cannot make it, which counts as out
                of memory.
            machine: the memory of a device and of a host.
        """
        if made is None or made.peak > machine.limit:
            self.lost[OUT_OF_MEMORY] += 1
            return
        if reason := machine.refuses(made.plan, made.config):
            self.lost[reason] += 1
            return
        self.finished.append(made)
        key = self.key(made, made.config)
        other = self.best.get(key)
        if other is None or made.step < other.step:
            self.best[key] = made
        if not made.moves and (self.plain is None or made.step < self.plain.step):
            self.plain = made


class _HasPeak(Protocol):
    @property
    def peak(self) -> float: ...


_Ranked = TypeVar("_Ranked", bound=_HasPeak)


def leaner(ranked: Iterable[_Ranked]) -> Iterator[_Ranked]:
    """Yield the fastest plan, and each plan that needs a tenth less memory than all faster ones.

    Args:
        ranked: plans with a peak in bytes, fastest first.
    """
    peak = inf
    for x in ranked:
        if x.peak <= 0.9 * peak:
            peak = x.peak
            yield x
