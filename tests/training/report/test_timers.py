"""Megatron's timers out of the passes of a step, and its lines."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import numpy as np
import pytest
from short_run import config
from tiny import STYLES

from megapipe.data.build import Datasets
from megapipe.distributed.mesh import ProcessMesh
from megapipe.models.provider import gpt_provider
from megapipe.schedule import Kind, Pass
from megapipe.schedule.measured.costs import MeasuredPass
from megapipe.training.forward_step import forward_step
from megapipe.training.pretrain import Training
from megapipe.training.report.timers import of_step, text


def ran(name: str, begin: float, end: float, waited: float = 0.0) -> MeasuredPass:
    return MeasuredPass(Pass(Kind(name[1:-1]), int(name[0]), int(name[-1])), begin, end, waited)


def test_passes_waits_and_the_update_are_added_up_by_megatrons_names():
    row = [
        ran("0V0", 1.0, 1.5, 0.25),
        ran("0F0", 2.0, 3.0, 0.5),
        ran("1F1", 3.0, 7.0),  # an overlapped pair
        ran("1B0", 3.0, 7.0),
        ran("0BW0", 10.0, 12.0, 3.0),
        ran("1W0", 12.0, 12.5),
        ran("0U0", 13.0, 14.0),
    ]
    assert of_step(row, end=16.0) == {
        "forward-backward": 14.0 - 0.75 - 1.5,
        "optimizer": 0.5 + 1.0 + 2.0,
        "forward-compute": 1.0 + 2.0,
        "backward-compute": 2.0 + 2.0 + 0.5,
        "forward-recv": 0.5,
        "backward-recv": 3.25,
    }


def test_the_end_of_the_update_is_added_however_short():
    assert of_step([ran("0F0", 1.0, 2.0)], end=2.25)["optimizer"] == 0.25


LABEL = "    optimizer ......................................: "


@pytest.mark.parametrize(
    ("option", "lines"),
    [
        ("minmax", ["(min, max) time across ranks (ms):", LABEL + "(1.25, 20.00)"]),
        ("max", ["max time across ranks (ms):", LABEL + "20.00"]),
        ("all", ["times across ranks (ms):", "  optimizer:", "     rank  0: 20.00", "     rank  2: 1.25"]),
    ],
)
def test_the_lines_are_megatrons(option, lines):
    """As megatron/core/timers.py formats them; ranks without a time are left out."""
    assert text({"optimizer": [0.02, 0.0, 0.00125]}, option).splitlines() == lines


class Slow:
    """Samples that take 0.2 s each to read."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, sample: int) -> np.ndarray:
        time.sleep(0.2)
        return np.arange(17, dtype=np.int64)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("isolated", [False, True])
def test_waiting_for_samples_is_the_batch_generators_time_and_no_passs(capsys, workers, isolated):
    """Samples were waited for within forwards, if threads read them: the timer was 0, and the stage was slow."""
    asked = config(STYLES["gpt2"])
    data = replace(asked.data, num_workers=workers, reset_attention_mask=isolated)
    log = replace(asked.log, timing_log_level=2, timing_log_option="max", log_interval=1)
    asked = replace(
        asked,
        data=data,
        log=log,
        batch=replace(asked.batch, train_iters=1),
        optimizer=replace(asked.optimizer, lr_warmup_iters=0),
    )
    mesh = ProcessMesh.single()
    Training(asked, mesh, gpt_provider, forward_step, Datasets(Slow(), None, None), 127, time.monotonic()).train()
    found = dict(re.findall(r" (\S+) \.+: ([\d.]+)", capsys.readouterr().out))
    # One thread reads 4 microbatches of 2 samples one after the other, for 1.6 s; no pass hides the first one's 0.4 s.
    assert float(found["batch-generator"]) > 300
    assert float(found["forward-compute"]) < 1200
    assert "forward-recv" not in found or float(found["forward-recv"]) < 100
