"""A step predicted again from measured passes: by hand, and as a run says it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from statistics import median

import pytest
from short_run import config, datasets, run_of
from tiny import STYLES

from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import Costs, Pass, build
from megapipe.schedule.costs_file import dump_costs
from megapipe.schedule.kinds import Kind
from megapipe.schedule.measured.costs import MeasuredPass
from megapipe.training.report.again import predict_again

TABLE = build("1f1b", 2, 2)
# A forward takes 2 s, a backward 3 s; on the second stage 4 and 5. A message takes 0.5 s, and the
# host 0.25 s between two passes. Rows: kind, microbatch, its request, its input's arrival, its end.
FIRST = [("F", 0, 0, 0, 2), ("F", 1, 2.25, 2.25, 4.25), ("BW", 0, 4.5, 12, 15), ("BW", 1, 15.25, 21.5, 24.5)]
SECOND = [("F", 0, 0, 2.5, 6.5), ("BW", 0, 6.75, 6.75, 11.75), ("F", 1, 12, 12, 16), ("BW", 1, 16.25, 16.25, 21.25)]


def ran(stage: int, rows, clock: float = 0.0) -> list[MeasuredPass]:
    """The passes of a rank, whose clock is ahead by some seconds."""
    found = []
    for kind, n, asked, begin, end in rows:
        found.append(MeasuredPass(Pass(Kind(kind), stage, n), begin + clock, end + clock, begin - asked))
    return found


@pytest.mark.parametrize("clock", [0.0, 1000.0])
def test_a_step_is_replayed_with_its_messages_and_its_host(clock):
    again = predict_again([[ran(0, FIRST), ran(1, SECOND, clock)]], Costs(), TABLE, [26.0, 26.0])
    assert again.passes == pytest.approx(24.5, abs=0.3)  # one message waits for the host of its receiver or not
    assert again.bubble == pytest.approx((24.5 - 10) / 24.5, abs=0.02)
    assert again.outside == pytest.approx(26 - 24.5)
    assert again.costs.comm == pytest.approx((0.25,), abs=0.13)


def test_a_pass_that_takes_longer_than_its_kind_lengthens_the_step_by_that():
    late = [*SECOND[:3], ("BW", 1, 16.25, 16.25, 31.25)]
    first = [*FIRST[:3], ("BW", 1, 15.25, 31.5, 34.5)]
    usual, slow = ([[ran(0, rows), ran(1, other)]] for rows, other in ((FIRST, SECOND), (first, late)))
    found = predict_again(slow, Costs(), TABLE, [30.0])
    alone = predict_again(usual, Costs(), TABLE, [30.0])
    assert found.passes - alone.passes == pytest.approx(10, abs=0.3)


@pytest.mark.parametrize("place", range(5))
def test_one_slow_step_among_five_changes_nothing(place):
    usual = [ran(0, FIRST), ran(1, SECOND)]
    # Everything in it takes ten times as long: passes, messages and the host.
    ten = [[(kind, n, *(10 * x for x in times)) for kind, n, *times in rows] for rows in (FIRST, SECOND)]
    steps = [usual] * 5
    steps[place] = [ran(0, ten[0]), ran(1, ten[1])]
    seconds = [26.0] * 5
    seconds[place] = 260.0
    spoilt = predict_again(steps, Costs(), TABLE, seconds)
    alone = predict_again([usual] * 5, Costs(), TABLE, [26.0] * 5)
    assert (spoilt.passes, spoilt.bubble, spoilt.outside) == (alone.passes, alone.bubble, alone.outside)
    assert spoilt.costs.comm == alone.costs.comm
    assert spoilt.costs.f == alone.costs.f


def test_another_table_of_the_same_stages_is_predicted_from_the_same_passes():
    again = predict_again([[ran(0, FIRST), ran(1, SECOND)]], Costs(), TABLE, [26.0])
    passes, bubble = again.of_table(build("1f1b", 2, 8))
    # The second stage runs eight microbatches without a pause, and the first one begins and ends.
    assert passes == pytest.approx(2 + 8 * 9 + 3, rel=0.07)
    assert bubble == pytest.approx(1 - 8 * (2 + 3) / passes, abs=0.01)


def train(mesh: ProcessMesh, asked) -> None:
    run_of(mesh, asked).train()


def test_a_run_whose_prediction_fails_says_so_once_and_predicts_by_measured_times(tmp_path, capsys):
    datasets()
    # The first stage has a hundredth of the second one's work, by this file.
    (tmp_path / "costs.json").write_text(dump_costs(Costs(f=(0.01, 1.0), b=(0.01, 1.0), w=(0.01, 1.0))))
    asked = config(STYLES["gpt2"], pp=2, pipeline_costs=str(tmp_path / "costs.json"))
    log = replace(asked.log, metrics_file=str(tmp_path / "steps"))
    asked = replace(asked, log=log, batch=replace(asked.batch, train_iters=8))
    run_threads(partial(train, asked=asked), pp=2, timeout_s=60)
    said = capsys.readouterr().out
    assert said.count("passes and messages take other times than by --pipeline-costs: by measured times") == 1
    rows = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
    assert ["by_measured_passes" in row for row in rows] == [False] * 5 + [True] * 3  # the first is not measured
    again = rows[-1]["by_measured_passes"]
    assert f"the bubble is {again['bubble']:.1%}, not {rows[1]['predicted_bubble']:.1%}" in said
    assert f"a step takes {again['step_ms']:.1f} ms" in said
    assert rows[-1]["predicted_bubble"] == again["bubble"]
    assert rows[-1]["predicted_passes_ms"] < again["step_ms"]
    # The log closes with a line on the run. The first step is slower than all others.
    tokens = 8 * asked.global_batch_size * asked.batch.sequence
    seconds = median(row["step_ms"] for row in rows[1:]) / 1e3
    assert said.splitlines()[-1] == (
        f"ended after iteration 8: 8 steps, {tokens:,} tokens; median {seconds:.4g} s a step; bubble "
        f"{rows[-1]['bubble']:.1%} of the time of the passes, predicted by measured times {again['bubble']:.1%}; "
        "no checkpoint"
    )


def test_a_run_without_a_pipeline_has_no_bubble_to_predict_again(tmp_path, capsys):
    datasets()
    asked = config(STYLES["gpt2"])
    log = replace(asked.log, metrics_file=str(tmp_path / "steps"))
    train(ProcessMesh.single(), replace(asked, log=log, batch=replace(asked.batch, train_iters=6)))
    assert "other times" not in capsys.readouterr().out
    row = json.loads((tmp_path / "steps").read_text().splitlines()[-1])
    assert row["predicted_bubble"] == 0
    assert row["by_measured_passes"]["step_ms"] > 0
