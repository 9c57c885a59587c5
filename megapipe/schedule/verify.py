"""Check a table before its first step and report every mistake in it.

The checks go from cheap to costly. First the table itself: every pass once, on its rank, after what
it needs on the same rank. Then the clock finds deadlocks, and memory is compared with the limit.
Last the lowered programs are played with sends that wait for their receives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product, takewhile

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.dependencies import Dependencies, can_repeat, wrong_documents
from megapipe.schedule.families import FAMILIES
from megapipe.schedule.kinds import LAYERS, Kind, Lane, Made
from megapipe.schedule.lower import Exchange, Message, Program, lower_timed
from megapipe.schedule.memory.held import memory_steps
from megapipe.schedule.passes import Pass, Schedule
from megapipe.schedule.simulate import SimulatedTimes, run_clock, uncollected


@uncollected()
def verify(schedule: Schedule, *, memory: float | None = None, costs: Costs = UNIT) -> None:
    """Check that a schedule trains every microbatch exactly once and can run without deadlock.

    Args:
        memory: most activation a rank may hold, in the unit of `costs`; None for no limit. With the
            default costs the unit is the activation of one microbatch in 1/p of the layers, on p
            ranks. 1F1B then peaks at p.
    Raises: ScheduleError naming every problem with its rank, step and pass.
    """
    problems = list(_table_problems(schedule))
    # A wrong table is not lowered: all further problems would follow from these.
    if not problems:
        clock = run_clock(schedule, costs)
        if memory is not None:
            problems += _memory_problems(schedule, memory, costs, clock)
        verify_programs(schedule, lower_timed(schedule, clock))
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise ScheduleError(f"{schedule.name} is not valid:{lines}")


def verify_programs(schedule: Schedule, programs: Sequence[Program]) -> None:
    """Run the program of each rank. An exchange waits until both ranks post all its messages.

    Raises: ScheduleError if ranks deadlock, or if a pass runs before its input has arrived. Also if
        two ranks disagree about the order of the messages between them.
    """
    problems = [*_order_problems(programs), *_replay(schedule, programs)]
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise ScheduleError(f"{schedule.name}, as lowered:{lines}")


def _table_problems(schedule: Schedule) -> Iterator[str]:
    place = schedule.placement
    m = schedule.num_microbatches
    if len(schedule.ranks) != place.num_ranks:
        yield f"the table has {len(schedule.ranks)} ranks, its placement {place.num_ranks}"
        return
    passes = sum(len(step) for step in schedule.steps())
    # A file may name any number of microbatches. The loops below would not end for a huge one. A
    # table has several passes of each microbatch, so the test refuses no good table.
    if not 1 <= m * len(schedule.slices) <= passes:
        slices = f" of {len(schedule.cuts)} slices" if schedule.cuts else ""
        yield f"there are {m} microbatches{slices}, but only {passes} passes"
        return
    wrong = wrong_documents(schedule)
    if wrong:
        yield wrong
        return
    seen: dict[Pass, int] = {}
    for rank, row in enumerate(schedule.ranks):
        for i, step in enumerate(row):
            is_pair = len(step) == 2 and all(x.kind in LAYERS for x in step)
            if len(step) != 1 and not is_pair:
                yield (
                    f"rank {rank}, step {i}, {_text(step)}: "
                    "a step is one pass, or two of F, B, W and BW"
                )
            for item in step:
                misplaced = _misplaced(schedule, rank, item)
                if misplaced:
                    yield f"rank {rank}, step {i}, {item}: {misplaced}"
                elif item in seen:
                    yield f"rank {rank}, step {i}, {item}: runs twice, first at step {seen[item]}"
                else:
                    seen[item] = i
    # Each pass is on its rank and known by its step from here on.
    yield from _missing_or_early(schedule, seen)
    yield from _read_apart(schedule, seen)
    yield from _missing_of_stages(schedule, seen)
    yield from _different_orders(schedule, seen)
    # Families check their own kinds of pass.
    for family in FAMILIES:
        yield from family.problems(schedule, seen)
    yield from _never_again(schedule)


def _misplaced(schedule: Schedule, rank: int, item: Pass) -> str | None:
    """Return a sentence that says why the pass `item` cannot be on a rank; None if it can."""
    place = schedule.placement
    kind, stage, _, piece = item
    if not 0 <= stage < place.num_stages:
        return f"there is no stage {stage}, only 0 to {place.num_stages - 1}"
    slices = (None,) if kind.traits.per_stage else schedule.slices
    if piece not in slices:
        if not schedule.cuts:
            return "microbatches have no slices here"
        example = item._replace(slice=0)
        return f"microbatches have slices 0 to {len(schedule.cuts) - 1}, such as {example}"
    wrong = _no_such_number(schedule, item)
    if wrong is None and place.rank_of[stage] != rank:
        wrong = f"stage {stage} is on rank {place.rank_of[stage]}"
    return wrong


def _no_such_number(schedule: Schedule, item: Pass) -> str | None:
    """Return why the stage of the pass `item` cannot run such a pass; None if it can."""
    place = schedule.placement
    kind, stage, microbatch, _ = item
    if kind.traits.per_stage:
        # A is also of the step after the last: it gathers at the end of this table, or at the start
        # of the next one.
        steps = schedule.training_steps + kind.traits.further
        if not 0 <= microbatch < steps:
            return f"there is no step {microbatch}, only 0 to {steps - 1}"
        return None
    m = schedule.all_microbatches
    if not 0 <= microbatch < m:
        return f"there is no microbatch {microbatch}, only 0 to {m - 1}"
    if kind.traits.at is not None:
        if not place.vocabulary:
            return "the vocabulary is not shared in this placement"
        at = place.meant(stage, kind.traits.at)
        if stage not in at:
            return f"the vocabulary is shared by others: {[*at]}"
    chain = schedule.chain_of(microbatch)
    if chain != stage // place.chain:
        return f"microbatch {microbatch} runs through chain {chain}, this stage is in another"
    return None


def _missing_or_early(schedule: Schedule, seen: dict[Pass, int]) -> Iterator[str]:
    """Yield a sentence for each F, B, W or BW that is missing, doubled, or before its input.

    Args:
        seen: {pass: index of its step in its row}.
    """
    place = schedule.placement
    for microbatch, piece in product(range(schedule.all_microbatches), schedule.slices):
        first = schedule.chain_of(microbatch) * place.chain
        for stage in range(first, first + place.chain):
            rank = place.rank_of[stage]
            f, b, w, bw = (Pass(kind, stage, microbatch, piece) for kind in LAYERS)
            # A stage may split the backward of some microbatches and fuse it for others, as
            # DualPipe does.
            needed = [f, b, w]
            if bw in seen:
                needed = [f, bw]
                for item in (b, w):
                    if item in seen:
                        yield (
                            f"rank {rank}, step {seen[item]}, {item}: "
                            f"{bw} at step {seen[bw]} does it too"
                        )
            elif b not in seen and w not in seen:
                yield f"rank {rank}: {bw} is missing (or {b} and {w})"
                needed = [f]
            for item in needed:
                if item not in seen:
                    owes = ""
                    if item == w and b in seen:
                        owes = f"; {b} owes it, or {bw} does both"
                    yield f"rank {rank}: {item} is missing{owes}"
            there = [item for item in needed if item in seen]
            for before, after in pairwise(there):
                if seen[after] <= seen[before]:
                    yield (
                        f"rank {rank}, step {seen[after]}, {after}: "
                        f"runs before {before} at step {seen[before]}"
                    )


def _read_apart(schedule: Schedule, seen: dict[Pass, int]) -> Iterator[str]:
    """Yield a sentence for each stage that reads microbatches in another order than other stages.

    The first stage reads inputs, the last one labels, from iterators on different ranks. So all
    must read in one order. `seen` is {pass: index of its step in the rank's row}.
    """
    place = schedule.placement
    orders: dict[tuple[Kind, int], list[Pass]] = {}
    for item in seen:
        orders.setdefault(item[:2], []).append(item)
    for first in range(0, place.num_stages, place.chain):
        ends = [stage for stage in range(first, first + place.chain) if place.reads(stage)]
        readers: list[tuple[Kind, int]] = []
        for kind in Kind:
            if kind.traits.reads:
                at = place.meant(first, kind.traits.at) if kind.traits.at else ends
                readers += [(kind, stage) for stage in at]
        order = [schedule.number(x) for x in orders.get(readers[0], [])]
        for reader in readers:
            passes = orders.get(reader, [])
            other = [schedule.number(x) for x in passes]
            # If one lacks a pass, that has been reported already.
            if other == order or sorted(other) != sorted(order):
                continue
            i = next(i for i, (a, b) in enumerate(zip(order, other, strict=True)) if a != b)
            instead = orders[readers[0]][i].of
            yield (
                f"rank {place.rank_of[reader[1]]}, step {seen[passes[i]]}, {passes[i]}: "
                f"stage {first} reads microbatch {instead} at this place, "
                "and both ends of a chain read their microbatches in one order"
            )


def _of_stages(seen: dict[Pass, int]) -> list[tuple[Kind, int]]:
    """Return the sorted (kind, training step) of all passes that run once per step and stage.

    Examples are G (reduce gradients) and U (update). `seen` maps each pass to its place in the
    row of its rank.
    """
    return sorted({(item.kind, item.microbatch) for item in seen if item.kind.traits.per_stage})


def _missing_of_stages(schedule: Schedule, seen: dict[Pass, int]) -> Iterator[str]:
    """Yield a sentence for each stage that lacks a pass which other stages run once per step.

    The keys of `seen` are all passes of the table.
    """
    # A table may have none of a kind. The run then does that after the table, such as the update.
    place = schedule.placement
    for kind, number in _of_stages(seen):
        for stage in range(place.num_stages):
            item = Pass(kind, stage, number)
            if item not in seen:
                yield f"rank {place.rank_of[stage]}: {item} is missing"


def _different_orders(schedule: Schedule, seen: dict[Pass, int]) -> Iterator[str]:
    """Yield a sentence for two ranks that run common collectives in different orders.

    Collectives match only by their order. Two ranks with replicas of several stages run several
    collectives together. `seen` is {pass: index of its step in its row}.
    """
    place = schedule.placement
    for kind, number in _of_stages(seen):
        of_kind = [Pass(kind, stage, number) for stage in range(place.num_stages)]
        # Missing ones have been reported. U and V are no collectives.
        if kind.traits.lane is not Lane.DP or not seen.keys() >= {*of_kind}:
            continue
        at = [seen[item] for item in of_kind]
        # DualPipe's ranks r and p-1-r hold the same two parts of the model. If one reduces the one
        # part first and the other the other, each waits for the other.
        for rank in range(place.num_ranks):
            shared = []
            for stage in sorted(place.stages_on(rank), key=at.__getitem__):
                twins = [twin for twin in place.replicas(stage) if twin != stage]
                shared += [(place.rank_of[twin], place.position(stage)) for twin in twins]
            for other in {other for other, _ in shared if other > rank}:
                here = [position for at_rank, position in shared if at_rank == other]
                stages = sorted(place.stages_on(other), key=at.__getitem__)
                there = [p for p in map(place.position, stages) if p in here]
                if there != here:
                    yield (
                        f"ranks {rank} and {other} run {kind} of the replicas they share "
                        "in different orders"
                    )


def _never_again(schedule: Schedule) -> Iterator[str]:
    """Yield a sentence for each pass before V (validation of an update) that must not stand there.

    V may take back the weights with which the passes before V ran. Then all these passes run again.
    So they must be of kinds that can run twice, and need no pass after V.
    """
    borders = {kind for kind in schedule.kinds if kind.traits.border}
    if not borders:
        return
    needs = Dependencies(schedule)
    before = []
    for row in schedule.ranks:
        before.append([*takewhile(lambda step: step[0].kind not in borders, row)])
    inside = {item for row in before for step in row for item in step}
    for rank, steps in enumerate(before):
        numbered = ((i, item) for i, step in enumerate(steps) for item in step)
        for i, item in numbered:
            where = f"rank {rank}, step {i}, {item}: stands before V"
            if not can_repeat(item.kind):
                yield f"{where}, where only passes that can run again may stand"
                continue
            for need in needs.of(item):
                if need not in inside:
                    yield f"{where} and needs {need}, which stands after it"


def _memory_problems(
    schedule: Schedule, memory: float, costs: Costs, clock: SimulatedTimes
) -> Iterator[str]:
    """Yield a sentence for each rank above the memory limit, with the first step that exceeds it.

    `clock` has the times of every step.
    """
    for rank, curve in enumerate(memory_steps(schedule, costs, clock)):
        # Sums of shares are rounded, so allow for a relative error of 1e-9.
        over = [i for _, held, i in curve if held > memory * (1 + 1e-9)]
        if over:
            i = over[0]
            peak = max(held for _, held, _ in curve)
            yield (
                f"rank {rank}, step {i}, {_text(schedule.ranks[rank][i])}: "
                f"over the memory limit of {memory:g}; the rank holds up to {peak:g}"
            )


def _order_problems(programs: Sequence[Program]) -> Iterator[str]:
    """Yield a sentence for each sender and receiver with different orders of their messages."""
    sends: dict[tuple[int, int], list[Message]] = {}
    receives: dict[tuple[int, int], list[Message]] = {}
    for rank, program in enumerate(programs):
        for item in program:
            if isinstance(item, Exchange):
                for message in item.messages:
                    side = sends if message.src == rank else receives
                    side.setdefault((message.src, message.dst), []).append(message)
    for src, dst in sorted(sends.keys() | receives.keys()):
        sent = sends.get((src, dst), [])
        received = receives.get((src, dst), [])
        if sent == received:
            continue
        # gloo and NCCL match messages of two ranks by their order alone.
        both = enumerate(zip(sent, received, strict=False))
        at = next((i for i, (a, b) in both if a != b), None)
        if at is None:
            yield (
                f"rank {src} sends {len(sent)} messages to rank {dst}, "
                f"which receives {len(received)}"
            )
        else:
            ours = sent[at].made_by
            theirs = received[at].made_by
            yield f"message {at} from rank {src} to rank {dst} is {ours}, received is {theirs}"


def _replay(schedule: Schedule, programs: Sequence[Program]) -> Iterator[str]:
    """Simulate programs; yield a sentence for a pass without its input or a deadlocked rank."""
    # Every send waits for its receive here. A real backend may buffer sends, which only lets ranks
    # run further: programs that end here end everywhere.
    at = [0] * len(programs)  # the item where each rank is
    waits = [0] * len(programs)  # messages for which it waits there
    posted: set[Message] = set()
    here: set[tuple[int, Made, int, int, int | None]] = set()  # rank; result and pass that made it
    ready = list(range(len(programs)))
    while ready:
        rank = ready.pop()
        program = programs[rank]
        while at[rank] < len(program) and not waits[rank]:
            item = program[at[rank]]
            if isinstance(item, Exchange):
                for message in item.messages:
                    # The first of the two ranks at a message waits. The second finds it posted and
                    # releases the first.
                    if message not in posted:
                        posted.add(message)
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
                    takes = schedule.links[x[:2]].takes
                    if not here.issuperset([(rank, *source, *x[2:]) for source in takes]):
                        yield f"rank {rank}, item {at[rank]}, {x}: its input has not arrived"
                here.update((rank, *_result(x)) for x in item)
            at[rank] += 1
    for rank, program in enumerate(programs):
        if at[rank] < len(program):
            yield f"rank {rank} waits at item {at[rank]}, {_text(program[at[rank]])}"


def _result(item: Pass) -> tuple[Made, int, int, int | None]:
    return item.kind.traits.makes[0], *item[1:]


def _text(item: tuple[Pass, ...] | Exchange) -> str:
    parts = item.messages if isinstance(item, Exchange) else item
    return " ".join(str(x) for x in parts)
