"""progress.txt as Megatron-LM writes it."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime

import pytest
from short_run import config, run_of
from tiny import STYLES

from megapipe.config import CheckpointConfig, LogConfig
from megapipe.distributed.mesh import ProcessMesh
from megapipe.training.report.job_log import first_job

HEAD = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\tJob ID: 77\t# GPUs: 1\t"
SPEEDS = r"Job throughput: \d+\.\d TFLOP/s/GPU\tCumulative throughput: \d+\.\d TFLOP/s/GPU\t"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_writes_megatrons_lines_when_it_starts_and_saves(tmp_path, monkeypatch, asynchronous):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    flags = CheckpointConfig(save=str(tmp_path), save_interval=2, async_save=asynchronous)
    asked = config(STYLES["gpt2"])
    asked = replace(asked.with_fields(train_iters=4), checkpoint=flags, log=LogConfig(log_progress=True))
    run_of(ProcessMesh.single(), asked).train()
    first, *lines = (tmp_path / "progress.txt").read_text().splitlines()
    assert re.fullmatch(HEAD + "Starting job", first)
    begun = [line for line in lines if "throughput" in line]
    what = "Saving async checkpoint" if asynchronous else "Saved checkpoint"
    flops = []
    for n, line in zip((2, 4), begun, strict=True):
        end = r"Floating-point operations: (\d\.\d\de\+\d\d)\tTokens \(in billions\): 0\.00"
        match = re.fullmatch(f"{HEAD}{what}\tIteration: {n}\t{SPEEDS}{end}", line)
        assert match, line
        flops.append(float(match[1]))
    assert flops[1] == pytest.approx(2 * flops[0], rel=0.01)
    done = [line for line in lines if line not in begun]
    assert len(done) == 2 * asynchronous
    assert all(re.fullmatch(f"{HEAD}Saved async checkpoint\tIteration: \\d", line) for line in done)


def test_throughput_counts_from_the_first_job_of_the_same_size():
    def line(second: int, devices: int, *what: str) -> str:
        return "\t".join([f"2026-01-01 00:00:{second:02d}", "Job ID: 1", f"# GPUs: {devices}", *what])

    saved = ("Iteration: 1", "Job throughput: 1", "Cumulative throughput: 1", "Floating-point operations: 5.00e+03")
    rows = [line(1, 8, "Starting job"), line(2, 8, "Saved checkpoint", *saved), line(3, 4, "Starting job")]
    rows += [
        "written by hand",
        line(4, 4, "Saving async checkpoint", *saved[:3], "Floating-point operations: 9.00e+03"),
    ]
    at = datetime(2026, 1, 1).timestamp()
    assert first_job("\n".join(rows), 4) == (at + 3, 5000.0)
    assert first_job("\n".join(rows), 8) is None
    rows += [line(5, 8, "Starting job"), line(6, 8, "Starting job")]
    assert first_job("\n".join(rows), 8) == (at + 5, 5000.0)  # 9,000 were begun and never complete
