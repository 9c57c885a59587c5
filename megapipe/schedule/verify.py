"""Finds everything that is wrong with a table before its first step.

First what can be seen without running it (every pass once, on its rank, after what it needs on the same rank), then who
waits for whom, then memory, and last the programs themselves, played through with sends that wait for their receives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product, takewhile

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.dependencies import Dependencies, can_repeat, wrong_documents
from megapipe.schedule.families import FAMILIES
from megapipe.schedule.kinds import Kind, Lane, Made
from megapipe.schedule.lower import Exchange, Message, Program, lower_timed
from megapipe.schedule.memory.held import memory_steps
from megapipe.schedule.passes import Pass, Schedule
from megapipe.schedule.simulate import Clock, run_clock, uncollected

_PAIRED = {Kind.F, Kind.B, Kind.W, Kind.BW}


@uncollected()
def verify(schedule: Schedule, *, memory: float | None = None, costs: Costs = UNIT) -> None:
    """Check that a schedule trains every microbatch exactly once and can be run.

    Args:
        memory: most activation a rank may hold, in the unit of `costs` (by default what one microbatch leaves behind in
            one device share: 1F1B peaks at its number of ranks).
    Raises: ScheduleError naming every problem with its rank, step and pass.
    """
    # What a table says first, then whether it can go on by the clock, then message by message as it was lowered.
    problems = list(_table_problems(schedule))
    # A table that is wrong by itself is not lowered: what it would say then follows from what was said.
    if not problems:
        clock = run_clock(schedule, costs)
        if memory is not None:
            problems += _memory_problems(schedule, memory, costs, clock)
        verify_programs(schedule, lower_timed(schedule, clock))
    if problems:
        raise ScheduleError(f"{schedule.name} is not valid:" + "".join(f"\n  {problem}" for problem in problems))


def verify_programs(schedule: Schedule, programs: Sequence[Program]) -> None:
    """Play programs through with rendezvous semantics: a send waits for its receive, an exchange for all its messages.

    Raises: ScheduleError if ranks wait for each other for ever, if two ranks disagree about the order of the messages
        between them, or if a pass runs before its input has arrived.
    """
    problems = [*_order_problems(programs), *_replay(schedule, programs)]
    if problems:
        raise ScheduleError(f"{schedule.name}, as lowered:" + "".join(f"\n  {problem}" for problem in problems))


def _table_problems(schedule: Schedule) -> Iterator[str]:
    place, m = schedule.placement, schedule.num_microbatches
    if len(schedule.ranks) != place.num_ranks:
        yield f"the table has {len(schedule.ranks)} ranks, its placement {place.num_ranks}"
        return
    passes = sum(len(step) for step in schedule.steps())
    if not 1 <= m * len(schedule.slices) <= passes:
        # Here already: a file may say a number for which the loops below would run for ever.
        slices = f" of {len(schedule.cuts)} slices" if schedule.cuts else ""
        yield f"there are {m} microbatches{slices}, but only {passes} passes"
        return
    if wrong := wrong_documents(schedule):
        yield wrong
        return
    seen: dict[Pass, int] = {}
    for rank, row in enumerate(schedule.ranks):
        for i, step in enumerate(row):
            if len(step) != 1 and (len(step) != 2 or not _PAIRED.issuperset(x.kind for x in step)):
                yield f"rank {rank}, step {i}, {_text(step)}: a step is one pass, or two of F, B, W and BW"
            for item in step:
                misplaced = _misplaced(schedule, rank, item)
                if misplaced:
                    yield f"rank {rank}, step {i}, {item}: {misplaced}"
                elif item in seen:
                    yield f"rank {rank}, step {i}, {item}: runs twice, first at step {seen[item]}"
                else:
                    seen[item] = i
    yield from _missing_or_early(schedule, seen)
    yield from _read_apart(schedule, seen)
    yield from _missing_of_stages(schedule, seen)
    for family in FAMILIES:
        yield from family.problems(schedule, seen)
    yield from _never_again(schedule)


def _misplaced(schedule: Schedule, rank: int, item: Pass) -> str | None:
    """The reason why a pass cannot stand on this rank."""
    place, m = schedule.placement, schedule.all_microbatches
    kind, stage, microbatch, piece = item
    if not 0 <= stage < place.num_stages:
        return f"there is no stage {stage}, only 0 to {place.num_stages - 1}"
    if piece not in (schedule.slices if not kind.traits.per_stage else (None,)):
        there = f"slices 0 to {len(schedule.cuts) - 1}, such as {item._replace(slice=0)}"
        return f"microbatches have {there if schedule.cuts else 'no slices here'}"
    if kind.traits.per_stage:
        # The weights of the step behind the last are gathered at the end of this table or at the start of the next.
        steps = schedule.training_steps + kind.traits.further
        if not 0 <= microbatch < steps:
            return f"there is no step {microbatch}, only 0 to {steps - 1}"
        return None if place.rank_of[stage] == rank else f"stage {stage} is on rank {place.rank_of[stage]}"
    if not 0 <= microbatch < m:
        return f"there is no microbatch {microbatch}, only 0 to {m - 1}"
    if kind.traits.at is not None:
        at = place.meant(stage, kind.traits.at) if place.vocabulary else ()
        if stage not in at:
            return f"the vocabulary is {f'shared by others: {[*at]}' if at else 'not shared in this placement'}"
    chain = schedule.chain_of(microbatch)
    if chain != stage // place.chain:
        return f"microbatch {microbatch} runs through chain {chain}, this stage is in another"
    return None if place.rank_of[stage] == rank else f"stage {stage} is on rank {place.rank_of[stage]}"


def _missing_or_early(schedule: Schedule, seen: dict[Pass, int]) -> Iterator[str]:
    """Each stage needs F, then B, then W (or BW) of each of its microbatches; `seen` has their steps."""
    place = schedule.placement
    for microbatch, piece in product(range(schedule.all_microbatches), schedule.slices):
        first = schedule.chain_of(microbatch) * place.chain
        for stage in range(first, first + place.chain):
            rank = place.rank_of[stage]
            f, b, w, bw = (Pass(kind, stage, microbatch, piece) for kind in (Kind.F, Kind.B, Kind.W, Kind.BW))
            whole = bw in seen
            if whole:
                for item in (b, w):
                    if item in seen:
                        yield f"rank {rank}, step {seen[item]}, {item}: {bw} at step {seen[bw]} does it too"
            needed = [f, bw] if whole else [f, b, w]
            if not whole and b not in seen and w not in seen:
                yield f"rank {rank}: {bw} is missing (or {b} and {w})"
                needed = [f]
            owed = {w: f"; {b} owes it, or {bw} does both"} if b in seen else {}
            yield from (f"rank {rank}: {item} is missing{owed.get(item, '')}" for item in needed if item not in seen)
            there = [item for item in needed if item in seen]
            for before, after in pairwise(there):
                if seen[after] <= seen[before]:
                    yield f"rank {rank}, step {seen[after]}, {after}: runs before {before} at step {seen[before]}"


def _read_apart(schedule: Schedule, seen: dict[Pass, int]) -> Iterator[str]:
    """Readers of a chain's microbatches that are not in one order: inputs and labels come from iterators, each of
    which gives the next microbatch to whoever asks."""
    place, orders = schedule.placement, dict[tuple[Kind, int], list[Pass]]()
    for item in seen:
        orders.setdefault(item[:2], []).append(item)
    for first in range(0, place.num_stages, place.chain):
        ends = [stage for stage in range(first, first + place.chain) if place.reads(stage)]
        readers = [
            (k, s) for k in Kind if k.traits.reads for s in (place.meant(first, k.traits.at) if k.traits.at else ends)
        ]
        order = [schedule.number(x) for x in orders.get(readers[0], [])]
        for reader in readers:
            passes = orders.get(reader, [])
            other = [schedule.number(x) for x in passes]
            if other != order and sorted(other) == sorted(order):  # else one is missing, which is said
                at = next(i for i, numbers in enumerate(zip(order, other, strict=True)) if numbers[0] != numbers[1])
                instead = orders[readers[0]][at].of
                yield (
                    f"rank {place.rank_of[reader[1]]}, step {seen[passes[at]]}, {passes[at]}: stage {first} reads "
                    f"microbatch {instead} at this place, and both ends of a chain read their microbatches in one order"
                )


def _missing_of_stages(schedule: Schedule, seen: dict[Pass, int]) -> Iterator[str]:
    """Passes of a stage as a whole that other stages lack, or that replicas do not run in one order everywhere."""
    place = schedule.placement
    done = sorted({(item.kind, item.microbatch) for item in seen if item.kind.traits.per_stage})
    for kind, step in done:
        missing = [item for s in range(place.num_stages) if (item := Pass(kind, s, step)) not in seen]
        yield from (f"rank {place.rank_of[item.stage]}: {item} is missing" for item in missing)
        # Collectives of replicas meet by their order alone: two ranks that share several must have them in one order.
        together = kind.traits.lane is Lane.DP and not missing
        for rank in range(place.num_ranks) if together else ():
            order = sorted(place.stages_on(rank), key=lambda s: seen[Pass(kind, s, step)])
            shared = [(place.rank_of[twin], s) for s in order for twin in place.replicas(s) if twin != s]
            for other in {other for other, _ in shared if other > rank}:
                here = [place.position(s) for at, s in shared if at == other]
                there = sorted(
                    (s for s in place.stages_on(other) if place.position(s) in here),
                    key=lambda s: seen[Pass(kind, s, step)],
                )
                if [place.position(s) for s in there] != here:
                    yield f"ranks {rank} and {other} run {kind} of the replicas they share in different orders"


def _never_again(schedule: Schedule) -> Iterator[str]:
    """Passes before a border that cannot run again, as all must: they ran on weights that V may take back."""
    borders = {kind for kind in schedule.kinds if kind.traits.border}
    if not borders:
        return
    needs = Dependencies(schedule)
    before = [list(takewhile(lambda step: step[0].kind not in borders, row)) for row in schedule.ranks]
    inside = {item for row in before for step in row for item in step}
    for rank, row in enumerate(before):
        for i, item in ((i, item) for i, step in enumerate(row) for item in step):
            if not can_repeat(item.kind):
                yield f"rank {rank}, step {i}, {item}: stands before V, where only what can be run again may stand"
                continue
            for need in needs.of(item):
                if need not in inside:
                    yield f"rank {rank}, step {i}, {item}: stands before V and needs {need}, which stands behind it"


def _memory_problems(schedule: Schedule, memory: float, costs: Costs, clock: Clock) -> Iterator[str]:
    """The first pass of each rank that takes it over the limit."""
    for rank, curve in enumerate(memory_steps(schedule, costs, clock)):
        # A hair more is rounding: sums of shares need not come out even.
        over = [i for _, held, i in curve if held > memory * (1 + 1e-9)]
        if over:
            i, peak = over[0], max(held for _, held, _ in curve)
            item = _text(schedule.ranks[rank][i])
            yield f"rank {rank}, step {i}, {item}: over the memory limit of {memory:g}; the rank holds up to {peak:g}"


def _order_problems(programs: Sequence[Program]) -> Iterator[str]:
    """Both ends of every link must list its messages in the same order."""
    sends: dict[tuple[int, int], list[Message]] = {}
    receives: dict[tuple[int, int], list[Message]] = {}
    for rank, program in enumerate(programs):
        for item in program:
            if isinstance(item, Exchange):
                for message in item.messages:
                    side = sends if message.src == rank else receives
                    side.setdefault((message.src, message.dst), []).append(message)
    for src, dst in sorted(sends.keys() | receives.keys()):
        sent, received = sends.get((src, dst), []), receives.get((src, dst), [])
        if sent == received:
            continue
        at = next((i for i, (a, b) in enumerate(zip(sent, received, strict=False)) if a != b), None)
        if at is None:
            yield f"rank {src} sends {len(sent)} messages to rank {dst}, which receives {len(received)}"
        else:
            ours, theirs = sent[at].made_by, received[at].made_by
            yield f"message {at} from rank {src} to rank {dst} is {ours}, received is {theirs}"


def _replay(schedule: Schedule, programs: Sequence[Program]) -> Iterator[str]:
    at, waits = [0] * len(programs), [0] * len(programs)
    posted: set[Message] = set()
    here: set[tuple[int, Made, int, int, int | None]] = set()  # rank; what, of which pass
    ready = list(range(len(programs)))
    while ready:
        rank = ready.pop()
        program = programs[rank]
        while at[rank] < len(program) and not waits[rank]:
            item = program[at[rank]]
            if isinstance(item, Exchange):
                for message in item.messages:
                    if message not in posted:
                        posted.add(message)
                        # The first of two ranks to come to a message waits; the second finds it posted, and lets the
                        # first go on.
                        waits[rank] += 1
                        continue
                    here.add((message.dst, *_result(message.made_by)))
                    other = message.src if message.dst == rank else message.dst
                    waits[other] -= 1
                    if not waits[other]:
                        at[other] += 1
                        ready.append(other)
                if waits[rank]:
                    break
            else:
                for x in item:
                    if not here.issuperset([(rank, *source, *x[2:]) for source in schedule.links[x[:2]].takes]):
                        yield f"rank {rank}, item {at[rank]}, {x}: its input has not arrived"
                here.update((rank, *_result(x)) for x in item)
            at[rank] += 1
    for rank, program in enumerate(programs):
        if at[rank] < len(program):
            yield f"rank {rank} waits at item {at[rank]}, {_text(program[at[rank]])}"


def _result(item: Pass) -> tuple[Made, int, int, int | None]:
    return item.kind.traits.makes[0], *item[1:]


def _text(item: tuple[Pass, ...] | Exchange) -> str:
    return " ".join(str(x) for x in (item.messages if isinstance(item, Exchange) else item))
