"""Search the best plans of a model on a number of devices, with the simulator.

A cell is a layout (tp, cp, pp, micro batch, ep, etp) with its recomputation. The search orders all
plans by a lower bound of their step, and skips a plan whose bound exceeds the steps already found.
What one plan's schedule adds to its work is expected of others with this schedule too. A step is
extrapolated from two shorter batches. Plans that do not fit come after the others, with activations
offloaded or recomputed: by then only few of them can be faster than a plan that fits.
The best plans are at last made as a run with their flags makes them, and some also with their
communication hidden.

The search keeps some of the best plans of each kind: with shards and without, with a pipeline and
without. Otherwise one kind that is a percent ahead would fill the whole list.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice, product
from math import inf
from operator import attrgetter

from megapipe.commands.plan.search.compared import leaves_schedules, plainer, simpler, without_waves
from megapipe.commands.plan.search.final import SEARCHES, any_order, as_run, leanest
from megapipe.commands.plan.search.first import first_that_fits, usual
from megapipe.commands.plan.search.hiding import (
    HIDING,
    hiding,
    overlapped,
    with_fewest_flags,
    without_more_pairs,
)
from megapipe.commands.plan.search.judged.found import OF_KIND, SearchResults, leaner
from megapipe.commands.plan.search.judged.judging import Judging, Tell
from megapipe.commands.plan.search.judged.screen import (
    OUT_OF_MEMORY,
    CandidatePlan,
    ExtrapolatedPlan,
    Screen,
)
from megapipe.commands.plan.search.judged.workers import Workers
from megapipe.commands.plan.search.listed.asked import ANYTHING, SearchRestrictions
from megapipe.commands.plan.search.listed.bounds import Counted, fill
from megapipe.commands.plan.search.listed.cells import (
    RECOMPUTE,
    cell_of,
    divisors,
    expert_grids,
    is_refused,
    schedules_of,
    under,
)
from megapipe.commands.plan.search.shared import sharing, worth_it
from megapipe.commands.plan.telling import TimeIsUp, ends_within, settle
from megapipe.commands.plan.verdict import Machine
from megapipe.config import Config
from megapipe.errors import ConfigError, ScheduleError
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.step import TimedPlan
from megapipe.schedule.catalogue import PLAIN

BEST = 10
"""Plans of the report."""
SEARCHED = 512
"""The largest microbatches times ranks of a table that zb-auto searches."""
MICRO = 16
"""The largest micro batch, in sequences."""
SLOWEST = 1.5
"""A plan that takes this many times the best one's step is not reported, whatever its kind."""
_LISTED = 0.35
_JUDGED = 0.75
"""Shares of the seconds of a search after which no more plans are listed, and none is judged."""
_FEW = 3
"""Plans of each kind that are made after a search was stopped."""
_FEW_SIMPLE = 4
"""Plain pipelines that are made after a search was stopped: one layout under each schedule."""


def search(
    config: Config,
    gpus: int,
    machine: Machine,
    device: Device,
    vocab: int,
    tell: Tell = lambda *_: None,
    *,
    asked: SearchRestrictions = ANYTHING,
    jobs: int = 1,
    seconds: float = inf,
) -> SearchResults:
    """Search all layouts, recomputation and schedules for the plans of the shortest steps.

    Ctrl-C or the time ends the search, and the best plans so far are returned.

    Args:
        config: the model, its data and its batch. Of the layout only the overlap of data-parallel
            communication counts.
        gpus: the number of devices.
        machine: the memory of a device and of a host.
        vocab: the size of the tokenizer.
        tell: called with (plans so far, all plans or 0 if not known yet, seconds of the best step
            or None). At the end a name for the plans is added.
        asked: the user's restrictions of the search.
        jobs: processes that judge plans.
        seconds: the most seconds of the search, approximately.
    """
    found = SearchResults()
    ends = time.monotonic() + seconds

    def left(share: float = 1.0) -> float:
        # Seconds until this share of the time is over.
        return ends - (1 - share) * seconds - time.monotonic() if seconds < inf else inf

    def told(done: int, among: int, best: float | None, *what: str) -> None:
        if not what:
            found.far = done, among
        tell(done, among, best, *what)

    counted = Counted()
    own = config.parallel
    if HIDING not in asked.without:
        config = overlapped(config)
    cells: list[Config] = []
    candidates: list[CandidatePlan] = []
    try:
        if narrow := usual(asked):
            few = _candidates(config, gpus, vocab, device, SearchResults(), cells, counted, narrow)
            first = first_that_fits(few, Screen(cells, device, machine, counted))
            if first is not None:
                found.keep(first)
                # How many plans there are is not known yet.
                told(1, 0, first.step)
        cells = []
        # If nothing fits, the report names the plan that needs least, and all have to be judged.
        room = machine.limit if found.sketches else inf
        listed = _candidates(config, gpus, vocab, device, found, cells, counted, asked, room)
        for candidate in listed:
            candidates.append(candidate)
            if left(_LISTED) < 0:
                found.unlisted = cells[-1].parallel.context_parallel_size
                break
    except KeyboardInterrupt:
        found.stop("")
        settle()
    found.by_schedule = bool(asked.among) and leaves_schedules(cells)
    screen = Screen(cells, device, machine, counted, own)
    if not found.stopped:
        with Workers(screen, jobs) as workers:
            judging = Judging(found, workers, cells, told)
            _judge(judging, screen, candidates, asked, left(_JUDGED))
            if not found.stopped:
                _finish(found, workers, screen, asked, told, left(1.0))
    # A stopped process may be in the middle of an answer that nobody waits for.
    if found.stopped:
        with Workers(screen, jobs) as workers:
            _finish(found, workers, screen, asked, told, left(1.0))
    return found


def _judge(
    judging: Judging,
    screen: Screen,
    candidates: list[CandidatePlan],
    asked: SearchRestrictions,
    seconds: float,
) -> None:
    """Try all candidates. Plans that need too much memory are tried once more.

    Plans that may become fast enough are also tried with layers divided by their work. At last,
    single activations are offloaded or recomputed, unless the flags have --without moves. Ctrl-C or
    the time ends the search, and `SearchResults.stopped` is set.

    Args:
        judging: tries the candidates, and holds the results so far in `found`.
        screen: says whether ranks have unequal work.
        asked: the user's restrictions of the search.
        seconds: the most seconds that this may take.
    """
    found = judging.found
    try:
        with ends_within(seconds):
            judging.judge(candidates)
            done = len(candidates)
            uneven = judging.balanced(candidates, screen.is_uneven)
            judging.judge(uneven, before=done)
            done += len(uneven)
            if "moves" not in asked.without:
                moved = found.tight
                found.tight = []
                judging.judge(moved, before=done)
            found.lost[OUT_OF_MEMORY] += len(found.tight)
    except TimeIsUp as ended:
        found.stop(str(ended))
    except KeyboardInterrupt:
        found.stop("")
        settle()


def _finish(
    found: SearchResults,
    workers: Workers,
    screen: Screen,
    asked: SearchRestrictions,
    tell: Tell,
    seconds: float,
) -> None:
    """Compute the best plans again as a run would. Until now their steps are extrapolated.

    Of a stopped search fewer plans are computed. Ctrl-C or the time ends this too; at least one
    plan is computed then.

    Args:
        found: has the extrapolated plans in `sketches`, and gets the new plans in `best`.
        workers: the processes that compute plans.
        screen: has the device and its memory.
        asked: the user's restrictions of the search.
        tell: called with (plans so far, all these plans, seconds of the best step, their name).
        seconds: the most seconds that this may take.
    """
    _, nearest = found.least
    if not found.sketches and nearest is not None:
        with suppress(ConfigError, ScheduleError):
            if (config := screen.config_of(nearest)) is not None:
                names = asked.schedules(schedules_of(screen.cells[nearest.cell]))
                found.nearest = leanest(config, names, screen.device, screen.machine.limit)
    ranked = sorted(found.sketches.values(), key=attrgetter("step"))
    ranked = [x for x in ranked if x.step <= SLOWEST * ranked[0].step]
    own = screen.own.vocab_parallel_pipeline
    plans, small = _to_make(ranked, asked, found.by_schedule, few=bool(found.stopped), own=own)
    among = len(plans) + len(small)
    what = "tables of the best plans"
    if found.stopped:
        what += " (ctrl-C ends this too)"

    def told(done: int) -> None:
        tell(done, among, found.fastest, what)

    told(0)
    # In the order of the plans, whichever is ready first: of equal steps the first one counts.
    made: dict[int, TimedPlan | None] = {}
    try:
        with ends_within(seconds):
            workers.ask(_made, plans, 1, told, made.__setitem__)
            for n, x in enumerate(small, len(plans)):
                with suppress(ConfigError, ScheduleError):
                    one = any_order(x.config, screen.device, screen.machine.limit)
                    made[n] = with_fewest_flags(one, screen.own, screen.device)
                told(n + 1)
    except KeyboardInterrupt as ended:
        found.stop(str(ended))
    if plans and not made:
        made[0] = _made(screen, plans[0])
    finished = [made[n] for n in sorted(made)]
    for one_made in worth_it(finished, screen.machine.limit, own=own):
        found.take(one_made, screen.machine)


def _to_make(
    ranked: list[ExtrapolatedPlan],
    asked: SearchRestrictions,
    by_schedule: bool,
    *,
    few: bool,
    own: bool,
) -> tuple[list[ExtrapolatedPlan], list[ExtrapolatedPlan]]:
    """Return the plans to compute as a run would, the best ones first.

    Args:
        ranked: plans with extrapolated steps, fastest first.
        asked: the user's restrictions of the search.
        by_schedule: whether schedules are compared, so that all plans are of interest.
        few: leave out what takes long.
        own: the user's flags have --vocab-parallel-pipeline.
    Returns: (plans, plans whose order of passes is to be searched in addition).
    """
    chosen: dict[int, ExtrapolatedPlan] = {id(x): x for x in ranked[: _FEW if few else BEST]}
    # Of each kind some, as a run may make a plan slower than its sketch, or may not make it.
    for kind in {x.kind for x in ranked}:
        of_kind = [x for x in ranked if x.kind == kind]
        chosen |= {id(x): x for x in of_kind[: 1 if few else OF_KIND]}
        # Without moved activations too: a plan that fits as it is may be preferred.
        chosen |= {id(x): x for x in [x for x in of_kind if not x.moves][:1]}
    if few:
        plain = islice(simpler(ranked, asked), _FEW_SIMPLE)
        # There is no time to divide the layers once more by simulated steps.
        return [replace(x, balanced=False) for x in (*chosen.values(), *plain)], []
    more = [*leaner(ranked)]
    if asked.allows_schedule(PLAIN):
        more += [*plainer(ranked), *without_waves(chosen.values())]
    if by_schedule:
        more += ranked
    else:
        more += simpler(ranked, asked)
    chosen |= {id(x): x for x in more}
    more = [*chosen.values(), *hiding(ranked, asked), *sharing(ranked, asked, own=own)]
    # Several reasons may name one plan.
    plans = [*{(x.config, x.moves, x.balanced): x for x in more}.values()]
    # Searching a table takes seconds, so only the best layouts with small tables are tried.
    small: list[ExtrapolatedPlan] = []
    if asked.allows_schedule(SEARCHES):
        small = [x for x in ranked[:BEST] if x.layout[2] > 1 and _is_small(x) and not x.kind[0]]
    # Plans of one layout would be searched to the same table.
    if by_schedule:
        small = [*{x.layout: x for x in small}.values()]
    return plans, small[:2]


def _made(screen: Screen, x: ExtrapolatedPlan) -> TimedPlan | None:
    """Return the plan that a run with a sketch's flags makes; None if a run cannot make it.

    If the sketch's layers are divided by their work, they are also divided so that a simulated step
    is shortest, and the faster plan counts. If neither can be made, layers are divided evenly.
    """
    configs = [x.config]
    if x.balanced:
        with suppress(ConfigError, ScheduleError):
            configs.append(screen.split_by_clock(x))
    limit = screen.machine.limit
    made: list[TimedPlan] = []
    for config in dict.fromkeys(configs):
        with suppress(ConfigError, ScheduleError):
            made.append(as_run(config, screen.device, limit, moves=x.moves))
    if x.balanced and not any(one.peak <= limit for one in made):
        par = x.config.parallel
        name = par.pipeline_schedule or PLAIN
        even = under(x.config, name, par.num_virtual_stages_per_pipeline_rank)
        with suppress(ConfigError, ScheduleError):
            made = [as_run(even, screen.device, limit, moves=x.moves)]
    if not made:
        return None
    best = min(made, key=lambda one: (one.peak > limit, one.step))
    best = without_more_pairs(best, screen.device, limit)
    return with_fewest_flags(best, screen.own, screen.device)


def _is_small(x: ExtrapolatedPlan) -> bool:
    """Return whether zb-auto can search the table of a plan in seconds."""
    return x.layout[2] <= SEARCHED / x.config.num_microbatches


def _candidates(
    config: Config,
    gpus: int,
    vocab: int,
    device: Device,
    found: SearchResults,
    cells: list[Config],
    counted: Counted,
    asked: SearchRestrictions,
    room: float = inf,
) -> Iterator[CandidatePlan]:
    """Yield each plan to try, and append its parallel sizes with recomputation to `cells`.

    Args:
        gpus: the number of devices.
        vocab: the size of the tokenizer.
        found: gets the number of layouts that a run refuses.
        counted: the work of the layers of each cell.
        asked: the user's restrictions of the search.
        room: bytes of a device. Plans whose state alone needs more are left out.
    """
    batch = config.global_batch_size
    # Context parallelism last: a search without time for all layouts then has the likely ones.
    for cp, pp, tp in product(divisors(gpus), repeat=3):
        dp = gpus // (tp * cp * pp)
        # Tensor parallelism across nodes never pays.
        if tp > device.node or gpus % (tp * cp * pp) or pp > config.model.layers or batch % dp:
            continue
        if not asked.allows(tp=tp, cp=cp, pp=pp):
            continue
        for micro in (n for n in divisors(batch // dp) if n <= MICRO):
            if not asked.allows(micro=micro):
                continue
            if is_refused(cell_of(config, gpus, (tp, cp, pp, micro, 1, tp), None, vocab), vocab):
                found.lost["refused by the checks of a run"] += 1
                continue
            # Weights can be sharded where they have several replicas.
            choices = (False, True) if gpus > tp * pp else (False,)
            grids = expert_grids(config, tp, gpus // pp, asked.numbers("etp"))
            for recompute, (ep, etp), shards in product(RECOMPUTE, grids, choices):
                chosen = {"ep": ep, "etp": etp, "recompute": recompute, "sharding": shards}
                if not asked.allows(**chosen):
                    continue
                layout = (tp, cp, pp, micro, ep, etp)
                cell = cell_of(config, gpus, layout, recompute, vocab, shards=shards)
                names = asked.schedules(schedules_of(cell))
                if not names:
                    continue
                least = counted.least(cell, device)
                # Of thousands of layouts of a large model few have room for its state alone.
                if least.state > room:
                    found.lost[OUT_OF_MEMORY] += len(names)
                    continue
                cells.append(cell)
                for name, chunks in names:
                    work = least.work(name)
                    filled = work + fill(least, pp, name, chunks)
                    yield CandidatePlan(filled, work, len(cells) - 1, name, chunks)
