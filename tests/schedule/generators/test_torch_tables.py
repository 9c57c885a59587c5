"""Pass by pass, our tables are those of torch.distributed.pipelining, where it has the schedule."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megapipe.schedule import SCHEDULES, Costs, Schedule, ScheduleError, build, from_csv, load, to_csv
from megapipe.schedule.families.offload.copies import with_offload, with_recompute
from megapipe.schedule.families.replicas import with_replicas
from megapipe.schedule.families.sharding.sharded import UnshardedStages, with_sharded_weights
from megapipe.schedule.families.step.asked import StepPasses
from megapipe.schedule.kinds import LAYERS


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


def read_by_torch(file: Path, table: Schedule) -> dict[int, list[Any]]:
    """Return {rank: the passes, sends and receives} that torch's runtime makes of a file."""
    made = object.__new__(torch_schedules()._PipelineScheduleRuntime)
    made.pp_group_size, made._n_microbatches = table.placement.num_ranks, table.num_microbatches
    made._num_stages = table.placement.num_stages
    made._stages, made._defer_pp_recv, made.pipeline_order = [], False, {}
    made._load_csv(str(file))
    return made.pipeline_order_with_comms


def tables(name: str) -> Iterator[Schedule]:
    """Yield a schedule as it is, and with passes that torch's runtime adds by itself."""
    plain = build(name, 4, 8)
    yield plain
    # Where ranks have several stages, the last drops each one's weights sooner, and gathers them more often.
    yield with_sharded_weights(plain, living=[UnshardedStages(2, 2)] * 3 + [UnshardedStages(1, 1)])
    yield with_replicas(StepPasses(reduce=True, gather=True, update=True).around(plain, Costs()))
    yield StepPasses(reduce=True, update=True, validate=True).around(plain, Costs())


TWO_COPIES = ("chimera", "dualpipe")


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in (*TWO_COPIES, "zb-auto")])
def test_torch_and_we_read_each_file_that_we_write_for_torch(name: str, tmp_path: Path) -> None:
    for table in tables(name):
        file = tmp_path / "table.csv"
        file.write_text(to_csv(table, torch=True))
        plain = table.without(table.kinds - set(LAYERS))
        assert load(file).ranks == plain.ranks
        for rank, actions in read_by_torch(file, table).items():
            passes = [str(action) for action in actions if action.is_compute_op]
            assert passes == [cell for cell in file.read_text().splitlines()[rank].split(",") if cell]
            assert len(passes) == len(plain.ranks[rank])
        assert len({line.count(",") for line in file.read_text().splitlines()}) == 1


@pytest.mark.parametrize("name", TWO_COPIES)
def test_two_copies_of_the_model_are_not_written_for_torch(name: str) -> None:
    """Its reader ended with: Got 4 forward microbatches for stage 0, expected 8."""
    with pytest.raises(ScheduleError, match=r"has two copies of the model, and torch\.distributed\.pipelining has one"):
        to_csv(build(name, 4, 8), torch=True)


def test_copies_and_recomputation_are_not_left_out_for_torch() -> None:
    """The file of a table that fits in a memory was one that does not, in lines of unequal length."""
    table = with_recompute(with_offload(build("1f1b", 2, 4), HALF := Costs(o=0.5, l=0.5)), HALF, chosen=[(1, 0)])
    with pytest.raises(ScheduleError, match=r"has passes L, O, R, and torch\.distributed\.pipelining has none"):
        to_csv(table, torch=True)
