"""The digests of tools/proofs/tables/digests.py notice a table that is another, and know each again."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from megapipe.schedule import Costs, build
from tools.proofs.tables.digests import digest, draw, drawn_run, drawn_show, tables


def test_a_digest_has_the_times_of_the_formula_and_a_message_for_each_boundary():
    p, m = 4, 8
    found = digest(build("1f1b", p, m), Costs())
    assert found["makespan"] == 3 * (m + p - 1)
    assert found["peak"] == p
    assert found["messages"] == 2 * m * (p - 1)


def test_two_passes_in_the_other_order_change_the_digest_and_a_name_does_not():
    table = build("gpipe", 2, 4)
    first, second, *others = table.ranks[0]
    other = replace(table, ranks=((second, first, *others), table.ranks[1]))
    renamed = replace(table, name="mine")
    assert digest(other, Costs())["table"] != digest(table, Costs())["table"]
    assert digest(renamed, Costs()) == digest(table, Costs())


@pytest.mark.parametrize("drawn", [drawn_run, drawn_show])
def test_the_same_seed_draws_the_same_lines(drawn):
    assert [drawn(Random(5)) for _ in range(20)] == [drawn(Random(5)) for _ in range(20)]


def test_what_a_drawn_line_gives_is_the_same_again():
    for way, line, found in draw(3, 1):
        assert tables(way, line) == found
