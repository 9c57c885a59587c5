"""Search the best plans of a model on a number of devices, with the simulator.

A cell is a layout (tp, cp, pp, micro batch, ep, etp) with its recomputation. The search orders all
plans by a lower bound of their step, and skips a plan whose bound exceeds the steps already found.
A step is extrapolated from two shorter batches, and the best plans are simulated once more with
their own batch. Plans that do not fit come last, with activations offloaded or recomputed: by then
only few of them can be faster than a plan that fits.
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
"""The largest microbatches times ranks of a table that zb-auto searches."""
MICRO = 16
"""The largest micro batch, in sequences."""
SLOWER = "slower than another of the same layout or ten others"


@dataclass
class Search:
    """The state of a search.

    Attributes:
        best: the best plan of each layout.
        first: the best plans by their extrapolated steps.
        plain: the best plan that neither offloads nor recomputes single activations.
        tight: plans that need too much memory, each after a lower bound of its step.
        lost: the number of plans that are out, by reason.
    """

    best: dict[Layout, Timed] = field(default_factory=dict)
    first: list[Timed] = field(default_factory=list)
    plain: Timed | None = None
    tight: list[tuple[float, Config, Plan]] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)

    def limit(self, layout: Layout) -> float:
        """Return the seconds that a step of this layout must not exceed to be kept."""
        # The report has the ten best layouts, and of each layout the best plan.
        limit = inf
        if len(self.best) >= BEST:
            limit = sorted(x.step for x in self.best.values())[BEST - 1]
        if known := self.best.get(layout):
            limit = min(limit, known.step)
        return limit

    def take(self, timed: Timed, memory: float) -> None:
        """Keep the plan if it fits in `memory` bytes and is the best of its layout."""
        if timed.peak > memory:
            self.lost["out of memory"] += 1
            return
        other = self.best.get(timed.layout)
        if other is None or timed.step < other.step:
            self.best[timed.layout] = timed
        self.lost[SLOWER] += other is not None

    def take_whole(self, timed: Timed, memory: float) -> None:
        """Keep a plan that was simulated with its own batch, if it is the best so far."""
        self.take(timed, memory)
        plain = timed.peak <= memory and not timed.moves
        if plain and (self.plain is None or timed.step < self.plain.step):
            self.plain = timed


def search(
    config: Config,
    gpus: int,
    memory: float,
    device: Device,
    vocab: int,
    progress: Callable[[float, str], None] = lambda share, doing: None,
) -> Search:
    """Search for the best plans on a number of devices.

    Args:
        config: the model, its data and its batch; the layout is ignored.
        gpus: the number of devices.
        memory: bytes of a device.
        vocab: the size of the tokenizer.
        progress: called with the part that is done and a text.
    Returns: the best plan of each layout, and the number of plans that are out, by reason.
    """
    found = Search()
    # The lowest bounds come first: a fast plan that is found early saves the simulation of others.
    candidates = sorted(_candidates(config, gpus, vocab, memory, device, found), key=itemgetter(0))
    for n, (bound, one, plan) in enumerate(candidates):
        # About fifty reports in all.
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
    # From here on only plans count that were simulated with their own batch.
    found.first = sorted(found.best.values(), key=lambda x: x.step)
    found.best = {}
    some = found.first[: BEST + 2]
    # The best plans without offloading too, as an extrapolation may prefer the wrong one.
    held = sorted(plain.values(), key=lambda x: x.step)[:3]
    held += [plain[x.layout] for x in some if x.layout in plain]
    # The same plan may be in both lists.
    for x in {id(x): x for x in (*some, *held)}.values():
        with suppress(ConfigError, ScheduleError):
            found.take_whole(_as_run(x, device, memory), memory)
    # zb-auto takes seconds for a table, so it gets two of the best layouts whose tables are small.
    small = [x for x in found.first[:BEST] if x.layout[2] > 1 and _is_small(x)]
    for x in [x for x in small if "sharding" not in x.plan.own][:2]:
        _any_order(found, x, device, memory)
    found.best = {layout: _with_limit(x, device, memory) for layout, x in found.best.items()}
    found.plain = found.plain and _with_limit(found.plain, device, memory)
    return found


def _is_small(x: Timed) -> bool:
    """Return whether zb-auto can search the table of a layout in seconds."""
    return x.layout[2] <= SEARCHED / x.config.num_microbatches


def _with_limit(x: Timed, device: Device, memory: float) -> Timed:
    """Return a plan whose flags say how much memory there is and what gathers take.

    Sharded weights live as long as a run's memory allows, so the run must know both.
    """
    if "sharding" not in x.plan.own:
        return x
    link = device.flops / device.speed(replicas(x.plan, x.config))
    limit = x.config.parallel.memory_limit_gib or memory / GIB
    parallel = replace(
        x.config.parallel, memory_limit_gib=limit, data_parallel_flops_per_byte=round(link)
    )
    return replace(x, config=replace(x.config, parallel=parallel))


def _tight(
    found: Search, device: Device, memory: float, progress: Callable[[float, str], None]
) -> None:
    """Try the plans that were put aside because they need too much memory.

    Their activations are offloaded or recomputed. A plan whose lower bound exceeds the steps
    already found is skipped.
    """
    # The lowest bounds first, as above.
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
    """Return the plan simulated with its own batch, and with the offloading that a run chooses."""
    if not x.moves:
        return under(x.plan, x.config, x.config, device)
    limit = memory
    # A run chooses without the times of messages. With them the plan may hold more than the limit,
    # which is then lowered.
    while True:
        config = _limited(x.config, limit)
        if "sharding" in x.plan.own:
            made = under(x.plan, config, config, device, Room(limit, as_run=True))
        else:
            made = timed(plan_of(config, pieces_of(config, config.model)), config, device)
        if made.peak <= memory:
            return made
        # A step of a thousandth at least, so that the loop comes to an end.
        limit -= max(1.1 * (made.peak - memory), 1e-3 * memory)


def _any_order(found: Search, x: Timed, device: Device, memory: float) -> None:
    """Search a layout's table with zb-auto, as a run with these flags would, and keep the best.

    The plan is tried without and with offloaded activations.
    """
    name = next(name for name, entry in SCHEDULES.items() if entry.searched)
    config = _limited(cells.under(x.config, name, None), memory)
    with suppress(ConfigError, ScheduleError):
        plan = plan_of(config, pieces_of(config, config.model), moves=False)
        found.take_whole(timed(plan, config, device), memory)
        found.take_whole(timed(_moved_within(plan, config), config, device), memory)


def _moved_within(plan: Plan, config: Config) -> Plan:
    """Return the plan as a run makes it: offloading that fits its limit, or a faster order."""
    recipe = recipe_of(config)
    if recipe.offload is None or recipe.sharding is not None:
        return plan
    base = replace(plan, pieces=plan.pieces.without_depths)
    draft = Draft(config, base, plan.pieces.depths, plan.counts)
    moved = replace(recipe, pairs=True).finish(plan.schedule, draft).table
    return replace(plan, schedule=moved, own=own_parts(config, moved, moved))


def _limited(config: Config, memory: float) -> Config:
    """Return the configuration with `memory` bytes as the limit of a run."""
    return config.with_fields(memory_limit_gib=memory / GIB)


def _candidates(
    config: Config, gpus: int, vocab: int, memory: float, device: Device, found: Search
) -> Iterator[tuple[float, Config, Plan]]:
    """Yield (lower bound of the step, configuration, plan of the cell) for each plan to try.

    Cells whose weights and optimizer state alone do not fit are counted in `found`.
    """
    batch = config.global_batch_size
    for pp, cp, tp in product(divisors(gpus), repeat=3):
        dp = gpus // (tp * cp * pp)
        # Tensor parallelism sends too much for the slow links between nodes.
        if tp > device.node or gpus % (tp * cp * pp) or pp > config.model.layers or batch % dp:
            continue
        for micro in (n for n in divisors(batch // dp) if n <= MICRO):
            if is_refused(cell_of(config, gpus, (tp, cp, pp, micro, 1, tp), None, vocab), vocab):
                found.lost["refused by the checks of a run"] += 1
                continue
            # Weights can be sharded where they have several replicas.
            choices = (False, True) if gpus > tp * pp else (False,)
            grids = expert_grids(config, tp, gpus // pp)
            for recompute, (ep, etp), shards in product(RECOMPUTE, grids, choices):
                layout = (tp, cp, pp, micro, ep, etp)
                cell = cell_of(config, gpus, layout, recompute, vocab, shards=shards)
                plan = plan_of(short(cell, 1), pieces_of(cell, cell.model))
                # The state of all ranks together must fit, before any activation.
                if sum(plan.state_bytes) > memory * pp:
                    found.lost["out of memory"] += len(schedules_of(cell))
                    continue
                costs = with_messages(in_seconds(plan, cell, device), plan, cell, device)
                # Each microbatch has at least two passes, F and BW, on each rank.
                work = work_of(costs) / pp + 2 * device.overhead
                least = work * cell.num_microbatches + sums(plan, cell, device)
                for one in schedules_of(cell):
                    yield least + _fill(one, costs), one, plan


def _fill(config: Config, costs: Costs) -> float:
    """Return the seconds in which a rank waits while the pipeline fills and drains.

    The last rank waits for its first microbatch, the first ranks for their last gradient.
    """
    par = config.parallel
    pp = par.pipeline_model_parallel_size
    entry = SCHEDULES[par.pipeline_schedule or PLAIN]
    if entry.copies > 1:
        # Two copies of the model fill the pipeline from both ends.
        before: float = (pp - 1) // 2
    else:
        before = (pp - 1) / (par.num_virtual_stages_per_pipeline_rank or entry.chunks or 1)
    forward, backward, weights = (
        sum(x) for x in (costs.f, costs.b, costs.w) if isinstance(x, tuple)
    )
    waited = forward
    # A schedule that separates B and W fills the wait for gradients with W.
    if not entry.split:
        waited += backward + weights
    return before / pp * waited


def screen(
    found: Search,
    plan: Plan,
    config: Config,
    device: Device,
    memory: float,
    bound: float,
    *,
    moves: bool = False,
) -> None:
    """Simulate a layout's plan under the schedule of `config`, and keep it if it is the best.

    Its step is extrapolated from two shorter batches.

    Args:
        found: the search, which keeps the plan or counts why it is out.
        plan: the plan of the layout under 1F1B.
        memory: bytes of a device.
        bound: a lower bound of the step.
        moves: offload or recompute activations that do not fit. If False, keep the plan for later.
    Raises: ConfigError, ScheduleError if there is no such plan.
    """
    m = config.num_microbatches
    near = short(config, 1)
    far = short(config, 2)
    left = m - near.num_microbatches
    # A lower bound of the time of the microbatches that are left out.
    rest = bound * left / m
    room = None
    if moves:
        room = Room(memory, found.limit(layout_of(config)) - rest)
    one = under(plan, config, near, device, room)
    # A plan that holds too much is put aside, and tried again when fast plans are known.
    if one.peak > memory and not moves and is_movable(config):
        found.tight.append((one.step + rest, config, plan))
        return None
    if one.peak > memory or left == 0:
        return found.take(one, memory)
    if one.passes + rest > found.limit(one.layout):
        found.lost[SLOWER] += 1
        return None
    # Over the longer batch the plan must only fit; its time is not limited again.
    if moves:
        room = Room(memory)
    other = under(plan, config, far, device, room)
    # Between two batches a step grows by the same time for each 2p microbatches.
    turns = left / (far.num_microbatches - near.num_microbatches)
    parts = {name: x + turns * (other.parts[name] - x) for name, x in one.parts.items()}
    # Gradient sums and gathers that are visible do not grow with the batch.
    parts[SUMS] = other.parts[SUMS]
    step = one.passes + turns * (other.passes - one.passes) + parts[SUMS]
    peak = one.peak
    # A chunk that gathers its weights once for all microbatches holds the activations of all.
    if "sharding" in plan.own and not moves:
        peak += turns * (other.peak - one.peak)
    return found.take(replace(one, step=step, peak=peak, parts=parts), memory)
