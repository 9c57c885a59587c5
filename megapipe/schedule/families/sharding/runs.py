"""Runs of passes with gathered weights: when a rank holds full weights and full gradients.

A *run* of a stage begins where its gather (AF or AB) stands in the row. It lasts until the next
gather of the stage, or the end of the row. It has the passes of the stage that read weights: F, B,
BW and R. W reads only input and gradient, so it has no place in a run. The full weights are dropped
after the step with the run's last pass. No pass of the table says so; `Run.dropped` does.

The full gradient of a stage begins with the first backward or W after the previous reduction
(`Sum.begin`). It ends with its own reduction (RS). The reduction adds this rank's shard to what
earlier reductions left. A gradient begins only after all reductions of the rank but the last one,
and the stage has one buffer for it; `lives` has the intervals.

Two runs of one stage, and how long its full weights and gradient exist:

    row        AF0  F0  F1  AB0  B0  W0  B1  W1  RS1
    weights    [---------]  [-------------]
    gradient                     [-----------------]

In a table without gathers weights are never dropped: ZeRO-1, or ZeRO-2 with RS. All data-parallel
replicas run one table, and a rank runs its collectives one after another on one stream. So the
collectives of a group meet in one order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from megapipe.schedule.kinds import Kind, Made
from megapipe.schedule.passes import Pass, Schedule


class Run(NamedTuple):
    """A gather (AF or AB) with the passes that read the weights it gathers.

    `dropped` is the pass after which the full weights are freed.

    Attributes:
        gather: the AF (before forwards) or AB (before other passes).
        passes: the passes that read the weights, in order. Empty only in an invalid table.
    """

    gather: Pass
    passes: tuple[Pass, ...]

    @property
    def dropped(self) -> Pass:
        """Return the pass after whose step the full weights are freed: the last reader.

        The result is the gather itself if no pass reads the weights.
        """
        if not self.passes:
            return self.gather
        return self.passes[-1]


class Sum(NamedTuple):
    """A reduction (RS) with the passes whose weight gradients it sums.

    Attributes:
        reduce: the RS.
        begin: the first pass that adds to the full gradient; the reduction itself if no pass does.
            This may be a B, which adds to the gradients of weights without a W, such as norms.
        passes: the passes W or BW whose gradients are summed, in order.
    """

    reduce: Pass
    begin: Pass
    passes: tuple[Pass, ...]


def gather_for(first: Pass) -> Pass:
    """Return the gather of a stage's weights that must run before a pass.

    The gather is AF for a forward, else AB, with the stage and microbatch of that pass.

    Args:
        first: the first pass that reads the gathered weights.
    """
    kind = Kind.AF if first.kind.is_forward else Kind.AB
    return first._replace(kind=kind)


# Asked of the rows of `kinds`, so that a new kind that reads weights needs no change here.
def reads_weights(kind: Kind) -> bool:
    """Return whether a pass of this kind needs the weights of its stage."""
    return any(need.made is Made.WEIGHTS for need in kind.traits.needs)


def adds_gradients(kind: Kind) -> bool:
    """Return whether a pass of this kind adds to its stage's weight gradient, as W and BW do."""
    return Made.WEIGHT_GRADIENT in kind.traits.makes


GATHERS = frozenset(kind for kind in Kind if Made.WEIGHTS in kind.traits.makes)
REDUCES = frozenset(kind for kind in Kind if Made.SCATTERED in kind.traits.makes)
SHARDS = GATHERS | REDUCES
"""Passes that gather weights and reduce gradients for runs of a stage's passes."""
# Sets, because these are asked for every pass of a table.
_READS = frozenset(kind for kind in Kind if reads_weights(kind))
_ADDS = frozenset(kind for kind in Kind if adds_gradients(kind))


def runs(schedule: Schedule, rank: int) -> list[Run]:
    """Return each gather of a rank with the passes that read the gathered weights, in row order."""
    found: list[tuple[Pass, list[Pass]]] = []
    # The users in the latest run of each stage.
    now: dict[int, list[Pass]] = {}
    for item in (x for step in schedule.ranks[rank] for x in step):
        if item.kind in GATHERS:
            now[item.stage] = []
            found.append((item, now[item.stage]))
        elif item.kind in _READS and item.stage in now:
            now[item.stage].append(item)
    return [Run(gather, tuple(passes)) for gather, passes in found]


def sums(schedule: Schedule, rank: int) -> list[Sum]:
    """Return each reduction of a rank with the passes whose gradients it sums, in row order."""
    found: list[Sum] = []
    now: dict[int, list[Pass]] = {}
    begin: dict[int, Pass] = {}
    for item in (x for step in schedule.ranks[rank] for x in step):
        if item.kind in REDUCES:
            passes = tuple(now.pop(item.stage, ()))
            found.append(Sum(item, begin.pop(item.stage, item), passes))
        # B adds to gradients of norms and biases, which are not deferred to W.
        elif item.kind in _ADDS or item.kind.is_backward:
            begin.setdefault(item.stage, item)
        if item.kind in _ADDS:
            now.setdefault(item.stage, []).append(item)
    return found


def of_runs(schedule: Schedule) -> Mapping[tuple[Pass, Made], tuple[Pass, ...]]:
    """Return {(pass, result it needs with Where.RUN): the passes that produce the result}.

    Where.RUN is for needs that follow from gathers and reductions. A reader of weights needs its
    gather. A reduction needs the passes whose gradients it sums. A pass that begins a gradient
    needs the reduction before the latest one of the rank. The pass also needs the latest reduction
    if that is of the pass's own stage. So a rank never has two reductions in progress while
    gradients grow.
    """
    found: dict[tuple[Pass, Made], tuple[Pass, ...]] = {}
    if schedule.kinds.isdisjoint(SHARDS):
        return found
    for rank, row in enumerate(schedule.ranks):
        for run in runs(schedule, rank):
            for item in run.passes:
                found[item, Made.WEIGHTS] = (run.gather,)
        own = {one.begin: one for one in sums(schedule, rank)}
        for one in own.values():
            found[one.reduce, Made.WEIGHT_GRADIENT] = one.passes
        # Without the wait for earlier reductions full gradients would pile up on a slow link, and
        # `whole_at_most` could not bound them.
        begun: list[Pass] = []
        for item in (x for step in row for x in step):
            if item.kind in REDUCES:
                begun.append(item)
            elif item in own:
                # The latest reduction may still run, unless it has this stage's one buffer.
                last = [x for x in begun[-1:] if x.stage == item.stage]
                found[item, Made.SCATTERED] = (*begun[-2:-1], *last)
    return found


def named_by_forwards(schedule: Schedule) -> Mapping[Pass, Pass | None]:
    """Return {gather: the gather that replaces it in an evaluation}.

    The replacement is an AF with the microbatch of the first forward that reads the weights. It is
    None if no forward reads them, and the gather is then left out.
    """
    found: dict[Pass, Pass | None] = {}
    for rank in range(len(schedule.ranks)):
        for run in runs(schedule, rank):
            first = next((x for x in run.passes if x.kind.is_forward), None)
            found[run.gather] = first and first._replace(kind=Kind.AF)
    return found


class Life(NamedTuple):
    """An interval in which a rank holds a stage's full weights or full gradient.

    Steps are given by their index in the rank's row.

    Attributes:
        kind: AF for weights, RS for a gradient.
        first: the step at whose start the memory is allocated.
        last: the step at whose end the memory is freed.
        waits: the memory is freed no sooner than the start of this step; -1 for no such step.
    """

    kind: Kind
    stage: int
    first: int
    last: int
    waits: int = -1


def lives(schedule: Schedule, rank: int) -> Iterator[Life]:
    """Yield the intervals in which one rank holds full weights or a full gradient of a stage.

    A reduction frees memory when the rank begins its next reduction or the next gradient of that
    stage, because both wait for the reduction.
    """
    at = {item: i for i, step in enumerate(schedule.ranks[rank]) for item in step}
    # Weights are dropped by their last user, whether the next gather comes at once or later.
    for run in runs(schedule, rank):
        yield Life(Kind.AF, run.gather.stage, at[run.gather], at[run.dropped])
    own = sums(schedule, rank)
    for n, one in enumerate(own):
        stage = one.reduce.stage
        later = own[n + 1 :]
        # The rank finds that a reduction has ended only where it waits for it.
        waits = [at[x.reduce] for x in later[:1]]
        waits += [at[x.begin] for x in later if x.reduce.stage == stage]
        yield Life(Kind.RS, stage, at[one.begin], at[one.reduce], min(waits, default=-1))
