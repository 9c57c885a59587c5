"""--reschedule-after: another table between two steps, the same bits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from short_run import alone, config, run_of
from tiny import STYLES

from megapipe.config import Config
from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.training.hooks import Callback, Hooks

# One microbatch at a time, all W at the end: as slow as naive, and it holds all four.
SLOW = ",".join(f"{{0}}F{i},{{0}}B{i}" for i in range(4)) + "," + ",".join(f"{{0}}W{i}" for i in range(4))


class Patient(Callback):
    """Notes what was trained, and waits for a search."""

    def __init__(self) -> None:
        self.losses: list[tuple[float, float]] = []

    def after_step(self, run, result) -> None:
        self.losses.append((result.losses["lm loss"], result.grad_norm))
        if search := self.training.hooks.callbacks[-1]._search:
            search._process.wait()


def train(mesh: ProcessMesh, config: Config) -> tuple[list[tuple[float, float]], str]:
    patient = Patient()
    patient.training = training = run_of(mesh, config, Hooks(callbacks=(patient,)))
    training.train()
    return patient.losses, training.run.stages.schedule.name


def test_a_run_measures_its_passes_and_goes_on_under_a_better_table_with_the_same_bits(tmp_path: Path, capsys):
    file = tmp_path / "slow.csv"
    file.write_text("\n".join(SLOW.format(rank) for rank in range(2)))
    usual = config(STYLES["gpt2"], pp=2, schedule=str(file))
    asked = replace(usual, parallel=replace(usual.parallel, reschedule_after=4))
    for losses, name in run_threads(partial(train, config=asked), pp=2, timeout_s=60):
        assert losses == alone("gpt2")
        assert name == "zb-auto"
    said = "".join(line for line in capsys.readouterr().out.splitlines() if "resched" in line)
    assert ": under slow.csv its passes take" in said
    assert "less. The run goes on under it." in said
    assert "rescheduling gained" in said
