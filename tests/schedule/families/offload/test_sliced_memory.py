"""Slices moved out of the way: what goes with each, when keys and values are away, what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random

import pytest

from megapipe.commands import schedules
from megapipe.schedule import Costs, Kind, Pass, Schedule, ScheduleError, build, from_json, simulate, to_json, verify
from megapipe.schedule.families.offload.copies import with_offload, with_recompute
from megapipe.schedule.families.offload.weigh import Verb, applied, places, scales
from megapipe.schedule.shapes.slices.slices import in_place, slices

KEYS = Costs(mem_k=0.25, mem_r=0.125)


def one_rank(steps: str, documents: tuple[tuple[int, ...], ...] = ()) -> Schedule:
    """One stage and a microbatch in two slices of one length: kinds and slices, as `F0 O0 F1 BW1 L0 BW0`."""
    row = tuple((Pass(Kind[text[:-1]], 0, 0, int(text[-1])),) for text in steps.split())
    return replace(build("1f1b", 1, 1), name="mine", ranks=(row,), cuts=(1, 1), documents=documents)


def held(steps: str, costs: Costs = KEYS, **more: tuple[tuple[int, ...], ...]) -> list[float]:
    table = one_rank(steps, **more)
    verify(table)
    return [at for _, at in simulate(table, costs).curves[0]]


def test_keys_leave_with_the_last_slice_of_their_document_and_come_back_with_it() -> None:
    # A slice is 0.5, a quarter of it keys: O0 takes the rest, 0.375; O1 that and the keys of both, 0.625.
    all_away = held("F0 O0 F1 O1 L1 BW1 L0 BW0")
    assert all_away[:4] == [0.5, 0.125, 0.625, 0]
    # Before its backward all keys are back, and gradients for those of slice 0 are begun.
    assert all_away[4:6] == [0.625, 0.75]
    assert (max(all_away), all_away[-1]) == (0.75, 0)
    # Two documents: each slice is the last of its own, and nobody reads its keys.
    assert held("F0 O0 F1 O1 L1 BW1 L0 BW0", documents=((1,),))[:4] == [0.5, 0, 0.5, 0]


def test_what_is_computed_again_keeps_its_input_and_the_keys_that_others_read() -> None:
    # 0.0625 of input, and 0.125 of keys for the slice behind; the last slice keeps none.
    assert held("F0 F1 R1 BW1 R0 BW0")[:3] == [0.1875, 0.25, 0.6875]
    assert held("F0 F1 R1 BW1 R0 BW0", documents=((1,),))[:2] == [0.0625, 0.125]


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ("F0 F1 O1 R0 L1 BW1 BW0", "rank 0 waits at step 3, 0R0.0, for 0L0.1"),
        ("F0 F1 O1 BW1 L1 BW0", "rank 0, step 4, 0L0.1: comes too late: 0BW0.1 at step 3 uses what 0O0.1 at step 2"),
        ("F0 O0 F1 BW1 BW0", "rank 0, step 1, 0O0.0: nothing brings it back; 0L0.0 is missing"),
    ],
)
def test_what_reads_keys_that_are_away_is_refused_by_the_line(steps: str, told: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        verify(one_rank(steps))
    assert f"\n  {told}" in str(caught.value)


def test_slices_of_long_sequences_are_copied_while_others_run() -> None:
    costs = Costs(attention_f=0.6, attention_b=0.6, attention_w=0.6, o=0.5, l=0.5, mem_k=0.2)
    plain = slices(partial(build, "1f1b", 4), 4, (2.0, 1.0, 1.0), costs)
    table = with_offload(plain, costs)
    verify(table, costs=costs)
    before, after = simulate(plain, costs), simulate(table, costs)
    assert after.makespan == before.makespan
    assert after.peak[0] < 0.5 * before.peak[0]
    assert from_json(to_json(table)) == table
    with pytest.raises(ScheduleError, match="1f1b has no slice 12 on stage 0"):
        with_recompute(plain, costs, chosen=[(0, 12)])


@pytest.mark.parametrize(("name", "p"), [("1f1b", 4), ("zb-v", 2)])
def test_what_is_weighed_without_making_it_is_what_the_clock_says(name: str, p: int) -> None:
    dice = Random(5)
    for documents in ((), ((2,),), ((1,), (), (1, 2), (2,))):
        drawn = {key: dice.uniform(0.3, 2) for key in ("f", "b", "w", "o", "l", "mem_w")}
        costs = Costs(**drawn, comm=0.1, mem_o=0.75, mem_r=0.125, mem_k=0.2, attention_f=0.4)
        table = in_place(build(name, p, 4), (3.0, 2.0, 1.5), documents)
        choices = {place: dice.choice(list(Verb)[1:]) for place in places(table) if dice.random() < 0.7}
        weight, time = scales(table, costs, 2.0)(choices), simulate(applied(table, choices, costs), costs)
        assert (weight.makespan, tuple(weight.peak)) == (time.makespan, time.peak)


def test_show_copies_and_chooses_for_slices(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "show 1f1b --pp 8 --microbatches 8 --slices 4 --attention-share 0.6 --copy-ratio 0.5"
    assert schedules.main(asked.split()) == 0
    said = capsys.readouterr().out
    assert "of 256 activations of a stage and slice 248 copied to the host and back; without, 29.25 at a mem" in said
    assert "makespan 29.25" in said
    assert "peak 0.7863" in said  # of 3.03 without
    assert schedules.main(f"{asked} --memory 1.2 --solve".split()) == 0
    said = capsys.readouterr().out
    assert "slices, work: 39.3%" in said
    assert "makespan 29.25" in said
