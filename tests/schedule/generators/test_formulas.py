"""Bubble and memory are what the papers say, exactly."""

import os
from functools import cache

import pytest

from megapipe.schedule import Costs, Kind, Pass, Timeline, build, simulate

UNIT = Costs()
build = cache(build)  # each table is timed under several costs
SIZES = [(2, 4), (4, 8), (4, 12), (6, 12)]
UNEQUAL = [(1.0, 1.0, 1.0), (10.0, 14.0, 7.0), (10.0, 11.0, 8.0)]
MOST = 8
if os.environ.get("MEGAPIPE_NIGHTLY"):
    MOST = 17
    SIZES += [(8, 16), (8, 24)]
    UNEQUAL += [(3.0, 4.0, 2.0)]


def play(name: str, p: int, m: int, costs: Costs = UNIT, **options: int) -> Timeline:
    return simulate(build(name, p, m, **options), costs)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 5), (4, 2), *SIZES])
@pytest.mark.parametrize(("f", "b", "w"), UNEQUAL)
def test_naive_computes_one_pth_of_the_time(p: int, m: int, f: float, b: float, w: float) -> None:
    time = play("naive", p, m, Costs(f, b, w))
    assert time.makespan == p * m * (f + b + w)
    assert time.idle == (time.makespan * (p - 1) / p,) * p
    assert time.peak == (1.0,) * p


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 5), (4, 2), *SIZES])
@pytest.mark.parametrize(("f", "b", "w"), UNEQUAL)
def test_gpipe_waits_p_minus_1_of_m_plus_p_minus_1(p: int, m: int, f: float, b: float, w: float) -> None:
    time = play("gpipe", p, m, Costs(f, b, w))
    assert time.bubble / time.makespan == pytest.approx((p - 1) / (m + p - 1), rel=1e-12)
    assert time.peak == (m,) * p


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("f", "b", "w"), UNEQUAL)
def test_1f1b_bubble_and_memory(p: int, m: int, f: float, b: float, w: float) -> None:
    time = play("1f1b", p, m, Costs(f, b, w))
    assert time.bubble == (p - 1) * (f + b + w)
    assert time.peak == tuple(p - r for r in range(p))


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("f", "b", "w"), UNEQUAL)
@pytest.mark.parametrize("v", [1, 2, 4])
def test_chunks_divide_the_bubble(p: int, m: int, f: float, b: float, w: float, v: int) -> None:
    fused = play("interleaved", p, m, Costs(f, b, w), chunks=v)
    split = play("interleaved-zb", p, m, Costs(f, b, w), chunks=v)
    assert fused.bubble == pytest.approx((p - 1) * (f + b + w) / v, rel=1e-9)
    assert split.bubble == pytest.approx((p - 1) * (f + b - w) / v, rel=1e-9)
    assert max(fused.peak) == (2 * (p - 1) + (v - 1) * p + 1) / v
    assert split.peak == (p,) * p
    ideal = m * (f + b + w)
    assert fused.bubble / ideal == pytest.approx((p - 1) / (v * m), rel=1e-9)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("f", "b", "w"), UNEQUAL)
def test_zb_h1_fills_a_part_of_1f1bs_bubble_at_its_memory(p: int, m: int, f: float, b: float, w: float) -> None:
    time = play("zb-h1", p, m, Costs(f, b, w))
    assert time.bubble == (p - 1) * (f + b - w)
    assert time.peak == (p,) * p


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= 2 * p - 1])
@pytest.mark.parametrize(("f", "b", "w"), UNEQUAL)
def test_zb_h2_fills_more_at_twice_the_memory(p: int, m: int, f: float, b: float, w: float) -> None:
    time = play("zb-h2", p, m, Costs(f, b, w))
    assert time.bubble == (p - 1) * (f + b - 2 * w)
    assert time.peak == (2 * p - 1,) * p


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= 2 * p - 1])
def test_zb_v_has_no_bubble_in_1f1bs_memory(p: int, m: int) -> None:
    time = play("zb-v", p, m)
    assert time.bubble == 0
    assert time.peak == (p,) * p


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("w", "fb"), [(1.0, None), (0.5, None), (1.0, 2.5), (1.0, 2.0)])
def test_dualpipe_at_f_equal_to_b(p: int, m: int, w: float, fb: float | None) -> None:
    """The paper's B is the whole backward, F&B the pair: bubble (p/2-1)(F&B+B-3W)."""
    time = play("dualpipe", p, m, Costs(1.0, 1.0, w, fb))
    assert max(time.idle) == pytest.approx((p / 2 - 1) * ((fb or 2 + w) + (1 + w) - 3 * w), rel=1e-12)
    assert time.peak == (p + 1,) * p
    assert time.parameters == (2.0,) * p


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("w", "fb"), [(1.0, None), (0.5, None), (1.0, 2.5), (1.0, 2.0)])
def test_dualpipe_cut_in_half_needs_one_copy_and_twice_the_messages(p: int, m: int, w: float, fb: float | None) -> None:
    time = play("dualpipe-v", p, m, Costs(1.0, 1.0, w, fb))
    assert max(time.idle) == pytest.approx((p - 1) / 2 * ((fb or 2 + w) + (1 + w) - 3 * w), rel=1e-12)
    assert time.peak == (p + 0.5,) * p
    assert time.parameters == (1.0,) * p
    # The turn of the V is within a rank: 2p-2 links for m microbatches against p-1 for each half of them.
    assert sum(time.sent) == 2 * sum(play("dualpipe", p, m).sent)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("f", "b", "w"), UNEQUAL)
@pytest.mark.parametrize("v", [1, 2, 4])
def test_breadth_first_has_interleaveds_bubble_and_gpipes_memory(p: int, m: int, f: float, b: float, w: float, v: int):
    time = play("breadth-first", p, m, Costs(f, b, w), chunks=v)
    assert time.bubble == pytest.approx((p - 1) * (f + b + w) / v, rel=1e-9)
    assert max(time.peak) == m


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 12), (6, 6), (8, 8), (8, 24)])
def test_chimera_waits_p_minus_2_slots(p: int, m: int) -> None:
    """Li and Hoefler 2021, table 2: (D-2)/(2N+D-2) of the time where F and the backward last as long."""
    time = play("chimera", p, m, Costs(2.0, 1.0, 1.0))
    assert max(time.idle) / time.makespan == pytest.approx((p - 2) / (2 * m + p - 2))
    assert (min(time.peak), max(time.peak)) == (min(p / 2 + 1, m), p)
    assert time.parameters == (2.0,) * p


@pytest.mark.parametrize(("p", "m"), [(2, 2), (3, 6), (4, 4), (4, 12), (8, 8), (8, 16)])
@pytest.mark.parametrize("waves", [1, 2, 3])
def test_each_wave_of_hanayo_divides_the_bubble(p: int, m: int, waves: int) -> None:
    time = play("hanayo", p, m, Costs(2.0, 1.0, 1.0), chunks=2 * waves)
    assert time.bubble == pytest.approx(2 * (p - 1) / waves)  # F is 2
    assert max(time.peak) == pytest.approx(p)
    assert time.parameters == pytest.approx((1.0,) * p)


@pytest.mark.parametrize(("g", "makespan"), [(4, 57), (6, 56), (8, 55)])
def test_groups_below_p_hold_less_and_run_as_long_as_sail_sgs(g: int, makespan: float) -> None:
    time = play("group-interleaved", 8, 16, microbatch_group_size_per_vp_stage=g)
    assert time.makespan == makespan
    assert time.peak == tuple((8 + g - r) / 2 for r in range(8))


@pytest.mark.parametrize("p", range(1, MOST + 1))
def test_1f1b_v_holds_two_thirds(p: int) -> None:
    assert max(play("1f1b-v", p, 3 * p).peak) == (2 * p + 2) // 3 + (p % 3 == 0)


@pytest.mark.parametrize(
    ("p", "m", "makespan"), [(2, 4, 14), (4, 4, 19.5), (4, 8, 31.5), (8, 16, 64.5), (8, 32, 112.5)]
)
def test_1f1b_v_runs_as_long_as_sail_sgs(p: int, m: int, makespan: float) -> None:
    assert play("1f1b-v", p, m).makespan == makespan


@pytest.mark.parametrize("p", range(1, MOST + 1))
def test_v_half_and_v_min_hold_half_and_a_third(p: int) -> None:
    for m in (2 * p, 3 * p + 1):
        assert max(play("v-half", p, m).peak) == (p + 2) // 2
        assert max(play("v-min", p, m).peak) == (p + 4) // 3


@pytest.mark.parametrize("p", [4, 6, 8, 12])
def test_v_half_halves_1f1bs_bubble(p: int) -> None:
    assert play("v-half", p, 3 * p).bubble < play("1f1b", p, 3 * p).bubble / 2
    assert play("v-min", p, 3 * p).bubble < play("1f1b", p, 3 * p).bubble * 2 / 3


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "dualpipe", "dualpipe-v", "interleaved"])
def test_every_rank_does_the_same_work_in_every_schedule(name: str) -> None:
    assert play(name, 4, 8, Costs(10, 14, 7)).busy == (8 * 31.0,) * 4


@pytest.mark.parametrize(
    ("name", "options", "makespan"),
    [
        ("1f1b", {}, 667),
        ("zb-h1", {}, 555),
        ("interleaved-zb", {"chunks": 2}, 509.5),
        ("interleaved-zb", {"chunks": 4}, 486.75),
        ("zb-v", {}, 502.5),
    ],
)
def test_makespans_that_another_clock_measured_of_other_generators(
    name: str, options: dict[str, int], makespan: float
) -> None:
    """8 ranks, 16 microbatches at a real model's costs; the peers are Megatron, sail-sg's zero bubble, and torch."""
    assert play(name, 8, 16, Costs(10, 11, 8), **options).makespan == makespan


EQUAL, REAL, LONG = (1.0, 1.0, 1.0), (10.0, 11.0, 8.0), (10.0, 14.0, 7.0)


@pytest.mark.parametrize(
    ("name", "p", "m", "fbw", "comm", "makespan"),
    [
        ("v-half", 4, 8, EQUAL, 0, 26.5),
        ("v-half", 4, 8, REAL, 0, 266.5),
        ("v-half", 4, 8, LONG, 0, 299.5),
        ("v-half", 8, 16, EQUAL, 0, 56.5),
        ("v-half", 8, 16, REAL, 0, 568.5),
        ("v-half", 8, 16, REAL, 0.5, 590.5),
        ("v-half", 8, 16, LONG, 0, 641),
        ("v-half", 16, 32, LONG, 0, 1327),
        ("v-min", 8, 16, REAL, 0, 665.5),
        ("zb-v", 4, 4, EQUAL, 0, 13.5),
        ("zb-v", 4, 4, REAL, 0, 135.5),
        ("zb-v", 4, 4, LONG, 0, 145),
        ("zb-v", 8, 16, LONG, 0.5, 562),
    ],
)
def test_not_longer_than_sail_sgs_own_order_at_its_memory(
    name: str, p: int, m: int, fbw: tuple[float, float, float], comm: float, makespan: float
) -> None:
    """Their generators' tables, timed by an independent clock."""
    costs = Costs(*fbw, comm=comm)
    time = simulate(build(name, p, m, costs=costs), costs)
    assert time.makespan <= makespan + 1e-9
    assert max(time.peak) == {"v-half": (p + 2) // 2, "v-min": (p + 4) // 3, "zb-v": p}[name]


@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min"])
def test_costs_move_weight_gradients_alone(name: str) -> None:
    """F and B keep the order of the papers' pattern, so that what costs can break is time, never the picture."""

    def order(costs: Costs) -> list[list[Pass]]:
        return [
            [x for step in row for x in step if x.kind is not Kind.W] for row in build(name, 4, 8, costs=costs).ranks
        ]

    assert order(Costs(*LONG)) == order(Costs(*LONG, comm=0.5))
