"""Who is slow: named within ten steps, never where there is only noise."""

import random

import pytest

from megapipe.schedule import Costs, Kind, build
from megapipe.schedule.measured.costs import MeasuredPass, measured_costs, spent
from megapipe.schedule.measured.slow import History, Sample, extremes
from megapipe.schedule.simulate import simulate

EVERY, READ = 5, 2  # steps between two samples, and those that one looks at
SCHEDULE = build("1f1b", 4, 8)
RANKS = (0, 1, 2, 3)


class Silent(random.Random):
    """No noise."""

    def lognormvariate(self, *_) -> float:
        return 1.0

    def expovariate(self, *_) -> float:
        return 0.0

    def random(self) -> float:
        return 1.0


def step(noise: random.Random, slower=(), later=()) -> list[list[MeasuredPass]]:
    """1F1B on 4 ranks as noisy passes and messages play it: F 10 ms, BW 20 ms, a link 0.2 ms, hiccups of 20 ms."""
    place, ends, rows, free = SCHEDULE.placement, {}, [[] for _ in RANKS], [0.0] * 4
    left = [[x for (x,) in row] for row in SCHEDULE.ranks]
    while any(left):
        for rank, row in enumerate(left):
            while row:
                item = row[0]
                source = place.prev(item.stage) if item.kind is Kind.F else place.next(item.stage)
                needs = (item.kind, source, item.microbatch)
                if source is not None and needs not in ends:
                    break
                link = min(rank, source if source is not None else rank)
                lag = noise.expovariate(1 / 2e-4) + 0.01 * (link in later)
                begin = max(free[rank], ends[needs] + lag if source is not None else 0.0)
                took = (0.01 if item.kind is Kind.F else 0.02) * noise.lognormvariate(0, 0.1)
                took = took * (1.5 if rank in slower else 1) + 0.02 * (noise.random() < 0.02)
                rows[rank].append(MeasuredPass(item, begin, begin + took, begin - free[rank]))
                free[rank] = ends[(item.kind, item.stage, item.microbatch)] = begin + took
                row.pop(0)
    return rows


def told(steps: int, noise: random.Random, history=None, **wrong):
    """What is named in so many steps, and the history behind them."""
    history, found = history or History({}), []
    for _ in range(steps // EVERY):
        costs = measured_costs([step(noise, **wrong) for _ in range(READ)], SCHEDULE.placement, Costs())
        history, new, _ = history.after([Sample(costs, RANKS)], SCHEDULE, Costs())
        found += new
    return found, history


def test_a_thousand_noisy_steps_name_nobody():
    assert told(1000, random.Random(1))[0] == []


@pytest.mark.parametrize("rank", RANKS)
def test_a_rank_that_becomes_1_5_times_slower_is_named_within_ten_steps_and_once(rank):
    noise = random.Random(2)
    _, before = told(20, noise)
    found, history = told(10, noise, before, slower=[rank])
    ((name, text, cost),) = found
    assert name == f"stage {rank} on rank {rank}"
    peers = "its peers" if rank in (1, 2) else "the time it took before"
    assert text.startswith(f"{name} computes 1.5 x {peers}, ")
    quiet, slow = (max(row[-1].end for row in step(Silent(), s)) for s in ([], [rank]))
    assert cost == pytest.approx(1 - quiet / slow, abs=0.03)
    assert told(20, noise, history, slower=[rank])[0] == []
    (over,) = told(5, noise, history)[0]
    assert over.text == f"{name} is as fast as it should be again"


def test_a_middle_rank_that_is_slow_from_the_start_is_named_too():
    ((name, *_),) = told(10, random.Random(3), slower=[1])[0]
    assert name == "stage 1 on rank 1"


@pytest.mark.parametrize("link", [0, 1, 2])
def test_a_link_that_is_ten_ms_late_is_named(link):
    (found,) = told(10, random.Random(4), later=[link])[0]
    assert found.text.startswith(f"link {link}->{link + 1} is 10 ms late, ")


def test_a_replica_that_is_slow_is_found_among_equals():
    noise, steps = random.Random(5), [[], []]
    for replica, slower in enumerate(([], [0])):
        steps[replica] = [step(noise, slower) for _ in range(READ)]
    pair = [
        Sample(measured_costs(x, SCHEDULE.placement, Costs()), ranks)
        for x, ranks in zip(steps, (RANKS, (4, 5, 6, 7)), strict=True)
    ]
    history, none, _ = History({}).after(pair, SCHEDULE, Costs())
    assert none == []
    _, ((name, *_),), _ = history.after(pair, SCHEDULE, Costs())
    assert name == "stage 0 on rank 4"
    assert extremes(pair, SCHEDULE, Costs()).startswith("straggler: slowest stage 0 on rank 4, 1.4")


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipe"])
def test_what_ranks_spend_is_what_the_clock_says(name):
    schedule = build(name, 4, 8)
    time = simulate(schedule, Costs(1, 2, 1, comm=0.25))
    for rank, row in enumerate(schedule.ranks):
        last, ran = 0.0, []
        for pair in row:
            ran += [MeasuredPass(x, time.start[x], time.end[x], time.start[x] - last) for x in pair]
            last = time.end[pair[-1]]
        mine = spent(ran)
        assert (mine.busy, mine.span) == (pytest.approx(time.busy[rank]), pytest.approx(time.span[rank]))
        assert mine.waited == pytest.approx(mine.idle)  # nothing is the host's
