"""Merged traces, from files made with known times."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path

import pytest

from megapipe.commands import traces
from megapipe.errors import ConfigError, DataError
from megapipe.schedule import Costs, Schedule, build, simulate
from megapipe.schedule.families.sharding.sharded import UnshardedStages, with_sharded_weights
from megapipe.schedule.families.step.optimizer import with_optimizer
from megapipe.schedule.families.step.reduction import with_reduction
from megapipe.schedule.kinds import Lane
from megapipe.schedule.measured.merged import merge
from megapipe.schedule.measured.traces import pipelines, predict, read, summarise
from megapipe.schedule.shapes.slices.slices import slices

CLOCKS = [10_000.0, 3_000.0]  # microseconds at which each rank's profiler started


def write_traces(folder: Path, name: str = "1f1b", steps: int = 2) -> None:
    """Two ranks, F and B of 1 ms, 4 microbatches."""
    write_runs(folder, build(name, 2, 4), Costs(), steps)


def write_runs(folder: Path, schedule: Schedule, costs: Costs, steps: int = 2) -> None:
    """The simulated times with a wait before every pass that idles; of other lanes a label when a pass begins, and a
    wait that lasts until its end."""
    time = simulate(schedule, costs)
    for rank, row in enumerate(schedule.ranks):
        events, free = [], 0.0
        for step in range(steps):
            for (label,) in row:
                begin, end = ((step * 100 + when[label]) * 1000 for when in (time.start, time.end))
                if label.kind.traits.lane is not Lane.COMPUTE:
                    posted = min(begin, max(free, step * 100_000))
                    events += [(str(label), posted, posted + 1e-3), (f"wait {label}", posted + 1e-3, end)]
                    continue
                if begin > free:
                    events.append(("recv 0F0 <-0", free, begin))
                events.append((str(label), begin, end))
                free = end
        content = {
            "baseTimeNanoseconds": CLOCKS[rank] * 1000,
            "traceEvents": [
                {
                    "ph": "X",
                    "cat": "user_annotation",
                    "name": n,
                    "ts": a - CLOCKS[rank],
                    "dur": b - a,
                    "pid": 7,
                    "tid": 1,
                }
                for n, a, b in events
            ],
        }
        (folder / f"rank-{rank}.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))


def test_what_runs_beside_the_passes_is_on_its_lane_measured_and_predicted(tmp_path):
    """G and A on the data-parallel lane, U and V among the passes; the prediction has them where the run had."""
    costs = Costs(g=1.5, u=0.25, a=0.5, v=0.125)
    table = with_optimizer(with_reduction(build("interleaved", 2, 4, chunks=2), costs), barrier=False, gather="ahead")
    write_runs(tmp_path, table, costs)
    (ranks,) = pipelines([read(p) for p in sorted(tmp_path.iterdir())])
    schedule, predicted = predict(ranks)
    expected = simulate(table, costs)
    assert schedule.kinds == table.kinds
    assert predicted.start == pytest.approx(expected.start)
    assert predicted.end == pytest.approx(expected.end)
    lanes = defaultdict(set)
    for event in merge(ranks, schedule, predicted):
        if event["ph"] == "X" and event["name"][1:2] in {"G", "A"} and event["cat"] != "user_annotation":
            lanes[event["cat"], event["tid"]].add(event["name"])
    on_lane = [{str(p) for (p,) in row if p.kind.traits.lane is Lane.DP} for row in table.ranks]
    assert [lanes["predicted", thread] for thread in (1, 3)] == on_lane
    assert lanes["dp", "dp"] == set.union(*on_lane)
    for row, busy in zip(summarise(ranks, predicted), expected.busy, strict=True):
        assert row.busy_ms == pytest.approx(busy)  # of the compute lane alone


def test_gathers_and_sums_of_runs_are_measured_and_stand_where_they_were_begun(tmp_path):
    costs = Costs(g=2.5, a=1.25)
    table = with_sharded_weights(build("interleaved", 2, 4, chunks=2), costs, UnshardedStages(1, 1))
    write_runs(tmp_path, table, costs)
    (ranks,) = pipelines([read(p) for p in sorted(tmp_path.iterdir())])
    schedule, predicted = predict(ranks)
    assert schedule.ranks == table.ranks
    expected = simulate(table, costs)
    assert predicted.end == pytest.approx(expected.end)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-v"])
def test_the_bubble_of_a_perfect_run_is_the_simulators(tmp_path, name):
    write_traces(tmp_path, name)
    (ranks,) = pipelines([read(p) for p in sorted(tmp_path.iterdir())])
    schedule, predicted = predict(ranks)
    expected = simulate(build(name, 2, 4))
    assert schedule.placement == build(name, 2, 4).placement
    assert predicted.makespan == pytest.approx(expected.makespan)
    for row, busy in zip(summarise(ranks, predicted), expected.busy, strict=True):
        assert row.step_ms == pytest.approx(expected.makespan)
        assert row.bubble == pytest.approx(1 - busy / expected.makespan)
        assert row.predicted_bubble == pytest.approx(row.bubble)


def test_slices_of_a_sequence_keep_their_own_times(tmp_path):
    costs = Costs(attention_f=0.5, attention_b=0.5)
    table = slices(lambda m: build("zb-h1", 2, m), 4, (2, 1, 1), costs)
    write_runs(tmp_path, table, costs)
    (ranks,) = pipelines([read(p) for p in sorted(tmp_path.iterdir())])
    schedule, predicted = predict(ranks)
    assert schedule.ranks == table.ranks
    assert predicted.end == pytest.approx(simulate(table, costs).end)


def test_ranks_are_put_on_one_clock(tmp_path):
    write_traces(tmp_path)
    first, second = (read(p).steps[0][0] for p in sorted(tmp_path.iterdir()))
    assert str(first.label) == "0F0"
    assert str(second.label) == "1F0"
    assert second.start - first.start == pytest.approx(1000.0)


def test_two_pipelines_are_told_apart(tmp_path):
    write_traces(tmp_path)
    for rank in range(2):
        (tmp_path / f"rank-{rank + 2}.json.gz").write_bytes((tmp_path / f"rank-{rank}.json.gz").read_bytes())
    found = pipelines([read(p) for p in sorted(tmp_path.iterdir())])
    assert [[trace.rank for trace in ranks] for ranks in found] == [[0, 1], [2, 3]]


def test_dualpipes_two_chains_are_recognised_by_their_microbatches(tmp_path):
    schedule = build("dualpipe", 2, 8)
    time = simulate(schedule)
    for rank, row in enumerate(schedule.ranks):
        events = [
            {
                "cat": "user_annotation",
                "name": str(p),
                "ts": time.start[p] * 1e3,
                "dur": (time.end[p] - time.start[p]) * 1e3,
            }
            for step in row
            for p in step
        ]
        path = tmp_path / f"rank-{rank}.json"
        path.write_text(json.dumps({"baseTimeNanoseconds": 0, "traceEvents": events}))
    (ranks,) = pipelines([read(p) for p in sorted(tmp_path.iterdir())])
    measured, predicted = predict(ranks)
    assert measured.placement == schedule.placement
    for row, busy in zip(summarise(ranks, predicted), time.busy, strict=True):
        assert row.busy_ms == pytest.approx(busy)  # a pair counts once


def test_the_figure_has_each_rank_over_its_prediction(tmp_path):
    pytest.importorskip("matplotlib")
    write_traces(tmp_path)
    traces.main([str(tmp_path), "--svg", str(tmp_path / "a.svg")])
    ranks = [read(p) for p in sorted(tmp_path.glob("rank-*"))]
    lines = traces._one_step(ranks, *predict(ranks))
    assert [line.name for line in lines] == ["rank 0", "predicted", "rank 1", "predicted"]
    for measured, predicted in (lines[:2], lines[2:]):  # a perfect run: waits are left open, passes lie where predicted
        for a, b in zip(measured.boxes, predicted.boxes, strict=True):
            assert (a.item, a.start, a.end) == (b.item, pytest.approx(b.start), pytest.approx(b.end))
    said = (tmp_path / "a.svg").read_text().replace("\xa0", " ")
    assert "Pipeline 0, 4 microbatches: a step of median length, 15 ms, rank 0 idle 20.0%" in said


def test_a_file_that_is_no_trace_is_named(tmp_path):
    path = tmp_path / "rank-0.json"
    path.write_text("{}")
    with pytest.raises(DataError, match=r"rank-0\.json is not a trace of torch's profiler"):
        read(path)


def test_the_tool_writes_one_file_with_measured_and_predicted_passes(tmp_path, capsys):
    write_traces(tmp_path)
    traces.main([str(tmp_path), "--output", str(tmp_path / "all.json")])
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert list(processes) == ["rank 0", "rank 1", "predicted from the measured passes"]
    predicted = {(e["name"], round(e["ts"])) for e in events if e.get("cat") == "predicted"}
    measured = {
        (e["name"], round(e["ts"])) for e in events if e.get("cat") == "user_annotation" and "recv" not in e["name"]
    }
    assert predicted == measured
    assert "pipeline 0: 2 ranks, 4 microbatches" in capsys.readouterr().out


def test_a_missing_folder_is_not_called_by_a_flag_that_nobody_types() -> None:
    with pytest.raises(ConfigError, match=r"^the folder of traces is missing: megapipe traces runs/"):
        traces.main([])
