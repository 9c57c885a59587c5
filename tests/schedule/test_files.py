"""Files of schedules: what is read, and what a user is told of a file that cannot be."""

import json
import tracemalloc
from pathlib import Path

import pytest

from megapipe.schedule import Costs, ScheduleError, build, from_csv, from_json, load, loop, mirror, to_csv, to_json, vee
from megapipe.schedule.families.vocabulary.shares import with_vocabulary
from megapipe.schedule.recipe import Recipe
from megapipe.schedule.search.auto import zb_auto

ONE_F_ONE_B = "0F0,0F1,0BW0,0BW1\n1F0,1BW0,1F1,1BW1\n"


def sentence(text: str) -> str:
    with pytest.raises(ScheduleError) as caught:
        (from_json if text.startswith("{") else from_csv)(text, "mine")
    return str(caught.value)


def test_a_table_by_hand() -> None:
    assert from_csv(ONE_F_ONE_B).ranks == build("1f1b", 2, 2).ranks
    assert to_csv(build("1f1b", 2, 2)) == ONE_F_ONE_B


def test_torchs_letters_mean_other_passes() -> None:
    assert from_csv("0F0,0B0\n").ranks == from_csv("0F0,0BW0\n").ranks
    assert from_csv("0F0,0I0,0W0\n").ranks == from_csv("0F0,0B0,0W0\n").ranks


def test_torchs_idle_and_communication_cells_are_skipped() -> None:
    rows = "0F0,,0SEND_F0,0F1,,0RECV_B0,0B0,0B1,0REDUCE_GRAD\n,1F0,1B0,1UNSHARD,1F1,1B1\n"
    assert from_csv(rows).ranks == build("1f1b", 2, 2).ranks


def test_placement_follows_from_the_passes() -> None:
    assert from_csv(to_csv(build("zb-v", 4, 8))).placement == vee(4)
    assert from_csv(to_csv(build("dualpipe", 4, 8))).placement == mirror(4)


def test_the_documented_json() -> None:
    data = json.loads(to_json(build("dualpipe-v", 2, 4)))
    assert list(data) == ["name", "pp", "microbatches", "rank_of", "chain", "ranks"]
    assert (data["name"], data["pp"], data["microbatches"]) == ("dualpipe-v", 2, 4)
    assert (data["rank_of"], data["chain"]) == ([0, 1, 1, 0], 4)
    assert data["ranks"][0][:2] == [["0F0"], ["0F1"]]
    assert ["0F3", "3BW0"] not in data["ranks"][1]
    assert ["0F3", "3BW1"] in data["ranks"][0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (ONE_F_ONE_B.replace("1BW0", "1Q0"), "rank 1 (line 2), step 1: 1Q0: unknown letter Q; there are F, B, W, BW"),
        (ONE_F_ONE_B.replace("1BW0", "1I0"), "rank 0 (line 1), step 2: 0BW0: unknown letter BW; there are F, I, W, B"),
        (
            ONE_F_ONE_B.replace("1BW0", "BW0"),
            "rank 1 (line 2), step 1: BW0: not a pass; a pass is stage, kind, microbatch",
        ),
        (ONE_F_ONE_B.replace(",1BW1", ""), "rank 1: 1BW1 is missing"),
        (ONE_F_ONE_B.replace(",1BW1", ""), "rank 1 (line 2) ends early, after 3 steps; is the line cut off?"),
        (ONE_F_ONE_B.replace("\n1F0", "\n\n1F0"), "rank 1 (line 2) is empty; each line is one rank"),
        (ONE_F_ONE_B.replace("1", "3"), "no rank runs stage 1, but there is a stage 3."),
        (ONE_F_ONE_B.replace("0F1,0BW0", "0BW0,0F1").replace("1F0,1BW0,1F1", "1F0,1F1,1BW0"), "rank 0 waits at step 1"),
        (
            ONE_F_ONE_B.replace("0BW1\n", "0BW1,1F0\n"),
            "rank 1 (line 2), step 0, 1F0: stage 1 is on rank 0 (line 1) too; a stage has one rank",
        ),
        (ONE_F_ONE_B.replace(",", ";"), "rank 0 (line 1), step 0: 0F0;0F1;0BW0;0BW1: separate passes by commas, not"),
        ("0U0\n", "0U0 is of a stage as a whole, and the file has no pass of a microbatch, such as 0F0."),
        ("0G0\n1G0\n", "0G0 is of a stage as a whole, and the file has no pass of a microbatch"),
        ("", "the file is empty"),
        (",,\n", "the file is empty"),
        ("0F0,0BW99999999\n", "there are 100000000 microbatches, but only 2 passes"),
        ("{", "not JSON: Expecting property name"),
        ("{}", "ranks must be a list for each rank of steps, each a list of passes"),
        (to_json(build("1f1b", 2, 2)).replace("1BW0", "1Q0"), "rank 1, step 1: 1Q0: unknown letter Q"),
        (to_json(build("1f1b", 2, 2)).replace('"pp": 2', '"pp": 3'), "ranks has 2 lists, pp is 3"),
        (
            to_json(build("1f1b", 2, 2)).replace(
                '"chain": 2', '"chain": 2, "shared": [{"lane": [1], "ranks": [0], "order": []}]'
            ),
            "shared must be a list of objects with lane (d2h or h2d), ranks and order",
        ),
        (
            to_json(build("1f1b", 2, 2)).replace('"chain": 2', '"chain": 2, "vocabulary": 1'),
            "vocabulary must be true or false",
        ),
        (
            to_json(build("1f1b", 2, 2)).replace('"chain": 2', '"chain": 2, "documents": [[1]]'),
            "documents begin at slices, but microbatches are not cut: leave out documents, or name several cuts",
        ),
        (to_json(build("1f1b", 2, 2)).replace('"chain": 2', '"chain": 3'), "chain 3 must divide the number of stages"),
        (
            to_json(build("1f1b", 2, 2)).replace("[0, 1]", "[0, 5]"),
            "rank_of must name every rank from 0 to 1 and no other, got [0, 5]",
        ),
        (to_json(build("1f1b", 2, 2)).replace("1F0", "1F1"), "1F1: runs twice, first at step 0"),
    ],
)
def test_a_broken_file_is_refused_by_name_and_place(text: str, told: str) -> None:
    assert sentence(text).startswith("mine")
    assert told in sentence(text)


def test_a_hole_in_a_row_that_is_ragged_by_right_is_not_called_a_cut_line() -> None:
    whole = "0F0,0F1,0F2,0B0,0W0,0B1,0W1,0B2,0W2\n1F0,1BW0,1F1,1BW1,1F2,1BW2\n"
    assert from_csv(whole).num_microbatches == 3
    assert sentence(whole.replace("1F1,", "")) == "mine is not valid:\n  rank 1: 1F1 is missing"


def test_the_schedule_name_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "Mine.JSON"
    path.write_text(to_json(build("zb-h1", 2, 4)))
    assert build(str(path), 2, 4) == load(path) == build("zb-h1", 2, 4)
    with pytest.raises(ScheduleError, match="is made for 2 ranks and 4 microbatches, not 4 and 4"):
        build(str(path), 4, 4)
    with pytest.raises(ScheduleError, match="over the memory limit of 1"):
        build(str(path), 2, 4, memory=1)
    with pytest.raises(ScheduleError, match="No such file"):
        build("nowhere.csv", 2, 4)


def test_names_are_case_blind_and_typos_are_guessed() -> None:
    assert build("ZB-H1", 2, 4) == build("zb-h1", 2, 4)
    with pytest.raises(ScheduleError, match="unknown schedule 1f1c; did you mean 1f1b"):
        build("1f1c", 2, 4)


@pytest.mark.parametrize(
    ("name", "p", "m", "options", "told"),
    [
        ("dualpipe", 4, 6, {}, "needs an even number of at least 8 microbatches, got 6; the nearest is 8."),
        ("dualpipe", 4, 11, {}, "needs an even number of at least 8 microbatches, got 11; the nearest is 12."),
        ("dualpipe", 3, 8, {}, "needs an even number of ranks, got 3; the nearest is 4."),
        ("dualpipe-v", 4, 7, {}, "needs at least 8 microbatches, got 7; the nearest is 8."),
        ("1f1b", 0, 4, {}, "needs at least 1 rank and 1 microbatch, got 0 and 4."),
        ("1f1b", 2, 4, {"chunks": 2}, "1f1b has 1 chunk(s) per rank, not 2."),
        ("interleaved", 2, 4, {"chunks": 0}, "interleaved needs at least 1 chunk per rank, got 0."),
        ("interleaved", 4, 8, {"microbatch_group_size_per_vp_stage": 2}, "of at least 4, the number of ranks, got 2."),
        ("zb-v", 4, 8, {"depth": 2}, "zb-v takes no option depth."),
        ("gpipe", 4, 8, {"memory": 4}, "rank 0, step 4, 0F4: over the memory limit of 4; the rank holds up to 8"),
    ],
)
def test_numbers_a_schedule_cannot_mean(name: str, p: int, m: int, options: dict[str, int], told: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        build(name, p, m, **options)  # type: ignore[arg-type]
    assert told in str(caught.value)


def test_the_search_gets_what_build_is_told() -> None:
    options = {"costs": Costs(10, 14, 7), "memory": 2.0, "placement": "v", "objective": "period", "effort": 0.1}
    assert build("ZB-auto", 2, 4, **options) == zb_auto(2, 4, **options)  # type: ignore[arg-type]
    assert build("zb-auto", 2, 4, chunks=4, effort=0.1).placement == loop(2, 4)


def test_torchs_letters_cannot_say_a_shared_vocabulary() -> None:
    """They left out half of the table, which was read back as another."""
    with pytest.raises(ScheduleError, match="1f1b has passes C, E, EW, S, T, and torch"):
        to_csv(with_vocabulary(build("1f1b", 2, 2)), torch=True)


def test_numbers_that_a_file_asks_for_are_compared_before_they_are_counted_out() -> None:
    """A file of two rows with pp 200,000,000 took 3 GB of memory before it was refused."""
    table = to_json(build("1f1b", 2, 2))
    tracemalloc.start()
    try:
        many = table.replace('"pp": 2', '"pp": 1000000')
        assert "ranks has 2 lists, pp is 1000000" in sentence(many)
        assert "there are 1000000 microbatches" in sentence(
            table.replace('"microbatches": 2', '"microbatches": 1000000')
        )
        assert "chain 1000000 must divide" in sentence(table.replace('"chain": 2', '"chain": 1000000'))
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_csv_cannot_say_which_stages_are_depths_of_multi_token_prediction() -> None:
    """It was read as a model of five stages: a makespan of 45.6 for a table that takes 33."""
    table = Recipe("1f1b", 4, 8, depths=(3,)).whole()
    with pytest.raises(ScheduleError, match="multi-token prediction, which CSV cannot"):
        to_csv(table)
    assert from_json(to_json(table)).placement.depths == 1
