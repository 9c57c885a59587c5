"""Pass by pass, our tables are those of torch.distributed.pipelining, where it has the schedule."""

from functools import cache
from typing import Any

import pytest

from megapipe.schedule import build, from_csv, to_csv


@cache
def torch_schedules() -> Any:
    """Imported by the worker that needs it: it takes a second."""
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def as_csv(rows: list[list[Any]]) -> str:
    return "\n".join(",".join("" if action is None else str(action) for action in row) for row in rows)


def torch_rows(name: str, p: int, m: int, chunks: int) -> list[list[Any]]:
    """The orders that torch's constructor would make, without the live stages it wants to see."""
    made = object.__new__(getattr(torch_schedules(), name))
    made.pp_group_size, made._n_microbatches = p, m
    made._num_stages = made.num_stages = p * chunks
    made.n_local_stages = chunks
    made.number_of_rounds = max(1, m // p)
    made.microbatches_per_round = m // made.number_of_rounds
    return [made._calculate_single_rank_operations(rank) for rank in range(p)]


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (2, 5), (4, 4), (4, 8), (4, 11), (8, 16), (8, 23)])
def test_1f1b_is_torchs(p: int, m: int) -> None:
    made = object.__new__(torch_schedules().Schedule1F1B)
    made._num_stages, made._n_microbatches = p, m
    rows = list(made._get_pipeline_order().values())
    # Torch 2.13's table (not its runtime) counts the last rank's forwards from 1.
    rows[-1] = [a._replace(microbatch_index=a.microbatch_index - 1) if "F" in str(a) else a for a in rows[-1]]
    assert from_csv(as_csv(rows)).ranks == build("1f1b", p, m).ranks


@pytest.mark.parametrize(
    ("p", "m"), [(1, 3), (2, 4), (3, 5), (4, 2), (4, 7), (4, 8), (4, 10), (4, 16), (8, 16), (8, 18)]
)
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("interleaved", "ScheduleInterleaved1F1B"), ("interleaved-zb", "ScheduleInterleavedZeroBubble")],
)
def test_interleaved_is_torchs(ours: str, theirs: str, p: int, m: int, chunks: int) -> None:
    assert from_csv(as_csv(torch_rows(theirs, p, m, chunks))).ranks == build(ours, p, m, chunks=chunks).ranks


OTHERS = {
    ("zb-v", "ScheduleZBVZeroBubble", 2): [
        *[(1, 1), (1, 4), (2, 1), (2, 6), (3, 4), (4, 5), (4, 8), (4, 13), (8, 16), (8, 24)],
    ],
    ("dualpipe-v", "ScheduleDualPipeV", 2): [
        *[(1, 2), (2, 4), (2, 7), (3, 6), (4, 8), (4, 13), (5, 12), (8, 16), (8, 24)],
    ],
    # ZB-H1 is torch's interleaved zero bubble with one chunk.
    ("zb-h1", "ScheduleInterleavedZeroBubble", 1): [(1, 2), (2, 4), (4, 6), (4, 12), (8, 16)],
}


@pytest.mark.parametrize(
    "ours, theirs, chunks, p, m", [(*names, *size) for names, sizes in OTHERS.items() for size in sizes]
)
def test_other_tables_are_torchs(ours: str, theirs: str, chunks: int, p: int, m: int) -> None:
    assert from_csv(as_csv(torch_rows(theirs, p, m, chunks))).ranks == build(ours, p, m).ranks


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "zb-v", "v-min", "dualpipe-v"])
def test_torch_reads_what_we_write(name: str) -> None:
    schedule = build(name, 4, 8)
    for row, line in zip(schedule.ranks, to_csv(schedule, torch=True).splitlines(), strict=True):
        actions = [torch_schedules()._Action.from_str(cell) for cell in line.split(",")]
        assert ["" if a is None else str(a) for a in actions] == line.split(",")
        assert len([a for a in actions if a is not None]) == len(row)
