"""Tables that cut microbatches along the sequence: what they say, what they need, what they take."""

from dataclasses import replace

import pytest

from megapipe.schedule import (
    Costs,
    Schedule,
    ScheduleError,
    build,
    from_csv,
    from_json,
    simulate,
    to_csv,
    to_json,
    verify,
)
from megapipe.schedule.core.cuts import shares
from megapipe.schedule.costs import ATTENTION
from megapipe.schedule.shapes.slices.slices import slices

TWO = """
0F0.0,0F0.1,0BW0.1,0BW0.0
1F0.0,1F0.1,1BW0.1,1BW0.0
"""


def two(cuts: tuple[float, ...] = (1, 1)) -> Schedule:
    """Two ranks, one microbatch in two slices."""
    return replace(from_csv(TWO.strip(), "two.csv"), cuts=cuts)


def test_a_slice_is_written_behind_its_microbatch_in_json_and_csv():
    table = two((3, 1))
    assert '["0F0.1"]' in to_json(table)
    assert '"cuts": [3, 1]' in to_json(table)
    assert from_json(to_json(table)) == replace(table, name="two.csv")
    assert to_csv(two()) == TWO.strip() + "\n"
    with pytest.raises(ScheduleError, match="uneven slices, which CSV cannot say"):
        to_csv(table)  # was read back as a table of equal ones, 14.35 long for 18.1


def test_ramps_are_as_much_shorter_as_slices_are():
    assert simulate(two()).makespan == 0.5 + 2 * 1.5 + 1  # (m n + p - 1) (F + BW) / n, whole: 6
    one = simulate(two((1, 1)), Costs(b=0, w=0)).makespan
    assert one == 1.5


def test_attention_costs_a_slice_what_it_sees():
    all_attention = Costs(attention_f=1.0, attention_b=1.0, attention_w=1.0)
    time = simulate(two(), all_attention)
    took = {str(x): time.end[x] - time.start[x] for x in time.start}
    assert took["0F0.0"] == 1 / 4  # 1 of 4 blocks of the triangle
    assert took["1BW0.1"] == 2 * 3 / 4
    assert simulate(two((3, 1)), Costs(attention_f=0.5)).end[next(iter(time.start))] == 0.5 * 3 / 4 + 0.5 * 9 / 16


def test_a_slice_holds_its_length_and_the_gradients_of_the_keys_before_it():
    assert simulate(two((3, 1))).peak == (1, 1)
    half = replace(two((3, 1)), ranks=tuple(row[:1] for row in two().ranks))
    assert simulate(half).peak == (0.75, 0.75)
    # From the backward of the last slice on gradients of the keys of the first are there.
    assert simulate(two((3, 1)), Costs(mem_k=0.2)).peak == pytest.approx((1.15, 1.15))


@pytest.mark.parametrize(
    ("given", "instead", "said"),
    [
        ("0BW0.1,0BW0.0", "0BW0.0,0BW0.1", "rank 0 waits at step 2, 0BW0.0, for 0BW0.1"),
        ("1F0.0,1F0.1,1BW", "1F0.0,1BW0.0,1F0.1,1BW", "rank 1, step 4, 1BW0.0: runs twice, first at step 1"),
        ("0F0.0,0F0.1", "0F0.1,0F0.0", "1F0.0: stage 0 reads microbatch 0.1 at this place"),
        ("1BW0.1", "1BW0", "1BW0: microbatches have slices 0 to 1, such as 1BW0.0"),
        ("1F0.1,", "", "rank 1: 1F0.1 is missing"),
    ],
)
def test_backwards_go_from_the_last_slice_to_the_first(given, instead, said):
    with pytest.raises(ScheduleError) as error:
        from_csv(TWO.strip().replace(given, instead), "two.csv")
    assert said in str(error.value)


def test_a_table_of_whole_microbatches_has_no_slices():
    with pytest.raises(ScheduleError, match=r"0F0\.0: microbatches have no slices here"):
        verify(replace(two(), cuts=()))


def test_a_bubble_of_nothing_is_0_and_not_the_rounding_of_its_sums():
    """ZB-H2 has none at F = B = W, of slices of equal work too (Qi et al. 2023): it was printed as 7.1054e-15."""
    costs = Costs(**dict.fromkeys(ATTENTION, 0.6))
    table = slices(lambda m: build("zb-h2", 8, m), 8, shares(4, "work", costs), costs)
    assert simulate(table, costs).bubble == 0.0
