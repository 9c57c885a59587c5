"""Runs of passes between which a stage's weights are one share: from when to when they are whole on a rank.

What an executor must know of AF, AB and RS. A gather begins where it stands in the row, as copies do, and its run is
every pass of the stage that reads the weights (F, B, BW, R; no W, which takes input and gradient alone) from there to
the next gather of the stage or the end of the row. The weights go when the step with the run's last pass is over: no
pass of the table says so, `Run.dropped` does. The whole gradient of a stage is there from the first backward or W
behind the reduction before (`Sum.begin`, which waits for all reductions but the rank's last: a stage has one such
buffer) until its own reduction is waited for, which adds the share of this rank to what earlier ones left: `lives` says
where. In a table without gathers the weights are whole for ever (ZeRO-1, and with RS alone ZeRO-2). All data-parallel
replicas run one table, and gathers and reductions of a rank are one after another on the lane `dp`: so the collectives
of a group meet in one order, whatever their ranks wait for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from megapipe.schedule.kinds import Kind, Made
from megapipe.schedule.passes import Pass, Schedule


class Run(NamedTuple):
    """A gather with the passes that read what it brings, in order; there may be none in a table that is wrong."""

    gather: Pass
    passes: tuple[Pass, ...]

    @property
    def dropped(self) -> Pass:
        """The pass behind whose step the stage's weights are one share again."""
        return self.passes[-1] if self.passes else self.gather


class Sum(NamedTuple):
    """A reduction with the passes before it whose gradients of the weights it sums, in order.

    Attributes:
        begin: the pass from whose start on the gradient is whole: a B writes that of weights which no W is for.
    """

    reduce: Pass
    begin: Pass
    passes: tuple[Pass, ...]


def reads_weights(kind: Kind) -> bool:
    """Does such a pass need the weights of its stage?"""
    return any(need.made is Made.WEIGHTS for need in kind.traits.needs)


def adds_gradients(kind: Kind) -> bool:
    """Does such a pass add into the gradient of the weights that are gathered?"""
    return Made.WEIGHT_GRADIENT in kind.traits.makes


GATHERS = frozenset(kind for kind in Kind if Made.WEIGHTS in kind.traits.makes)
REDUCES = frozenset(kind for kind in Kind if Made.SCATTERED in kind.traits.makes)
SHARDS = GATHERS | REDUCES
"""Passes that gather weights and reduce gradients for runs of a stage's passes."""
_READS = frozenset(kind for kind in Kind if reads_weights(kind))
_ADDS = frozenset(kind for kind in Kind if adds_gradients(kind))


def runs(schedule: Schedule, rank: int) -> list[Run]:
    """The runs of a rank's stages, in the order of their gathers."""
    found, now = list[tuple[Pass, list[Pass]]](), dict[int, list[Pass]]()
    for item in (x for step in schedule.ranks[rank] for x in step):
        if item.kind in GATHERS:
            now[item.stage] = []
            found.append((item, now[item.stage]))
        elif item.kind in _READS and item.stage in now:
            now[item.stage].append(item)
    return [Run(gather, tuple(passes)) for gather, passes in found]


def sums(schedule: Schedule, rank: int) -> list[Sum]:
    """The reductions of a rank's stages, in order."""
    found, now, begin = list[Sum](), dict[int, list[Pass]](), dict[int, Pass]()
    for item in (x for step in schedule.ranks[rank] for x in step):
        if item.kind in REDUCES:
            found.append(Sum(item, begin.pop(item.stage, item), tuple(now.pop(item.stage, ()))))
        elif item.kind in _ADDS or item.kind.is_backward:
            begin.setdefault(item.stage, item)
        if item.kind in _ADDS:
            now.setdefault(item.stage, []).append(item)
    return found


def of_runs(schedule: Schedule) -> Mapping[tuple[Pass, Made], tuple[Pass, ...]]:
    """The needs that run: weights of a pass, gradients of a reduction, and of who begins a gradient the reductions that
    must be over: of its stage, and all of the rank but the one begun last, so that one gradient at most is being summed
    beside those that grow."""
    found: dict[tuple[Pass, Made], tuple[Pass, ...]] = {}
    for rank, row in enumerate(schedule.ranks if not schedule.kinds.isdisjoint(SHARDS) else ()):
        for run in runs(schedule, rank):
            found |= dict.fromkeys([(item, Made.WEIGHTS) for item in run.passes], (run.gather,))
        own, begun = {one.begin: one for one in sums(schedule, rank)}, list[Pass]()
        found |= {(one.reduce, Made.WEIGHT_GRADIENT): one.passes for one in own.values()}
        for item in (x for step in row for x in step):
            if item.kind in REDUCES:
                begun.append(item)
            elif item in own:
                over = [*begun[-2:-1], *(x for x in begun[-1:] if x.stage == item.stage)]
                found[item, Made.SCATTERED] = tuple(over)
    return found


def named_by_forwards(schedule: Schedule) -> Mapping[Pass, Pass | None]:
    """Return each gather of a table as an evaluation has it: named by its run's first forward, None without one."""
    found: dict[Pass, Pass | None] = {}
    for run in (run for rank in range(len(schedule.ranks)) for run in runs(schedule, rank)):
        first = next((x for x in run.passes if x.kind.is_forward), None)
        found[run.gather] = first and first._replace(kind=Kind.AF)
    return found


class Life(NamedTuple):
    """A while in which a stage's weights (AF) or gradient (RS) are whole: taken when the step `first` is begun, free
    when `last` is over, and where `waits` is begun if that is not -1."""

    kind: Kind
    stage: int
    first: int
    last: int
    waits: int = -1


def lives(schedule: Schedule, rank: int) -> Iterator[Life]:
    """Yield from when to when a rank has each gathered weight and each unreduced gradient.

    A reduction's memory is free when the rank begins its next reduction or the next gradient of that stage, because
    both wait for the reduction.
    """
    at = {item: i for i, step in enumerate(schedule.ranks[rank]) for item in step}
    for run in runs(schedule, rank):
        yield Life(Kind.AF, run.gather.stage, at[run.gather], at[run.dropped])
    own = sums(schedule, rank)
    for n, one in enumerate(own):
        stage, later = one.reduce.stage, own[n + 1 :]
        waits = [at[x.reduce] for x in later[:1]] + [
            at[x.begin] for x in later if x.reduce.stage == stage
        ]
        yield Life(Kind.RS, stage, at[one.begin], at[one.reduce], min(waits, default=-1))
