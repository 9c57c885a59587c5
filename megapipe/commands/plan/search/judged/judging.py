"""Judge candidates side by side, those first that promise most, and learn from what they took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from megapipe.commands.plan.search.judged.found import Limits, SearchResults
from megapipe.commands.plan.search.judged.screen import (
    SLOWER,
    CandidatePlan,
    ExtrapolatedPlan,
    Kind,
    Rejection,
    Screen,
    kind_of,
)
from megapipe.commands.plan.search.judged.workers import Workers
from megapipe.config import Config
from megapipe.plan.seconds.step import Layout, layout_of

TOLERANCE = 0.005
"""A plan that is expected to be faster by less than this share of its step is not looked at.

At last plans are judged that are expected to be faster than the best one by any share.
"""
_ROUND = 24
"""Plans that a process judges between two looks at what others found."""
_BOUND = "expected to be slower"
Tell = Callable[..., None]
"""Called with the plans that were looked at, all plans, the best step so far in seconds, and
perhaps what the plans are."""


@dataclass
class Learned:
    """Predicts the step of a plan from similar plans, as a multiple of its work.

    The work is a rank's compute time. The step is longer, as the pipeline has to fill and some
    gathers are not hidden. The ratio of the two depends mostly on the schedule, the pipeline ranks
    and the number of microbatches. So a plan is expected to have the smallest ratio that was seen
    among similar plans, the plans with the same `key`.

    `note` remembers the ratio of a plan. `expected` predicts the step of another plan.

    Attributes:
        cells: all choices of parallel sizes and recomputation, by `CandidatePlan.cell`.
        ratios: {key: smallest ratio of step to work}.
    """

    cells: list[Config]
    ratios: dict[Any, float] = field(default_factory=dict)

    def key(self, x: CandidatePlan) -> tuple[Any, ...]:
        """Return a tuple that is equal for similar plans, such as plans of the same schedule."""
        cell = self.cells[x.cell]
        ranks = cell.parallel.pipeline_model_parallel_size
        pipeline = (kind_of(cell), ranks, cell.num_microbatches, x.schedule, x.chunks)
        shared: tuple[Any, ...] = (*pipeline, x.moves, x.balanced)
        if not cell.parallel.use_megatron_fsdp:
            return shared
        # How long gathers take, and what hides them, is a matter of the layout.
        tp, cp, _, _, ep, etp = key_of(cell)[0]
        return (*shared, tp, cp, ep, etp)

    def expected(self, x: CandidatePlan) -> float:
        """Estimate the seconds of a plan's step from similar plans that were tried."""
        return max(x.least, x.work * self.ratios.get(self.key(x), 0.0))

    def note(self, x: CandidatePlan, answer: ExtrapolatedPlan | Rejection) -> None:
        """Remember a plan's ratio of step time to work, by which similar plans are estimated.

        Args:
            x: the plan that was tried.
            answer: the plan with its step time, or why it was rejected, perhaps also with a step
                time.
        """
        if answer.step is not None:
            key = self.key(x)
            ratio = answer.step / x.work
            self.ratios[key] = min(ratio, self.ratios.get(key, ratio))


@dataclass
class Judging:
    """Tries candidates in several processes, and reports how far the search is.

    `judge` tries a list of candidates: it plans each one, or finds why there is no plan.

    Attributes:
        found: gets the results.
        workers: the processes that try candidates.
        cells: all choices of parallel sizes and recomputation, by `CandidatePlan.cell`.
        tell: called with (plans so far, all plans, seconds of the best step or None).
        learned: predicts steps from similar plans.
        keys: layout and kind of each cell.
    """

    found: SearchResults
    workers: Workers
    cells: list[Config]
    tell: Tell
    learned: Learned = field(init=False)
    keys: list[tuple[Layout, Kind]] = field(init=False)

    def __post_init__(self) -> None:
        self.learned = Learned(self.cells)
        self.keys = [key_of(cell) for cell in self.cells]

    def judge(self, candidates: list[CandidatePlan], before: int = 0) -> None:
        """Compute step times: of one candidate of each similar group, then of all others.

        In both rounds the candidates with the smallest lower bounds come first. At last
        follow skipped candidates that may still be faster than the best plan.

        Args:
            before: number of candidates of earlier calls, for the display of progress.
        """
        first: dict[Any, CandidatePlan] = {}
        for x in sorted(candidates, key=attrgetter("least")):
            first.setdefault(self.learned.key(x), x)
        chosen = {id(x) for x in first.values()}
        others = [x for x in candidates if id(x) not in chosen]
        among = before + len(candidates)
        skipped = self._rounds([*first.values()], among, before)
        ordered = sorted(others, key=self.learned.expected)
        skipped += self._rounds(ordered, among, before + len(first))
        best = self.found.fastest or 0.0
        close = [x for x in skipped if self.learned.expected(x) < best]
        skipped = [x for x in skipped if self.learned.expected(x) >= best]
        skipped += self._rounds(close, among, among - len(close), tolerance=0.0)
        for x in skipped:
            self.found.lost[SLOWER if x.moves else _BOUND] += 1

    def balanced(
        self, candidates: list[CandidatePlan], is_uneven: Callable[[CandidatePlan], bool | None]
    ) -> list[CandidatePlan]:
        """Return the candidates with a pipeline again, with layers divided by their work.

        Candidates whose lower bound is too slow are left out, as the bound holds for equal ranks.
        Of candidates with equal ranks, schedule and recomputation one says for all whether ranks
        have unequal work.

        Args:
            candidates: candidates with layers divided evenly.
            is_uneven: says whether ranks of a candidate have unequal work. None if there is no
                such plan, so that the next candidate is asked.
        """
        limits = self.found.limits
        uneven: dict[Any, bool | None] = {}
        found = []
        for x in sorted(candidates, key=attrgetter("least")):
            layout, kind = self.keys[x.cell]
            if kind != (False, True) or x.least > (1 - TOLERANCE) * self._limit(limits, x):
                continue
            granularity = self.cells[x.cell].model.recompute_granularity
            alike = (layout[2], x.schedule, x.chunks, granularity)
            if uneven.get(alike) is None:
                uneven[alike] = is_uneven(x)
            if uneven[alike]:
                found.append(x._replace(balanced=True))
        return found

    def _rounds(
        self,
        candidates: list[CandidatePlan],
        among: int,
        before: int,
        tolerance: float = TOLERANCE,
    ) -> list[CandidatePlan]:
        """Try candidates some at a time. Skip each one that is expected to be too slow to report.

        The first rounds are short: once a good plan is known, most others are skipped.

        Args:
            among: the number of all candidates of the search, for the progress bar.
            before: the number of candidates that were judged earlier.
        """
        waiting: list[CandidatePlan] = []
        skipped: list[CandidatePlan] = []
        limits = self.found.limits
        size = 2
        for n, x in enumerate(candidates):
            if self.learned.expected(x) > (1 - tolerance) * self._limit(limits, x):
                skipped.append(x)
            else:
                waiting.append(x)
            if len(waiting) >= size or (waiting and n + 1 == len(candidates)):
                self._ask(waiting, limits)
                limits = self.found.limits
                self.tell(before + n + 1, among, self.found.fastest)
                size = min(2 * size, 2 * _ROUND)
                waiting = []
        return skipped

    def _limit(self, limits: Limits, x: CandidatePlan) -> float:
        """Return the seconds above which a step of this candidate will not be reported."""
        layout, kind = self.keys[x.cell]
        return limits.of(self.found.group(layout, x.schedule), kind)

    def _ask(self, waiting: list[CandidatePlan], limits: Limits) -> None:
        # Candidates of a cell follow each other, so that its plan is made once.
        waiting = sorted(waiting, key=attrgetter("cell", "least"))
        questions = [(x, self._limit(limits, x)) for x in waiting]
        for x, answer in zip(waiting, self.workers.ask(_answer, questions), strict=True):
            self.found.note(x, answer)
            self.learned.note(x, answer)


def _answer(screen: Screen, question: tuple[CandidatePlan, float]) -> ExtrapolatedPlan | Rejection:
    return screen.judge(*question)


def key_of(cell: Config) -> tuple[Layout, Kind]:
    """Return (layout, kind) of a cell, by which plans are compared.

    A layout is (tp, cp, pp, micro batch size, ep, etp). A kind says whether weights are sharded,
    and whether there is a pipeline.
    """
    return layout_of(cell), kind_of(cell)
