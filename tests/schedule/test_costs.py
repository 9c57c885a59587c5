"""A transformer's costs are the tables of the papers, written here a second time."""

from dataclasses import replace

import pytest
from transformer_costs import transformer

from megapipe.schedule import Costs, Kind, Pass, ScheduleError, loop
from megapipe.schedule.costs_file import dump_costs, load_costs, read_costs

H, S, A, MB = 4096, 2048, 32, 2
SBH = S * MB * H


def test_times_of_the_zero_bubble_paper() -> None:
    costs = transformer(H, S, A, micro_batch_size=MB, layers=8)
    assert costs.f == 8 * SBH * (24 * H + 4 * S)
    assert costs.b == 8 * SBH * (24 * H + 8 * S)
    assert costs.w == 8 * SBH * (24 * H)


def test_memory_of_the_zero_bubble_paper() -> None:
    costs = transformer(H, S, A, micro_batch_size=MB)
    assert costs.mem_b == S * MB * (34 * H + 5 * A * S)
    assert costs.mem_w == 32 * SBH


@pytest.mark.parametrize("t", [2, 8])
def test_tensor_parallelism_shares_all_but_norms_and_block_inputs(t: int) -> None:
    attention = 3 * SBH + 8 * SBH / t + 5 * A * S * S * MB / t
    mlp, norms = 3 * SBH + 16 * SBH / t, 4 * SBH
    costs = transformer(H, S, A, micro_batch_size=MB, tensor=t)
    assert costs.mem_b == pytest.approx(attention + mlp + norms, rel=1e-12)
    shared = transformer(H, S, A, micro_batch_size=MB, tensor=t, sequence_parallel=True)
    assert shared.mem_b == pytest.approx(S * MB * (34 * H + 5 * A * S) / t, rel=1e-12)
    assert (shared.f, shared.mem_w) == (SBH * (24 * H + 4 * S) / t, 32 * SBH / t)


def test_flash_attention_and_recompute_trade_memory_for_backward_time() -> None:
    plain = transformer(H, S, A, micro_batch_size=MB)
    flash = transformer(H, S, A, micro_batch_size=MB, attention="flash")
    selective = transformer(H, S, A, micro_batch_size=MB, recompute="selective")
    full = transformer(H, S, A, micro_batch_size=MB, recompute="full")
    assert flash.mem_b == selective.mem_b == 34 * SBH
    assert full.mem_b == 2 * SBH
    extra = [c.b - plain.b for c in (flash, selective, full)]  # type: ignore[operator]
    assert extra == [2 * S * SBH, 4 * S * SBH, plain.f]


def test_the_output_layer_is_on_the_last_stage() -> None:
    vocab = 50304
    costs = transformer(H, S, A, micro_batch_size=MB, layers=(8, 8, 8, 6), vocab=vocab)
    layer = SBH * (24 * H + 4 * S)
    assert costs.f == (8 * layer, 8 * layer, 8 * layer, 6 * layer + 2 * SBH * vocab)
    assert isinstance(costs.mem_b, tuple)
    one = S * MB * (34 * H + 5 * A * S)
    assert costs.mem_b[0] == 8 * one + SBH
    assert costs.mem_b[3] == 6 * one + 4 * SBH * (1 + vocab / H)
    with pytest.raises(ScheduleError, match="needs layers as a tuple"):
        transformer(H, S, A, layers=8, vocab=vocab)


def test_a_costs_file_says_stages_links_and_messages(tmp_path) -> None:
    path = tmp_path / "costs.json"
    costs = Costs((1.0, 2.0), 3.0, 4.0, comm=(0.5, 0.25), overhead=0.125)
    path.write_text(dump_costs(costs))
    assert load_costs(path) == costs
    path.write_text('{"f": 2, "comm": {"latency": 5, "bytes": 100, "bandwidth": [50, 25]}}')
    assert load_costs(path) == Costs(2.0, comm=(7.0, 9.0))
    path.write_text('{"g": "fast"}')
    with pytest.raises(ScheduleError, match=r"costs.json: g must be a number or a list of numbers, got \"fast\"."):
        load_costs(path)
    path.write_text('{"forward": 1}')
    with pytest.raises(ScheduleError, match="names forward; costs have f, b, w"):
        load_costs(path)


@pytest.mark.parametrize("name", ["fb", "overhead", "link_f", "piece"])
def test_what_is_one_number_for_all_stages_is_no_list(name) -> None:
    with pytest.raises(ScheduleError, match=rf"^costs.json: {name} must be a number, got \[1, 2\]\.$"):
        read_costs({"f": 1, name: [1, 2]})


@pytest.mark.parametrize("number", [10**400, -(10**400), 1e300])
def test_a_number_that_no_time_reaches_is_refused(number) -> None:
    with pytest.raises(
        ScheduleError, match=r"^costs.json: f must be a number or a list of numbers|must be a number from"
    ):
        read_costs({"f": number})


def test_a_head_is_no_longer_than_its_stage() -> None:
    """Two of three rows of a comparison said "Costs.f must be a number from 0 to 1e+100, got -4194304.0."."""
    assert read_costs({"f": [3, 5], "head_f": 5}).head_f == 5
    with pytest.raises(ScheduleError, match=r"^costs.json: head_f is a part of the last stage's f, 5, got 6\.$"):
        read_costs({"f": [3, 5], "head_f": 6})


def _together(costs: Costs, one: Kind, two: Kind) -> float:
    return costs.of_step((Pass(one, 0, 0), Pass(two, 0, 1)), loop(1))


def test_of_two_passes_that_take_turns_at_will_the_longer_lane_binds() -> None:
    half = Costs(10, 11, 8, link_f=0.23, link_b=0.23, link_w=0.23)
    for one, two, apart in ((Kind.F, Kind.BW, 29), (Kind.F, Kind.F, 20), (Kind.B, Kind.B, 22), (Kind.B, Kind.W, 19)):
        assert _together(half, one, two) == pytest.approx(0.77 * apart)
    assert _together(Costs(10, 11, 8, link_f=0.9, link_b=0.9), Kind.F, Kind.B) == pytest.approx(0.9 * 21)
    assert _together(Costs(10, 11, 8), Kind.F, Kind.BW) == 29
    assert _together(replace(half, fb=25.0), Kind.F, Kind.BW) == 25, "what was measured stands"
    assert _together(half, Kind.BW, Kind.W) == pytest.approx(0.77 * 27)


def test_two_passes_of_one_layer_take_the_makespan_of_their_pieces() -> None:
    """Drawn by hand: A is arithmetic, c communication, of 5 each; a backward begins as its forward ended."""
    costs = Costs(10, 10, 8, link_f=0.5, link_b=0.5, piece=5)
    assert _together(costs, Kind.F, Kind.B) == 10  # A c  beside  c A
    assert _together(costs, Kind.F, Kind.F) == 15  # A c -  beside  - A c
    assert _together(costs, Kind.B, Kind.B) == 15
    assert _together(costs, Kind.B, Kind.W) == 13  # c A  beside 8 of W
    assert _together(replace(costs, overhead=1.0), Kind.F, Kind.F) == 16, "two passes have one overhead"


def test_finer_pieces_come_to_the_sums_and_never_below() -> None:
    times = [_together(Costs(10, 11, 8, link_f=0.3, link_b=0.35, piece=x), Kind.F, Kind.BW) for x in (3, 1, 0.1, 0)]
    assert all(time >= times[-1] - 1e-9 for time in times)
    assert times[-2] == pytest.approx(times[-1], rel=0.02)


def test_a_share_above_the_whole_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"^Costs.link_f is a share of the pass, from 0 to 1, got 1.5.$"):
        Costs(link_f=1.5)
