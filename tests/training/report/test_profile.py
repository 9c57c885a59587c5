"""The window of --profile-step-start and --profile-step-end."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapipe.config import LogConfig
from megapipe.training.report import profile
from megapipe.training.report.profile import Profiler


class Recorder:
    """In place of torch's profiler, which takes seconds: what is asked of it."""

    def __init__(self, **_: object) -> None:
        self.asked = list[str]()

    def start(self) -> None:
        self.asked.append("start")

    def stop(self) -> None:
        self.asked.append("stop")

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text("trace")


@pytest.mark.parametrize("steps, said", [(9, "3 to 4"), (3, "3 to 3")])
def test_a_window_opens_once_and_ends_with_its_last_step_or_the_run(tmp_path, monkeypatch, capsys, steps, said):
    made = list[Recorder]()
    monkeypatch.setattr(profile, "profile", lambda **how: made.append(Recorder(**how)) or made[-1])
    log = LogConfig(
        profile=True,
        use_pytorch_profiler=True,
        profile_step_start=2,
        profile_step_end=4,
        profile_ranks=(0,),
        tensorboard_dir=str(tmp_path),
    )
    profilers = [Profiler(log, rank) for rank in (0, 1)]
    for n in range(steps):
        for x in profilers:
            x.before(n)
            x.after(n + 1)
    for x in profilers:
        x.close(steps)
    assert [x.asked for x in made] == [["start", "stop"]]
    assert f"trace of iterations {said} of rank 0: " in capsys.readouterr().out
