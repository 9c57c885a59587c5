"""The best plans of a model on so many devices: layouts, micro batches, recomputation, schedules, by the simulator.

A cell is a layout (tp, cp, pp, micro batch, ep, etp) with its recomputation. Its plans are tried in the order of what
work and filling the pipeline take, and not where that is more than known ones take in all. Steps are timed under two
shorter batches, which tell the time of a microbatch more, and the best once more as they are. Plans that do not fit are
looked at last, with what has to leave copied to the host or computed again: by then little is faster than what fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from operator import itemgetter

from megapipe.commands.plan.links import Device, replicas, sums, with_messages
from megapipe.commands.plan.search import cells
from megapipe.commands.plan.search.cells import (
    RECOMPUTE,
    Layout,
    cell_of,
    divisors,
    expert_grids,
    is_movable,
    is_refused,
    layout_of,
    schedules_of,
    short,
)
from megapipe.commands.plan.search.timed import SUMS, Room, Timed, in_seconds, timed, under, work_of
from megapipe.config import Config
from megapipe.errors import ConfigError, ScheduleError
from megapipe.plan import GIB, Plan, pieces_of, plan_of, recipe_of
from megapipe.plan.draft import Draft
from megapipe.plan.parts import own_parts
from megapipe.schedule import SCHEDULES, Costs
from megapipe.schedule.catalogue import PLAIN

BEST = 10
SEARCHED = 512
"""Microbatches times ranks of a table that is searched at most."""
MICRO = 16
"""Sequences of a micro batch at most."""
SLOWER = "slower than another of the same layout or ten others"


@dataclass
class Search:
    """A search: what was tried.

    Attributes:
        best: of each layout; first: as it was at first; plain: the best that moves no activations.
        tight: least steps of plans that hold too much, and the plans.
        lost: how many plans, by why.
    """

    best: dict[Layout, Timed] = field(default_factory=dict)
    first: list[Timed] = field(default_factory=list)
    plain: Timed | None = None
    tight: list[tuple[float, Config, Plan]] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)

    def limit(self, layout: Layout) -> float:
        """A step of this layout that is no longer of interest."""
        steps = sorted(x.step for x in self.best.values())
        known = self.best.get(layout)
        return min(steps[BEST - 1] if len(steps) >= BEST else inf, known.step if known else inf)

    def take(self, timed: Timed, memory: float) -> None:
        """Keep it if it fits and is its layout's best."""
        if timed.peak > memory:
            self.lost["out of memory"] += 1
            return
        other = self.best.get(timed.layout)
        if other is None or timed.step < other.step:
            self.best[timed.layout] = timed
        self.lost[SLOWER] += other is not None

    def take_whole(self, timed: Timed, memory: float) -> None:
        """Take one that is timed under its own batch."""
        self.take(timed, memory)
        if timed.peak <= memory and not timed.moves and (self.plain is None or timed.step < self.plain.step):
            self.plain = timed


def search(
    config: Config,
    gpus: int,
    memory: float,
    device: Device,
    vocab: int,
    progress: Callable[[float, str], None] = lambda share, doing: None,
) -> Search:
    """The best plans. memory: bytes of a device; vocab: ids of the tokenizer; progress: the share done, and of what."""
    found = Search()
    candidates = sorted(_candidates(config, gpus, vocab, memory, device, found), key=itemgetter(0))
    for n, (bound, one, plan) in enumerate(candidates):
        if n % (len(candidates) // 50 + 1) == 0:
            progress(n / len(candidates), f"{n} of {len(candidates)} plans")
        if bound > found.limit(layout_of(one)):
            found.lost["slower by their work alone"] += 1
            continue
        try:
            screen(found, plan, one, device, memory, bound)
        except (ConfigError, ScheduleError):
            found.lost["without such stages or microbatches"] += 1
    plain = dict(found.best)
    _tight(found, device, memory, progress)
    progress(1.0, "")
    found.first, found.best = sorted(found.best.values(), key=lambda x: x.step), {}
    some = found.first[: BEST + 2]
    held = sorted(plain.values(), key=lambda x: x.step)[:3] + [plain[x.layout] for x in some if x.layout in plain]
    for x in {id(x): x for x in (*some, *held)}.values():
        with suppress(ConfigError, ScheduleError):
            found.take_whole(_as_run(x, device, memory), memory)
    any_order = (x for x in found.first[:BEST] if 1 < x.layout[2] <= SEARCHED / x.config.num_microbatches)
    for x in [x for x in any_order if "sharding" not in x.plan.own][:2]:
        _any_order(found, x, device, memory)
    found.best = {layout: _with_limit(x, device, memory) for layout, x in found.best.items()}
    found.plain = found.plain and _with_limit(found.plain, device, memory)
    return found


def _with_limit(x: Timed, device: Device, memory: float) -> Timed:
    """Return a plan whose flags say how much memory there is and what gathers take.

    Sharded weights live as long as a run's memory allows, so the run must know both.
    """
    if "sharding" not in x.plan.own:
        return x
    link = device.flops / device.speed(replicas(x.plan, x.config))
    limit = x.config.parallel.memory_limit_gib or memory / GIB
    parallel = replace(x.config.parallel, memory_limit_gib=limit, data_parallel_flops_per_byte=round(link))
    return replace(x, config=replace(x.config, parallel=parallel))


def _tight(found: Search, device: Device, memory: float, progress: Callable[[float, str], None]) -> None:
    """Take the plans that hold too much, with their activations moved where that may be faster than what fits."""
    found.tight.sort(key=itemgetter(0))
    for n, (least, config, plan) in enumerate(found.tight):
        if n % (len(found.tight) // 50 + 1) == 0:
            progress(1.0, f"{n} of {len(found.tight)} plans that hold too much")
        if least > found.limit(layout_of(config)):
            found.lost[SLOWER] += 1
            continue
        try:
            screen(found, plan, config, device, memory, least, moves=True)
        except (ConfigError, ScheduleError):
            found.lost["out of memory"] += 1


def _as_run(x: Timed, device: Device, memory: float) -> Timed:
    """A plan under its own batch, with what a run with its flags moves for the limit."""
    if not x.moves:
        return under(x.plan, x.config, x.config, device)
    limit = memory
    while True:  # by the clock of a run, which knows no messages, it may hold less
        config = _limited(x.config, limit)
        if "sharding" in x.plan.own:
            made = under(x.plan, config, config, device, Room(limit, as_run=True))
        else:
            made = timed(plan_of(config, pieces_of(config, config.model)), config, device)
        if made.peak <= memory:
            return made
        limit -= max(1.1 * (made.peak - memory), 1e-3 * memory)


def _any_order(found: Search, x: Timed, device: Device, memory: float) -> None:
    """Take a layout's plans under a table that is searched, as a run with these flags searches it."""
    name = next(name for name, entry in SCHEDULES.items() if entry.searched)
    config = _limited(cells.under(x.config, name, None), memory)
    with suppress(ConfigError, ScheduleError):
        plan = plan_of(config, pieces_of(config, config.model), moves=False)
        found.take_whole(timed(plan, config, device), memory)
        found.take_whole(timed(_moved_within(plan, config), config, device), memory)


def _moved_within(plan: Plan, config: Config) -> Plan:
    """Return the plan with what has to leave for it to fit its limit, or what makes it faster in another order."""
    recipe = recipe_of(config)
    if recipe.offload is None or recipe.sharding is not None:
        return plan
    base = replace(plan, pieces=plan.pieces.without_depths)
    draft = Draft(config, base, plan.pieces.depths, plan.counts)
    moved = replace(recipe, pairs=True).finish(plan.schedule, draft).table
    return replace(plan, schedule=moved, own=own_parts(config, moved, moved))


def _limited(config: Config, memory: float) -> Config:
    return config.with_fields(memory_limit_gib=memory / GIB)


def _candidates(
    config: Config, gpus: int, vocab: int, memory: float, device: Device, found: Search
) -> Iterator[tuple[float, Config, Plan]]:
    """(least step, configuration, plan of its layout) of all that the model allows and the state of which fits."""
    batch = config.global_batch_size
    for pp, cp, tp in product(divisors(gpus), repeat=3):
        dp = gpus // (tp * cp * pp)
        if tp > device.node or gpus % (tp * cp * pp) or pp > config.model.layers or batch % dp:
            continue
        for micro in (n for n in divisors(batch // dp) if n <= MICRO):
            if is_refused(cell_of(config, gpus, (tp, cp, pp, micro, 1, tp), None, vocab), vocab):
                found.lost["refused by the checks of a run"] += 1
                continue
            shares = (False, True) if gpus > tp * pp else (False,)
            for recompute, (ep, etp), shards in product(RECOMPUTE, expert_grids(config, tp, gpus // pp), shares):
                cell = cell_of(config, gpus, (tp, cp, pp, micro, ep, etp), recompute, vocab, shards=shards)
                plan = plan_of(short(cell, 1), pieces_of(cell, cell.model))
                if sum(plan.state_bytes) > memory * pp:
                    found.lost["out of memory"] += len(schedules_of(cell))
                    continue
                costs = with_messages(in_seconds(plan, cell, device), plan, cell, device)
                work = work_of(costs) / pp + 2 * device.overhead  # of F and BW at least
                least = work * cell.num_microbatches + sums(plan, cell, device)
                yield from ((least + _fill(one, costs), one, plan) for one in schedules_of(cell))


def _fill(config: Config, costs: Costs) -> float:
    """Time in which the last rank waits for its first microbatch, and the others for its last gradient."""
    par = config.parallel
    pp, entry = par.pipeline_model_parallel_size, SCHEDULES[par.pipeline_schedule or PLAIN]
    before = (
        (pp - 1) // 2
        if entry.copies > 1
        else (pp - 1) / (par.num_virtual_stages_per_pipeline_rank or entry.chunks or 1)
    )
    forth, back, weights = (sum(x) for x in (costs.f, costs.b, costs.w) if isinstance(x, tuple))
    return before / pp * (forth if entry.split else forth + back + weights)


def screen(
    found: Search, plan: Plan, config: Config, device: Device, memory: float, bound: float, *, moves: bool = False
) -> None:
    """Take a layout's plan under the schedule of a configuration, its step from those of two shorter batches.

    Args:
        bound: the least step of the layout.
        moves: move activations that have no room; else such a plan is kept for later.
    Raises: ConfigError, ScheduleError if there is no such plan.
    """
    m, near, far = config.num_microbatches, short(config, 1), short(config, 2)
    left = m - near.num_microbatches
    rest = bound * left / m
    one = under(plan, config, near, device, Room(memory, found.limit(layout_of(config)) - rest) if moves else None)
    if one.peak > memory and not moves and is_movable(config):
        found.tight.append((one.step + rest, config, plan))
        return None
    if one.peak > memory or left == 0:
        return found.take(one, memory)
    if one.passes + rest > found.limit(one.layout):
        found.lost[SLOWER] += 1
        return None
    other = under(plan, config, far, device, Room(memory) if moves else None)
    turns = left / (far.num_microbatches - near.num_microbatches)
    parts = {name: x + turns * (other.parts[name] - x) for name, x in one.parts.items() if name != SUMS}
    parts[SUMS] = other.parts[SUMS]  # what shows of gathers is no more under a longer batch
    step = one.passes + turns * (other.passes - one.passes) + parts[SUMS]
    # A chunk's microbatches are all held where it has its weights for all of them, but for those that leave.
    peak = one.peak + turns * (other.peak - one.peak) if "sharding" in plan.own and not moves else one.peak
    return found.take(replace(one, step=step, peak=peak, parts=parts), memory)
