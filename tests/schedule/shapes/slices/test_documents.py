"""Tables of packed sequences: a slice that begins a document needs nothing of those before it."""

import random
from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from megapipe.schedule import (
    Costs,
    Kind,
    Pass,
    ScheduleError,
    build,
    from_csv,
    from_json,
    simulate,
    to_csv,
    to_json,
    verify,
)
from megapipe.schedule.core.cuts import Cutting, shares
from megapipe.schedule.dependencies import Dependencies
from megapipe.schedule.shapes.slices.slices import slices

ATTENTION = Costs(attention_f=0.6, attention_b=0.6, attention_w=0.6)
KEYS = Costs(mem_k=1)  # nothing but keys and values, and their gradients


def packed(name, p, m, n, documents, costs=ATTENTION):
    cuts = shares(n, "work", costs, documents)
    return slices(lambda k: build(name, p, k), m, cuts, costs, documents=Cutting(n, "work", documents).begins)


ONE = "0F0.1,0BW0.1,0F0.0,0BW0.0\n"


def test_both_edges_vanish_where_a_document_begins():
    needs = Dependencies(two := packed("1f1b", 2, 1, 4, 2))
    forwards = [needs.of(Pass(Kind.F, 0, 0, n)) for n in range(4)]
    assert [list(map(str, found)) for found in forwards] == [[], ["0F0.0"], [], ["0F0.2"]]
    backwards = [[str(x) for x in needs.of(Pass(Kind.BW, 1, 0, n)) if x.kind is Kind.BW] for n in range(4)]
    assert backwards == [["1BW0.1"], [], ["1BW0.3"], []]
    assert two.documents == ((2,),)


def test_a_later_document_may_run_first():
    with pytest.raises(ScheduleError, match=r"rank 0 waits at step 0, 0F0\.1, for 0F0\.0"):
        from_csv(ONE, "one.csv")
    table = replace(build("1f1b", 1, 1), ranks=tuple(rows(ONE)), cuts=(1, 1), documents=((1,),))
    verify(table)
    assert simulate(table).peak == (0.5,)


def rows(text):
    for line in text.split():
        yield tuple((Pass(Kind(x[1:-3]), int(x[0]), int(x[-3]), int(x[-1])),) for x in line.split(","))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_documents_of_a_quarter_keep_at_most_half_of_the_keys(name):
    whole, quarters = (max(simulate(packed(name, 8, 8, 8, d), KEYS).peak) for d in (1, 4))
    assert quarters / whole < 0.45
    one, four = (simulate(packed(name, 8, 8, 8, d), ATTENTION) for d in (1, 4))
    assert max(four.peak) / max(one.peak) < 0.55
    # Attention within quarters is a quarter of it: 0.4 + 0.6 / 4 of the work, and ramps as before.
    assert sum(four.busy) == pytest.approx(0.55 * sum(one.busy))


def test_documents_are_microbatches_of_their_own():
    # Two slices a document at p = 4: rank 0 holds p - 1 + 2 of 8 slices, and ramps are of an eighth.
    time = simulate(packed("1f1b", 4, 2, 8, 4, Costs()))
    assert max(time.peak) == pytest.approx((4 - 1 + 2) / 8)
    assert time.bubble == pytest.approx((4 - 1) * 3 / 8)


def test_microbatches_may_have_other_documents_each():
    def made(k):
        return build("zb-h1", 2, k)

    documents = (2,), (), (1, 3)
    table = slices(made, 3, (1, 1, 1, 1), documents=documents)
    read = from_json(to_json(table))
    assert (read.documents, read.ranks) == (documents, table.ranks)
    # The third slice sees all before it, the same in its document, or begins one: blocks of the triangle of 16.
    seen = [[1, 3, 1, 3], [1, 3, 5, 7], [1, 1, 3, 1]]
    times = simulate(table, Costs(attention_f=1))
    for i, n in product(range(3), range(4)):
        item = Pass(Kind.F, 1, i, n)
        assert times.end[item] - times.start[item] == pytest.approx(seen[i][n] / 16)


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        (((1,), (1,), (1,)), "documents has 3 rows; it has one, or one for each of 2 microbatches"),
        (((2, 1),), r"documents begin at slices \[2, 1\]: name them in ascending order, from 1 to 3"),
        (((4,),), r"documents begin at slices \[4\]"),
    ],
)
def test_documents_that_begin_nowhere_are_refused(documents, said):
    with pytest.raises(ScheduleError, match=said):
        verify(replace(packed("1f1b", 2, 2, 4, 1), documents=documents))


def test_where_documents_begin_csv_cannot_say():
    with pytest.raises(ScheduleError, match=r"says where documents begin, which CSV cannot\. Write JSON\."):
        to_csv(packed("1f1b", 2, 2, 4, 2))


def test_documents_of_one_length_take_as_many_slices_each():
    with pytest.raises(ScheduleError, match="3 documents of one length cannot share 4 slices equally: take 6 slices"):
        Cutting(4, "work", 3).begins  # noqa: B018


def test_the_clock_keeps_to_the_needs_and_everything_held_is_given_back():
    draw = random.Random(3)
    for _ in range(40):
        p, m, n = draw.randint(1, 4), draw.randint(1, 4), draw.randint(2, 6)
        documents = tuple(tuple(sorted(draw.sample(range(1, n), draw.randint(0, n - 1)))) for _ in range(m))
        costs = Costs(1, draw.uniform(1, 3), 2, comm=0.3, attention_f=0.5, attention_b=0.3, mem_k=0.2)
        made = partial(build, draw.choice(["1f1b", "zb-h1", "gpipe"]), p)
        table = slices(made, m, tuple(draw.randint(1, 9) for _ in range(n)), costs, documents=documents)
        time, needs = simulate(table, costs), Dependencies(table)
        for item, start in time.start.items():
            assert all(start >= time.end[maker] for maker in needs.of(item))
        assert all(curve[-1][1] == pytest.approx(0, abs=1e-9) for curve in time.curves)
        assert from_json(to_json(table)).documents == documents
