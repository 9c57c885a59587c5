"""The search for a split of the layers, against all splits."""

import itertools
from dataclasses import replace

import pytest

from megapipe.partition.spans import nearly_even
from megapipe.plan import ModelWork, Work
from megapipe.plan.auto import Judge, balanced, search
from megapipe.schedule import build, simulate
from megapipe.schedule.ingredients import Pairing
from megapipe.schedule.shapes.pairs.pairs import pairs


def heavy_head(layers: int, head: float) -> ModelWork:
    """Layers of one unit per pass and a head of several, as a large vocabulary makes it."""
    return ModelWork(Work(), (Work(1.0, 1.0, 1.0, 1.0, 1.0, 1),) * layers, Work(head, head, head, 1.0, 1.0, 1))


def all_splits(layers: int, chain: int):
    for cuts in itertools.combinations_with_replacement(range(layers + 1), chain - 1):
        ends = (0, *cuts, layers)
        yield tuple(b - a for a, b in itertools.pairwise(ends))


@pytest.mark.parametrize(
    ("name", "pp", "layers", "head"),
    [
        ("1f1b", 4, 16, 4.0),
        ("zb-h1", 4, 16, 4.0),
        ("zb-h1", 4, 12, 2.5),
        ("interleaved", 2, 9, 4.0),
        ("zb-v", 2, 9, 4.0),
        ("v-half", 2, 9, 1.5),
        ("dualpipe", 4, 10, 4.0),
    ],
)
def test_the_search_finds_what_trying_every_split_finds(name, pp, layers, head):
    judge = Judge(build(name, pp, 8), heavy_head(layers, head))
    chain = judge.schedule.placement.chain
    best = min(judge.score(counts)[1] for counts in all_splits(layers, chain))
    found = search(judge)
    assert sum(found) == layers
    assert simulate(judge.schedule, judge.pieces.costs(found)).makespan == pytest.approx(best)


def test_a_head_of_four_layers_costs_a_third_of_the_step_if_layers_are_counted():
    judge = Judge(build("zb-h1", 8, 32), heavy_head(16, 4.0))
    assert judge.score(search(judge))[1] < 0.75 * judge.score(nearly_even(16, 8))[1]


def test_balanced_means_no_split_has_a_shorter_longest_stage():
    model = heavy_head(7, 2.5)

    def longest(counts):
        return max(sum(row) for row in zip(*(getattr(model.costs(counts), n) for n in "fbw"), strict=True))

    assert longest(balanced(model, 4)) == min(longest(counts) for counts in all_splits(7, 4))


def test_the_search_keeps_the_memory_limit_where_a_split_does():
    judge = Judge(build("1f1b", 4, 8), heavy_head(12, 4.0))
    free = search(judge)
    limited = replace(judge, limit=lambda counts: [10.0] * 4)  # stage 0 holds 4 microbatches of its layers
    kept = search(limited)
    assert free[0] > 2
    assert kept[0] <= 2
    assert limited.score(kept)[0] == 0


def test_the_even_split_stays_where_no_other_is_faster():
    judge = Judge(build("dualpipe", 2, 8), heavy_head(7, 0.3))  # a rank of the mirror holds both ends of the model
    assert search(judge) == nearly_even(7, 2)


def test_a_split_for_pairs_is_the_best_one_by_the_clock_that_chose_the_pairs():
    """It was judged as if pairs hid nothing: 1F1B at p = m = 8 was refused, as no pair was left that gains."""
    model, linked = heavy_head(5, 0.5), Pairing(share=0.2).linked
    chain = build("zb-v", 2, 8)
    table = pairs(chain, linked(model.costs(nearly_even(5, 4))))
    times = {counts: simulate(table, linked(model.costs(counts))).makespan for counts in all_splits(5, 4)}
    assert times[search(Judge(table, model, price=linked))] == pytest.approx(min(times.values()))
    assert times[search(Judge(table, model))] > min(times.values())
